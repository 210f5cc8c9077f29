"""Experts move while a group serves: answers are those of the single-process path, in every
generation and between two of them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.planner_messages import MoveOutcome
from models.spec.model import read_spec
from tests.support.fake_planner import following
from tests.support.group_harness import RankConnection, greedy
from tests.support.local_model import LocalModel
from tests.support.placements import another
from tests.support.tiny_models import VOCABULARY, Checkpoints, prompts

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("mixtral", {"num_experts_per_tok": 2}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {}),
]
MOVES = 5


class StreamedRequest:
    """Sequences whose answers are under way at a client."""

    def __init__(self, client: RankConnection, sequences: list[list[int]]) -> None:
        self._client = client
        self._scored = [client.submit(each, candidates=VOCABULARY) for each in sequences]
        self._greedy = [client.submit(each, sampling=greedy(6)) for each in sequences]

    def logits(self) -> torch.Tensor:
        return self._client.logits(self._scored)

    def tokens(self) -> list[list[int]]:
        return [self._client.generated(request)[0] for request in self._greedy]


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=[family for family, _ in FAMILIES])
def test_answers_stay_the_same_while_experts_move(
    tiny_checkpoint: Checkpoints, number: int, turn: int
) -> None:
    (family, overrides), backend = FAMILIES[number], ("shm", "tcp")[(number + turn) % 2]
    folder = tiny_checkpoint(family, **overrides)
    spec, local = read_spec(folder), LocalModel.load(folder, dtype="float32")
    sequences, chance = prompts(3, [23, 1, 40, 7, 64]), random.Random(1)
    tokens = [local.greedy(each, 6) for each in sequences]
    separate = {"prefix_cache": False}  # attention over a cached prefix has other last bits
    with following(folder, backend, kv=separate) as (planner, group):
        with group.client(0) as first, group.client(1) as second:
            expected = StreamedRequest(first, sequences).logits()
            oracle = local.last_logits(sequences)
            torch.testing.assert_close(expected, oracle, atol=1e-5, rtol=0)
            for generation in range(1, MOVES + 1):
                requests = [StreamedRequest(client, sequences) for client in (first, second)]
                first.read()  # it is under way
                planner.propose(another(spec, generation))
                if chance.random() < 0.5:
                    requests.append(StreamedRequest(first, sequences))
                for each in requests:
                    found = each.logits()
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                    if spec.top_k == 2:
                        assert torch.equal(found, expected)
                    assert each.tokens() == tokens
                for rank in group.experts:
                    outcome = planner.outcome(rank.ready.name, generation)
                    assert outcome.outcome is MoveOutcome.RETIRED, outcome
        for rank in group.ranks:
            assert rank.status().sections["placement"]["generation"] == MOVES


def test_ranks_that_keep_few_experts_follow_without_reading_any_for_it(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    spec, local = read_spec(folder), LocalModel.load(folder, dtype="float32")
    sequences = prompts(4, [23, 40, 7])
    tokens = [local.greedy(each, 6) for each in sequences]
    few: dict[str, Any] = {"experts": {"slots": 5}, "prefill": {"host_store": str(tmp_path)}}
    with following(folder, "shm", **few) as (planner, group), group.client() as client:
        for generation in range(1, MOVES + 1):
            requests = StreamedRequest(client, sequences)
            planner.propose(another(spec, generation))
            assert requests.tokens() == tokens
            for rank in group.experts:
                outcome = planner.outcome(rank.ready.name, generation)
                assert (outcome.outcome, outcome.loaded_bytes) == (MoveOutcome.RETIRED, 0)
