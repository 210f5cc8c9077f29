"""Latent attention with an indexer (DeepSeek-V3.2, GLM-5) against `transformers`, in every mode."""

import random
from typing import Any

import pytest
import torch

from contracts.plan import Plan
from models.decoder.batch import SequenceSlice
from tests.support.group_harness import (
    PrefillThreads,
    ThreadGroup,
    greedy,
    group_config,
    meeting,
    prefill_config,
)
from tests.support.local_model import LocalModel
from tests.support.tiny_models import VOCABULARY, Checkpoints, prompts
from tests.support.transformers_oracle import Oracle

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0,
        "mscale_all_dim": 0.8, "original_max_position_embeddings": 16}  # fmt: skip


def draw(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a family and config fields that published checkpoints vary."""
    chance = random.Random(seed)
    layers, rope = chance.randint(2, 4), chance.choice([4, 6, 8])
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "index_topk": chance.choice([1, 5, 16, 33]),
        "index_n_heads": chance.choice([9, 12, 16]),  # few give equal scores: of 0
        "index_head_dim": chance.choice([rope, 16, 21]),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": chance.choice([6, 10]),
        "kv_lora_rank": chance.choice([12, 18]),
        "q_lora_rank": chance.choice([14, 22]),
        "v_head_dim": chance.choice([8, 14]),
        "first_k_dense_replace": chance.choice([0, 1]),
        "routed_scaling_factor": chance.choice([1.0, 2.5]),
        "attention_bias": chance.random() < 0.3,
    }
    if chance.random() < 0.5:
        fields["rope_parameters"] = YARN
    family = chance.choice(FAMILIES)
    if family == "glm_moe_dsa":
        others = [chance.choice(["full", "shared"]) for _ in range(layers - 1)]
        fields["indexer_types"] = ["full", *others]
    return family, fields


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(4))
def test_random_configs_equal_transformers_and_cuts_change_no_selection(
    tiny_checkpoint: Checkpoints, seed: int
) -> None:
    """In pieces with scattered blocks, beside another sequence, and as decodes."""
    family, fields = draw(seed)
    folder = tiny_checkpoint(family, **fields)
    model, oracle = LocalModel.load(folder, dtype="float32"), Oracle(folder)
    one, other = prompts(seed, [70, 30])
    expected = oracle.logits(one)
    for ids, logits in zip((one, other), model.forward([one, other]), strict=True):
        torch.testing.assert_close(logits, oracle.logits(ids), atol=1e-4, rtol=0)
    kv, table, pieces = model.new_pool(12), [5, 2, 11, 0, 7], []
    for start, stop in ((0, 19), (19, 68), (68, 69), (69, 70)):
        beside = SequenceSlice(other, 0, [8, 9])
        piece = SequenceSlice(one[start:stop], start, table)
        pieces.append(model.run([beside, piece], kv)[len(other) :])
    found = model.attention.logits(torch.cat(pieces))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_and_prefill_workers_equal_the_single_process_path(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    """With chunks, prefixes inside blocks, preemption; the last layer shares, on its last rows."""
    shares = {"indexer_types": ["full", "full", "shared"]} if family == "glm_moe_dsa" else {}
    folder = tiny_checkpoint(family, **shares)
    local = LocalModel.load(folder, dtype="float32")
    shared = prompts(1, [41])[0]
    sequences = [shared + tail for tail in prompts(2, [3, 30, 12, 1])]
    expected, tokens = local.last_logits(sequences), [local.greedy(ids, 12) for ids in sequences]
    config = group_config(1, 2, kv={"pool_tokens": 16 * 13}, schedule={"max_batch_tokens": 50})
    with ThreadGroup(folder, config) as group, group.client() as client:
        group.pin(Plan(r1=2, sequence_chunks=(0.4, 1.0)))
        for _ in range(2):
            ids = [client.submit(seq, sampling=greedy(12)) for seq in sequences]
            assert [client.generated(request)[0] for request in ids] == tokens
            found = client.last_logits(sequences)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    config = prefill_config(prefill={"disable_kv_cache": False})
    with PrefillThreads(folder, config) as workers, workers.client() as client:
        with meeting(workers.workers[0], len(sequences)):
            ids = [client.submit(seq, candidates=VOCABULARY) for seq in sequences]
        torch.testing.assert_close(client.logits(ids), expected, atol=2e-5, rtol=0)
        assert client.generated(client.submit(sequences[1], sampling=greedy(12)))[0] == tokens[1]
