"""Prefill workers against `transformers`, against themselves in other modes, and against the
attention/expert group."""

from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.support.tiny_models import HALVES, VOCABULARY, Checkpoints, crossed, prompts
from tests.support.transformers_oracle import Oracle

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 11, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 5, "sliding_window": 9}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {"num_local_experts": 5}),
    ("olmoe", {}),
    ("afmoe", {}),
    ("llama4_text", {}),
]
MODES: list[dict[str, Any]] = [
    {},
    {"disable_kv_cache": True},
    {"experts": "streamed"},
    {"experts": "streamed", "resident_layers": 2, "disable_kv_cache": True},
    *({"experts": "cached", "slots": slots} for slots in (4, 5, 12)),
    {"experts": "cached", "slots": 7, "disable_kv_cache": True},
]


def config_of(mode: dict[str, Any], store: Path) -> Any:
    """slots: of the section `experts`."""
    prefill = {name: value for name, value in mode.items() if name != "slots"}
    experts = {"slots": mode["slots"]} if "slots" in mode else {}
    return prefill_config(prefill={**prefill, "host_store": str(store)}, experts=experts)


@pytest.mark.parametrize(("family", "overrides", "half"), crossed(FAMILIES, HALVES))
def test_every_mode_gives_the_same_bits_and_the_logits_of_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, overrides: dict[str, Any], half: int
) -> None:
    """Prompts one at a time, so that all modes run the same batches; one of a single token."""
    folder = tiny_checkpoint(family, **overrides)
    oracle = Oracle(folder)
    sequences = prompts(1, [23, 1, 140, 7])
    expected = torch.stack([oracle.logits(ids)[-1] for ids in sequences])
    found, modes = [], MODES[:1] + MODES[1 + half :: 2]
    for mode in modes:
        config = config_of(mode, tmp_path)
        with PrefillThreads(folder, config) as group, group.client() as client:
            found.append(torch.cat([client.last_logits([ids]) for ids in sequences]))
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)
    for mode, logits in zip(modes, found, strict=True):
        assert torch.equal(logits, found[0]), mode


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
@pytest.mark.parametrize("disable_kv_cache", [False, True])
def test_prefixes_that_are_cached_or_shared_in_the_batch_leave_logits_unchanged(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, Any], disable_kv_cache: bool
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    local = LocalModel.load(folder, dtype="float32")
    shared = prompts(2, [50])[0]
    sequences = [shared + tail for tail in prompts(3, [3, 1, 40, 6])]
    expected = local.last_logits(sequences)
    config = prefill_config(prefill={"disable_kv_cache": disable_kv_cache})
    with PrefillThreads(folder, config) as group, group.client() as client:
        for _ in range(2):
            with meeting(group.workers[0], len(sequences)):
                ids = [client.submit(seq, candidates=VOCABULARY) for seq in sequences]
            client.wait(*ids)
            answers = [client.scored(request) for request in ids]
            found = torch.tensor([answer.candidate_logits for answer in answers])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            cached = [answer.usage.cached_tokens for answer in answers]
            assert min(cached[1:]) >= 50
        assert (cached[0] >= 50) is not disable_kv_cache, "forgotten after the batch, or kept"


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "llama4_text", "phimoe", "afmoe"],
)
def test_a_prefill_worker_generates_what_the_attention_expert_group_does(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str
) -> None:
    folder = tiny_checkpoint(family)
    sequences = prompts(5, [5, 19, 130])
    with ThreadGroup(folder, group_config(1, 1)) as group, group.client() as client:
        ids = [client.submit(seq, sampling=greedy(24)) for seq in sequences]
        expected = [client.generated(request)[0] for request in ids]
    for mode in ({}, {"experts": "cached", "slots": 4}, {"experts": "cached", "slots": 9}):
        # the last prompt in three chunks
        config = config_of({**mode, "max_batch_tokens": 64}, tmp_path)
        with PrefillThreads(folder, config) as prefill, prefill.client() as client:
            decoder = loop_of(prefill.workers[0]).executor._layer_decoder
            assert (decoder is not None) is (not mode)
            ids = [client.submit(seq, sampling=greedy(24)) for seq in sequences]
            assert [client.generated(request)[0] for request in ids] == expected, mode
    config = prefill_config(prefill={"max_batch_tokens": 64, "disable_kv_cache": True})
    with PrefillThreads(folder, config) as prefill, prefill.client() as client:
        ids = [client.submit(seq, sampling=greedy(1)) for seq in sequences]
        first = [client.generated(request)[0] for request in ids]
        assert first == [tokens[:1] for tokens in expected]
        failed = client.failed(client.submit(sequences[0], sampling=greedy(2)))
        assert failed.status == 400
        assert "max_tokens=2" in failed.message


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
@pytest.mark.parametrize("score_from", [1, 35])
def test_log_probabilities_of_prompt_tokens_equal_the_single_process_path(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, Any], score_from: int
) -> None:
    """The last layer computes most rows of a batch, or few, beside a prompt of one token."""
    folder = tiny_checkpoint(family, **overrides)
    local = LocalModel.load(folder, dtype="float32")
    sequences = prompts(6, [41, 60, 36])
    config = prefill_config()
    with PrefillThreads(folder, config) as group, group.client() as client:
        with meeting(group.workers[0], 1 + len(sequences)):
            single = client.submit([7], candidates=VOCABULARY)
            ids = [client.submit(seq, score_from=score_from) for seq in sequences]
        client.wait(single, *ids)
        for request, seq in zip(ids, sequences, strict=True):
            logprobs = local.forward([seq])[0].log_softmax(-1)
            expected = [float(logprobs[p - 1, seq[p]]) for p in range(score_from, len(seq))]
            found = client.scored(request).token_logprobs
            assert found == pytest.approx(expected, abs=1e-5)
        logits = torch.tensor(client.scored(single).candidate_logits)
        torch.testing.assert_close(logits, local.forward([[7]])[0][0], atol=1e-5, rtol=0)
