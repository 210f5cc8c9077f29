"""Metrics of dispatched tokens."""

from __future__ import annotations

import numpy as np

from actors.moe.dispatch import MAX_SHOWN, TOP_EXPERTS, DispatchCounts, plan_dispatch
from actors.telemetry.telemetry import Telemetry
from planner.placement.slots import LayerSlots

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


def test_replicas_of_an_expert_are_counted_together() -> None:
    telemetry, counts = Telemetry(), DispatchCounts(2)
    counts.show(telemetry, "attention-0")
    _run(counts, 4, IDS_TK, PLACED)
    lines = _lines(telemetry)
    found = {
        expert: lines[f'tandem_expert_tokens_total{{expert="{expert}",layer="4"}}']
        for expert in range(4)
    }
    assert found == {0: 2, 1: 2, 2: 2, 3: 2}


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


def test_load_covers_current_ranks_only() -> None:
    telemetry, counts = Telemetry(), DispatchCounts(2)
    counts.show(telemetry, "attention-0")
    four = LayerSlots([3, 2, 1, 0], [(0, 1), (1, 2), (2, 3), (3, 4)])
    for placed in (PLACED, four, LayerSlots(range(4), [(0, 4)])):
        _run(counts, 4, np.array([[0, 1, 2, 3]]), placed)
        assert _lines(telemetry)['tandem_expert_load_ratio{rank="attention-0"}'] == 1.0
