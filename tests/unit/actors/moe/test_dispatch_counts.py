"""Metrics of dispatched tokens."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from actors.batching.batch_builder import Chunk
from actors.channels.base import Header, Packet, PacketKind
from actors.moe.backend import TaskKey
from actors.moe.dispatch import MAX_SHOWN, TOP_EXPERTS, DispatchCounts, Piece, plan_dispatch
from actors.moe.remote_backend import RemotePending
from actors.moe.routing_sample import (
    FIRST_STRIDE,
    MOST_UNDER_WAY,
    PERIOD_S,
    MakeRouting,
    RoutingSample,
)
from actors.telemetry.telemetry import Telemetry
from contracts.placement import Placement
from contracts.planner_messages import RoutingSampleReport
from contracts.requests import Priority
from planner.placement.resize import failover_placement
from planner.placement.slots import ExpertPlacement, LayerSlots
from tests.support.manual_clock import ManualClock

# Experts 0 and 1 on rank 0, 2 and 3 on rank 1; expert 1 on both.
PLACED = LayerSlots([0, 1, 2, 3, 1], [(0, 2), (2, 5)])
IDS_TK = np.array([[0, 1], [2, 1], [0, 3], [2, 3]])  # copies 1, 1, 2, 1: pairs 3 on rank 0


def _run(counts: DispatchCounts, layer: int, ids_TK: np.ndarray, placed: LayerSlots) -> None:
    weights_TK = np.ones(ids_TK.shape, np.float32)
    slices = plan_dispatch(ids_TK, weights_TK, [(0, len(ids_TK))], placed)
    counts.add(layer, len(ids_TK), slices, placed)


def _lines(telemetry: Telemetry) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in telemetry.exposition().splitlines())
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}


def test_counts_tokens_copies_and_load_match_packets() -> None:
    telemetry, counts = Telemetry(), DispatchCounts(2)
    counts.show(telemetry, "attention-0")
    assert _lines(telemetry)['tandem_expert_load_ratio{rank="attention-0"}'] == 1.0
    for layer in (2, 3):
        _run(counts, layer, IDS_TK, PLACED)
    lines = _lines(telemetry)
    assert lines['tandem_dispatched_tokens_total{rank="attention-0"}'] == 8
    assert lines['tandem_token_copies_total{rank="attention-0"}'] == 10
    assert lines['tandem_expert_load_ratio{rank="attention-0"}'] == 5 / 4
    assert "tandem_local_activation_fraction" not in telemetry.exposition()
    assert _lines(telemetry)['tandem_expert_load_ratio{rank="attention-0"}'] == 1.0


def test_tokens_kept_on_own_rank_are_no_copies() -> None:
    telemetry, counts = Telemetry(), DispatchCounts(2, own_rank=0)
    counts.show(telemetry, "prefill-0")
    _run(counts, 0, IDS_TK, PLACED)
    lines = _lines(telemetry)
    assert lines['tandem_token_copies_total{rank="prefill-0"}'] == 3
    assert lines['tandem_local_activation_fraction{rank="prefill-0"}'] == 3 / 8


def test_counts_survive_new_placement() -> None:
    telemetry, counts = Telemetry(), DispatchCounts(2)
    counts.show(telemetry, "attention-0")
    for placed in (PLACED, LayerSlots([3, 2, 1, 0], [(0, 1), (1, 4)]), PLACED):
        _run(counts, 4, IDS_TK, placed)
    lines = _lines(telemetry)
    assert [
        lines[f'tandem_expert_tokens_total{{expert="{expert}",layer="4"}}'] for expert in range(4)
    ] == [6, 6, 6, 6]


def test_expert_series_are_most_used_and_bounded() -> None:
    telemetry, counts = Telemetry(), DispatchCounts(1)
    counts.show(telemetry, "attention-0")
    placed = LayerSlots(range(200), [(0, 200)])
    _run(counts, 0, np.repeat(np.arange(100, 100 + TOP_EXPERTS), 3)[:, None], placed)
    _run(counts, 0, np.arange(200)[:, None], placed)
    first = [line for line in telemetry.exposition().splitlines() if "expert_tokens" in line]
    shown = [line for line in first if not line.startswith("#")]
    assert len(shown) == TOP_EXPERTS
    assert all(line.endswith(" 4.0") for line in shown)
    for hot in range(0, 200, TOP_EXPERTS):
        _run(counts, 0, np.repeat(np.arange(hot, hot + TOP_EXPERTS), hot + 9)[:, None], placed)
        lines = _lines(telemetry)
    assert sum("expert_tokens" in name for name in lines) == MAX_SHOWN


LAUNCH = Placement(num_experts=6, slots_per_rank=(2, 2, 2), expert_of_slot=(tuple(range(6)),))


def layer_of(placement: Placement | None) -> LayerSlots:
    assert placement is not None
    return ExpertPlacement(placement).layer(0)


@pytest.fixture
def pending() -> RemotePending:
    """Return two token groups with slices of three ranks each."""
    ids_TK = np.array([[0, 2, 4], [1, 3, 5]])
    weights_TK = np.ones((2, 3), np.float32)
    slices = plan_dispatch(ids_TK, weights_TK, [(0, 1), (1, 2)], layer_of(LAUNCH))
    key = TaskKey(1, 0, 0, Priority.LS)
    return RemotePending(key, torch.zeros(2, 4), slices, layer_of(LAUNCH), 0, 0)


def answer(pending: RemotePending, piece: Piece) -> None:
    header = Header(PacketKind.E2A, 1, 1, 0, 0, piece.token_group)
    packet = Packet(f"expert-{piece.rank}", header, (), 0.0, None)
    pending.replies[piece.token_group, piece.rank] = packet
    pending.missing -= 1


def names(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.token_group, piece.rank) for piece in pieces]


def test_only_unanswered_slices_of_lost_rank_are_resent(pending: RemotePending) -> None:
    for piece in pending.slices:
        if piece.token_group == 0:
            answer(pending, piece)
    assert not pending.waits
    pending.lose(1)
    assert pending.waits
    assert names(list(pending.under_way())) == [(1, 0), (1, 2)]
    (again,) = pending.cut(layer_of(LAUNCH), 0)
    assert names([again]) == [(1, 1)]  # the same, to another in its place
    assert not pending.waits
    assert pending.missing == 3


def test_slices_are_recut_for_failover_ranks_and_replies_kept(pending: RemotePending) -> None:
    standing = failover_placement(LAUNCH, [1])
    pending.lose(1)
    again = pending.cut(layer_of(standing), 77)
    assert names(again) == [(2, 0), (3, 2)]
    assert pending.missing == 6
    assert pending.in_use == {0, 77}
    assert [piece.start for piece in again] == [0, 1]
    for piece in list(pending.under_way()):
        answer(pending, piece)
    assert pending.is_complete


def test_slices_are_held_until_they_can_be_sent(pending: RemotePending) -> None:
    held = next(piece for piece in pending.slices if piece.rank == 2)
    pending.hold(held)
    assert held not in list(pending.under_way())
    assert pending.cut(layer_of(LAUNCH), 0) == [held]
    assert pending.missing == 6


LAYERS, TOP_K = 3, 2


class _Rank:
    """Runs micro-batches whose experts encode sequence and position."""

    def __init__(self, tokens_per_s: int = 256) -> None:
        self.clock, self.made = ManualClock(10.0), list[MakeRouting]()
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
        self.clock.advance(PERIOD_S)
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
    rank.clock.advance(PERIOD_S)
    rank.sample.prepare((-1, 0), [_chunk(0, 0, 1)])
    assert not rank.made
    assert len(rank.sample._under_way) <= MOST_UNDER_WAY
