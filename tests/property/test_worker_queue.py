"""Lanes of a worker queue: order within each and alternation between them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.routing_messages import RequestKey
from planner.routing.worker_queue import HeldRequest, Lane, WorkerQueue
from tests.support.routing import prompt_of

few = settings(deadline=None, max_examples=100)
lanes = st.lists(st.sampled_from(Lane), min_size=1, max_size=30)


def drained(line: WorkerQueue) -> list[RequestKey]:
    order = []
    while (key := next_of(line)) is not None:
        line.pop(key)
        order.append(key)
    return order


@few
def next_of(line: WorkerQueue) -> RequestKey | None:
    """Return the next request for a worker that takes both classes."""
    key = line.first()
    return line.later() if key is None else key


@given(lanes)
def test_requests_leave_once_in_lane_order_with_best_effort_last(
    given: list[Lane],
) -> None:
    line = WorkerQueue()
    for number, lane in enumerate(given):
        line.add(HeldRequest(prompt_of([number], number), lane))
    order = [key.number for key in drained(line)]
    assert sorted(order) == list(range(len(given)))
    for lane in Lane:
        of_lane = [number for number in order if given[number] is lane]
        assert of_lane == sorted(of_lane)
    later = given.count(Lane.LATER)
    assert all(given[number] is not Lane.LATER for number in order[: len(order) - later])


@few
@given(lanes, lanes)
def test_first_and_rest_lanes_alternate(some: list[Lane], more: list[Lane]) -> None:
    line = WorkerQueue()
    both = [lane for lane in (*some, *more) if lane is not Lane.LATER]
    for number, lane in enumerate(both):
        line.add(HeldRequest(prompt_of([number], number), lane))
    order = [both[key.number] for key in drained(line)]
    fewer = min(both.count(Lane.FIRST), both.count(Lane.REST))
    assert order[: 2 * fewer] == [Lane.FIRST, Lane.REST] * fewer


@few
@given(lanes)
def test_last_yields_newest_of_each_lane_longest_wait_first(
    given: list[Lane],
) -> None:
    line = WorkerQueue()
    for number, lane in enumerate(given):
        line.add(HeldRequest(prompt_of([number], number), lane))
    lasts = {lane: number for number, lane in enumerate(given)}
    order = sorted(lasts, reverse=True)
    assert [(lane, key.number) for lane, key in line.last()] == [(n, lasts[n]) for n in order]
