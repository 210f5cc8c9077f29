"""Reports of a recorded batch's micro-batches."""

from __future__ import annotations

import pytest

from actors.planning.stage_report import micro_batch_times
from contracts.traces import Stage, TaskSpan


def spans_of(micro_batch: int, times_ms: list[tuple[Stage, int, float]]) -> list[TaskSpan]:
    """Return consecutive spans (stage, layer, ms)."""
    found, now_s = [], 0.0
    for stage, layer, ms in times_ms:
        end_s = now_s + ms / 1e3
        found.append(TaskSpan("attention-0", stage, now_s, end_s, 7, layer, micro_batch))
        now_s = end_s
    return found


def test_send_and_finish_times_are_reported_beside_attention() -> None:
    times = [(Stage.ATTENTION, 0, 9.0), (Stage.SEND, 0, 1.0)]
    times += [(Stage.ATTENTION, 1, 4.0), (Stage.SEND, 1, 0.5)]
    times += [(Stage.ATTENTION, 2, 4.2), (Stage.SEND, 2, 0.7)]
    times += [(Stage.FINISH, 3, 2.0), (Stage.FINISH, 3, 1.0)]  # it was interrupted
    other = spans_of(1, [(Stage.ATTENTION, 1, 50.0), (Stage.SEND, 1, 5.0)])
    first, second = micro_batch_times(
        spans_of(0, times) + other, 7, [[(0, 20), (5, 6)], [(0, 900)]]
    )
    assert first.batch == [(0, 20), (5, 6)]
    assert first.attention_ms == pytest.approx((4.5 + 4.9) / 2)  # the first layer embeds
    assert first.send_ms == pytest.approx(0.6)
    assert first.finish_ms == pytest.approx(3.0)
    assert second.finish_ms == 0.0
    assert second.send_ms == pytest.approx(5.0)


def test_times_exclude_other_batches() -> None:
    assert micro_batch_times(spans_of(0, [(Stage.ATTENTION, 1, 4.0)]), 8, [[(0, 20)]]) == []
