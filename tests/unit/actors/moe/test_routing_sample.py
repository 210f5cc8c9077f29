"""Samples of tokens' paths through the experts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from actors.batching.scheduled_batch import Chunk
from actors.moe.routing_sample import (
    FIRST_STRIDE,
    MOST_UNDER_WAY,
    PERIOD_S,
    MakeRouting,
    RoutingSample,
)
from contracts.planner_messages import RoutingSampleReport

LAYERS, TOP_K = 3, 2


class _Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


class _Rank:
    """Runs micro-batches whose experts encode sequence and position."""

    def __init__(self, tokens_per_s: int = 256) -> None:
        self.clock, self.made = _Clock(), list[MakeRouting]()
        self.sample = RoutingSample(
            "attention-0", tokens_per_s, (LAYERS, TOP_K), self.clock, self.made.append
        )
        self.batches = 0

    def run(self, chunks: Sequence[tuple[int, int, int]], *, to_layer: int = LAYERS) -> None:
        """Run chunks (sequence, start, stop)."""
        owner = (self.batches, 0)
        self.batches += 1
        self.sample.prepare(owner, [_chunk(*each) for each in chunks])
        rows = [(s, p) for s, start, stop in chunks for p in range(start, stop)]
        for layer in range(to_layer):
            self.sample.routed(owner, _experts(rows, layer))

    def report(self) -> RoutingSampleReport:
        """Return the report that the next micro-batch triggers."""
        self.clock.now_s += PERIOD_S
        self.sample.prepare((-1, 0), [_chunk(0, 0, 1)])
        return self.made.pop()()


def _chunk(sequence: int, start: int, stop: int) -> Chunk:
    ids = SimpleNamespace(token_ids=[1000 * sequence + n for n in range(500)])
    return cast(Chunk, SimpleNamespace(sequence=ids, start=start, stop=stop))


def _experts(rows: Sequence[tuple[int, int]], layer: int) -> Any:
    return np.array([[position % 100 + layer, sequence] for sequence, position in rows])


def _decoded(report: RoutingSampleReport) -> tuple[Any, Any]:
    ids_P2 = np.frombuffer(report.ids, "<i4").reshape(-1, 2)
    return ids_P2, np.frombuffer(report.paths, "<i2").reshape(len(ids_P2), LAYERS, TOP_K)


def test_reported_tokens_have_paths_and_predecessors() -> None:
    rank = _Rank()
    rank.run([(1, 0, 5), (2, 7, 40)])
    rank.run([(3, 60, 61), (4, 0, 1), (5, 9, 90)])
    report = rank.report()
    assert (report.rank, report.tokens) == ("attention-0", 38 + 83)
    ids_P2, paths_PLK = _decoded(report)
    assert len(ids_P2) == -(-(38 + 83) // FIRST_STRIDE)
    for (token, before), path_LK in zip(ids_P2.tolist(), paths_PLK, strict=True):
        sequence, position = divmod(token, 1000)
        assert before == (token - 1 if position else -1)
        expected = [[position % 100 + layer, sequence] for layer in range(LAYERS)]
        assert path_LK.tolist() == expected


@pytest.mark.parametrize("sizes", [[1] * 400, [7] * 60, [400], [3, 300, 1, 1, 95]])
def test_every_nth_token_is_sampled_across_batches(sizes: list[int]) -> None:
    rank = _Rank()
    for size in sizes:
        rank.run([(0, 1, 1 + size)])
    ids_P2, _ = _decoded(rank.report())
    assert len(ids_P2) == -(-sum(sizes) // FIRST_STRIDE)


def test_stride_follows_traffic_and_reports_are_bounded() -> None:
    rank = _Rank(tokens_per_s=64)
    rank.run([(0, 0, 450)])
    assert len(_decoded(rank.report())[0]) == 64 * PERIOD_S  # the bound
    rank.run([(0, 0, 450)])  # every 15th by now
    assert len(_decoded(rank.report())[0]) in range(29, 33)
    rank.run([(0, 0, 20)])
    rank.report()
    rank.run([(0, 0, 20)])  # all of so few
    assert len(_decoded(rank.report())[0]) in (19, 20, 21)


def test_unfinished_and_dropped_batches_are_not_reported() -> None:
    rank = _Rank()
    for _ in range(5 * MOST_UNDER_WAY):
        rank.run([(0, 0, FIRST_STRIDE)], to_layer=LAYERS - 1)
    rank.clock.now_s += PERIOD_S
    rank.sample.prepare((-1, 0), [_chunk(0, 0, 1)])
    assert not rank.made
    assert rank.sample.under_way <= MOST_UNDER_WAY


def test_report_counts_at_least_its_own_tokens() -> None:
    """A micro-batch may start before one report and end in the next."""
    rank = _Rank()
    rank.run([(1, 0, 400)], to_layer=0)
    rank.clock.now_s += PERIOD_S
    rank.run([(2, 0, 1)], to_layer=0)
    for layer in range(LAYERS):
        rank.sample.routed((0, 0), _experts([(1, p) for p in range(400)], layer))
    report = rank.report()
    assert report.tokens == len(_decoded(report)[0]) > 1
