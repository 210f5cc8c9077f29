"""Shares of a rank's time: they add up, and each span goes where it belongs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.time_shares import ROWS, Ideal, Shares, shares
from contracts.traces import Stage, TaskSpan

RANK = "attention-0"
PEER = "expert-0"
NOTHING = Ideal(0.0, 0.0)
OWN = (Stage.ATTENTION, Stage.SHARED, Stage.SEND, Stage.FINISH, Stage.WAIT)


def _shares(spans: list[TaskSpan], ideal: Ideal = NOTHING) -> Shares:
    return shares(spans, RANK, (0.0, 10.0), ideal, poll_s=3.0)


@st.composite
def _spans(draw: st.DrawFn) -> list[TaskSpan]:
    """Tasks of one rank one after another, beyond both ends of the window; transfers at will."""
    edges = sorted(draw(st.lists(st.floats(-2.0, 12.0), max_size=20)))
    own = [
        TaskSpan(RANK, draw(st.sampled_from(OWN)), start, end)
        for start, end in zip(edges[::2], edges[1::2], strict=False)
    ]
    moves = draw(st.lists(st.tuples(st.floats(-2.0, 12.0), st.floats(0.0, 4.0)), max_size=8))
    return own + [TaskSpan(f"{PEER}>{RANK}", Stage.E2A, at, at + long) for at, long in moves]


@given(_spans(), st.floats(0.0, 12.0), st.floats(0.0, 12.0))
def test_shares_are_not_negative_and_add_up_to_the_window(
    spans: list[TaskSpan], stages_s: float, finish_s: float
) -> None:
    found = _shares(spans, Ideal(stages_s, finish_s))
    parts = [getattr(found, field) for field in ROWS]
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(found.wall_s)


def test_a_wait_is_exposed_while_a_payload_is_under_way_to_this_rank() -> None:
    spans = [
        TaskSpan(RANK, Stage.WAIT, 2.0, 6.0),
        TaskSpan(RANK, Stage.ATTENTION, 6.0, 9.0),
        TaskSpan(f"{PEER}>{RANK}", Stage.E2A, 5.0, 6.0),
        TaskSpan(f"{RANK}>{PEER}", Stage.A2E, 2.0, 4.0),  # it goes the other way
    ]
    found = _shares(spans)
    assert (found.exposed_s, found.idle_s) == pytest.approx((1.0, 3.0))


def test_what_products_do_not_explain_of_a_stage_is_its_rest() -> None:
    spans = [
        TaskSpan(RANK, Stage.ATTENTION, 0.0, 4.0),
        TaskSpan(RANK, Stage.FINISH, 4.0, 6.0),
    ]
    found = _shares(spans, Ideal(stages_s=3.0, finish_s=0.5))
    assert found.products_s == pytest.approx(3.5)
    assert (found.other_compute_s, found.finish_s) == pytest.approx((1.0, 1.5))


def test_a_gap_as_long_as_a_poll_is_a_wait_and_a_shorter_one_is_not() -> None:
    spans = [TaskSpan(RANK, Stage.ATTENTION, 3.5, 9.0)]
    found = _shares(spans)
    assert (found.idle_s, found.between_s) == pytest.approx((3.5, 1.0))
