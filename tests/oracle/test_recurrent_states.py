"""Layers with recurrent states: pages, states and checkpoints in every mode that serves them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.kv import block_manager
from contracts.errors import CheckpointError, ResourceError
from contracts.messages import Finished
from contracts.plan import Plan
from models.decoder.batch import SequenceSlice, StateRun
from models.decoder.decoder import AttentionHalf
from models.weights.checkpoint import Checkpoint, check_checkpoint
from tests.support.group_harness import (
    PrefillThreads,
    ThreadGroup,
    greedy,
    group_config,
    loop_of,
    meeting,
    prefill_config,
)
from tests.support.local_model import LocalModel
from tests.support.tiny_models import VOCABULARY, Checkpoints, prompts
from tests.support.transformers_oracle import Oracle

LINEAR, FULL = "linear_attention", "full_attention"
FAMILIES = ("qwen3_next", "qwen3_5_moe_text", "kimi_linear")


def draw(family: str, seed: int) -> dict[str, Any]:
    """Return config fields that published checkpoints vary."""
    chance = random.Random(f"{family} {seed}")
    key_heads, kv_heads = chance.choice([1, 2, 3]), chance.choice([1, 2])
    types = [chance.choice([LINEAR, FULL]) for _ in range(chance.randint(1, 3))]
    fields: dict[str, Any] = {
        "layer_types": [LINEAR, *types, FULL][:: chance.choice([1, -1])],
        "num_hidden_layers": len(types) + 2,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * chance.choice([1, 3]),
        "head_dim": chance.choice([8, 16, 24]),
        "partial_rotary_factor": chance.choice([0.25, 0.5, 1.0]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * chance.choice([1, 2, 4]),
        "linear_key_head_dim": chance.choice([8, 11]),
        "linear_value_head_dim": chance.choice([8, 13]),
        "linear_conv_kernel_dim": chance.choice([2, 4, 5]),
        "num_experts": chance.choice([4, 9]),
        "tie_word_embeddings": chance.random() < 0.3,
        "attention_bias": chance.random() < 0.3,
    }
    if family == "kimi_linear":
        return _drawn_kimi(fields, chance)
    if family == "qwen3_next":
        fields |= {"norm_topk_prob": chance.random() < 0.7, "intermediate_size": 40}
        fields["mlp_only_layers"] = chance.choice([[], [1]])
    return fields


def _drawn_kimi(fields: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    kept = ("layer_types", "num_hidden_layers", "linear_conv_kernel_dim", "tie_word_embeddings")
    heads = chance.choice([2, 6])
    groups = chance.choice([(1, 1), (3, 2)])
    return {
        **{key: fields[key] for key in (*kept, "attention_bias")},
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "linear_num_heads": chance.choice([1, 3]),
        "linear_head_dim": chance.choice([8, 11, 16]),
        "q_lora_rank": chance.choice([None, 22]),
        "v_head_dim": chance.choice([5, 14]),
        "n_shared_experts": chance.choice([1, 2]),
        "n_group": groups[0],
        "topk_group": groups[1],
        "norm_topk_prob": chance.random() < 0.7,
        "routed_scaling_factor": chance.choice([1.0, 2.4]),
        "mlp_layer_types": chance.choice([None, ["sparse"] * fields["num_hidden_layers"]]),
    }


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_equal_transformers_in_prefill_chunks_and_decode(
    tiny_checkpoint: Checkpoints, pytestconfig: pytest.Config, family: str
) -> None:
    for seed in range(pytestconfig.getoption("family_draws")):
        folder = tiny_checkpoint(family, **draw(family, seed))
        model, oracle = LocalModel.load(folder, dtype="float32"), Oracle(folder)
        sequences = prompts(seed, [90, 1, 17])
        for ids, logits in zip(sequences, model.forward(sequences), strict=True):
            torch.testing.assert_close(logits, oracle.logits(ids), atol=1e-4, rtol=0)
        tokens = model.greedy(sequences[2], 12)
        assert tokens == oracle.greedy_choices(sequences[2], tokens), seed


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_next", "float32"), ("qwen3_next", "bfloat16"), ("kimi_linear", "float32")],
)
def test_bits_of_a_row_depend_neither_on_cuts_nor_on_other_sequences(
    tiny_checkpoint: Checkpoints, family: str, dtype: Any
) -> None:
    """Among them a decode, a start from a checkpoint, and one whose own slot is its source.

    How a chunk attends to latents depends on its length: within rounding.
    """
    model = LocalModel.load(tiny_checkpoint(family), dtype=dtype)
    one, other = prompts(3, [75, 40])
    whole = model.run([SequenceSlice(one, 0, range(5))], model.new_pool(5))
    kv = model.new_pool(16, num_states=4)
    first = SequenceSlice(one[:37], 0, range(5), state=StateRun(2, saves=((16, 0), (32, 3))))
    beside = SequenceSlice(other, 0, range(8, 11), state=StateRun(1))
    found = [model.run([beside, first], kv)[40:]]
    rest = SequenceSlice(one[37:74], 37, range(5), state=StateRun(2, 2))
    again = SequenceSlice(one[32:60], 32, range(5), state=StateRun(0, 3))
    both = model.run([again, rest], kv)
    found += [
        both[28:],
        model.run([SequenceSlice(one[74:], 74, range(5), state=StateRun(2, 2))], kv),
    ]
    if family == "kimi_linear":
        torch.testing.assert_close(torch.cat(found), whole, atol=2e-5, rtol=0)
        torch.testing.assert_close(both[:28], whole[32:60], atol=2e-5, rtol=0)
        return
    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(both[:28], whole[32:60])


@pytest.mark.parametrize(
    "family", ["qwen3_next", pytest.param("kimi_linear", marks=pytest.mark.slow)]
)
def test_a_group_hits_prefixes_at_checkpoints_and_continues_what_it_preempts(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With chunked prompts, too few blocks and too few slots, under two plans."""
    monkeypatch.setattr(block_manager, "CHECKPOINT_TOKENS", 64)
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    shared = prompts(1, [70])[0]
    sequences = [shared + tail for tail in prompts(2, [3, 30, 12, 40, 1])] + prompts(3, [9])
    expected = [local.greedy(ids, 30) for ids in sequences]
    for plan, limits in (
        (Plan(), {}),
        (Plan(r1=4, sequence_chunks=(0.4, 1.0)), {"pool_tokens": 16 * 13, "state_slots": 3}),
    ):
        config = group_config(1, 2, kv=limits, schedule={"max_batch_tokens": 50})
        with ThreadGroup(folder, config) as group, group.client() as client:
            group.pin(plan)
            ids = [client.submit(seq, sampling=greedy(30)) for seq in sequences]
            assert [client.generated(request)[0] for request in ids] == expected
            again = [client.submit(seq, sampling=greedy(30)) for seq in sequences]
            assert [client.generated(request)[0] for request in again] == expected
            ended = [client.events[request][-1] for request in again]
            totals = group.attention[0].status().sections["totals"]
            blocks = loop_of(group.attention[0]).scheduler.blocks
            blocks.check([])
            assert blocks.states is not None
            blocks.states.check([])
        if limits:
            assert totals["requeued"] > 0
        else:  # the last whole block before the last token of each prompt
            ends = [(len(seq) - 1) // 16 * 16 for seq in sequences]
            assert all(isinstance(event, Finished) for event in ended)
            cached = [event.usage.cached_tokens for event in ended if isinstance(event, Finished)]
            assert cached == ends


def test_a_second_prompt_makes_a_checkpoint_where_it_leaves_the_first(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_5_moe_text")
    local = LocalModel.load(folder, dtype="float32")
    shared = prompts(1, [40])[0]
    sequences = [shared + tail for tail in prompts(2, [30, 35, 20])]
    with ThreadGroup(folder, group_config()) as group, group.client() as client:
        cached = []
        for ids, logits in zip(sequences, local.last_logits(sequences), strict=True):
            answer = client.scored(client.submit(ids, candidates=VOCABULARY))
            found = torch.tensor(answer.candidate_logits)
            torch.testing.assert_close(found, logits, atol=2e-5, rtol=0)
            cached.append(answer.usage.cached_tokens)
    assert cached == [0, 0, 32]


@pytest.mark.parametrize(
    "mode",
    [{}, {"disable_kv_cache": True}, {"experts": "streamed", "max_batch_tokens": 64}],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_prefill_workers_give_the_logits_and_tokens_of_the_single_process_path(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, mode: dict[str, Any]
) -> None:
    """The last layer has states, and is computed for the last rows only."""
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    shared = prompts(2, [50])[0]
    sequences = [shared + tail for tail in prompts(3, [3, 1, 40, 6])]
    expected = local.last_logits(sequences)
    config = prefill_config(
        prefill={"disable_kv_cache": False, "host_store": str(tmp_path), **mode}
    )
    with PrefillThreads(folder, config) as group, group.client() as client:
        for _ in range(2):
            with meeting(group.workers[0], len(sequences)):
                ids = [client.submit(seq, candidates=VOCABULARY) for seq in sequences]
            torch.testing.assert_close(client.logits(ids), expected, atol=1e-5, rtol=0)
        steps = 1 if "disable_kv_cache" in mode else 12
        request = client.submit(sequences[2], sampling=greedy(steps))
        assert client.generated(request)[0] == local.greedy(sequences[2], steps)


def test_states_and_indexers_are_refused_where_they_cannot_be_kept(
    tiny_checkpoint: Checkpoints,
) -> None:
    for family, part in (("glm_moe_dsa", "indexers"), ("qwen3_next", "recurrent layers")):
        folder = tiny_checkpoint(family)
        checkpoint, spec = Checkpoint(folder), check_checkpoint(folder)
        with pytest.raises(CheckpointError, match=f"has {part}, .* on cuda; set groups.device=cpu"):
            AttentionHalf.load(checkpoint, spec, dtype=torch.float32, device="cuda")
    with pytest.raises(ResourceError, match=r"kv.state_slots=\d+ needs \d+ bytes"):
        ThreadGroup(folder, group_config(kv={"state_slots": 10**9}))
    model = LocalModel.load(folder, dtype="float32")
    with pytest.raises(ValueError, match="position 16 needs the states"):
        model.run([SequenceSlice([1], 16, range(2))], model.new_pool(2))
