"""Worker state: reports out of order are rejected or ignored."""

from __future__ import annotations

import pytest

from contracts.routing_messages import WorkerReport
from planner.routing.worker_state import MissingReportsError, WorkerState


def new_state() -> WorkerState:
    return WorkerState(lambda cached, tokens: tokens - cached, 4)


def report(epoch: int, number: int, *stored: bytes) -> WorkerReport:
    return WorkerReport(worker=0, epoch=epoch, number=number, stored=stored)


def test_report_after_a_gap_is_rejected() -> None:
    state = new_state()
    state.apply(report(1, 0, b"a"))
    with pytest.raises(MissingReportsError, match=r"1\.2 follows 1\.0"):
        state.apply(report(1, 2, b"c"))
    assert state.committed() == (b"a",)
    with pytest.raises(MissingReportsError):
        state.apply(report(2, 1, b"d"))
    state.apply(report(1, 1, b"b"))
    assert state.committed() == (b"a", b"b")


def test_reports_of_a_lost_epoch_are_ignored() -> None:
    state = new_state()
    state.apply(report(3, 0, b"a"))
    snapshot = state.snapshot(0)
    state.lose()
    assert state.apply(report(3, 0, b"a")) is None
    assert not state.restore(snapshot)
    assert not state.present
    assert state.committed() == ()
    assert state.apply(report(4, 0, b"b")) == []
    assert state.committed() == (b"b",)
