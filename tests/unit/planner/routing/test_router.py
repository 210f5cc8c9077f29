"""The router's cascade in simple cases, invalid logs, and reports out of order."""

from typing import Any

import pytest

from contracts.routing_messages import Prompt, PromptProgress, RequestKey, WorkerReport
from planner.routing.open_requests import token_work
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import MissingReportsError, SaturationConfig, WorkerState
from tests.support.paper_routing import route_unsaturated
from tests.support.routing import BLOCK, LoggingWorker, prompt_of

DOCUMENT = [7] * 5 * BLOCK


def router_of(tau: int, workers: int = 3) -> Router:
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=tau)
    config = RouterConfig(workers=workers, saturation=saturation, block_tokens=BLOCK)
    return Router(config, token_work)


def sibling(number: int) -> Prompt:
    return prompt_of([*DOCUMENT, 1000 + number], number)


def placed(router: Router, prompts: list[Prompt]) -> list[int | None]:
    decisions = [route_unsaturated(router, prompt) for prompt in prompts]
    return [decision and decision.worker for decision in decisions]


def test_ten_siblings_cost_one_prefix_and_ten_suffixes() -> None:
    router = router_of(tau=1000)
    assert placed(router, [sibling(n) for n in range(10)]) == [0] * 10
    assert router.load(0) == len(DOCUMENT) + 10
    router = router_of(tau=1000)  # the last block of a fully cached prompt is computed
    assert placed(router, [prompt_of(DOCUMENT, 0), prompt_of(DOCUMENT, 1)]) == [0, 0]
    assert router.load(0) == len(DOCUMENT) + BLOCK


def test_evicted_prefix_returns_to_the_load() -> None:
    router, worker = router_of(tau=1000, workers=1), LoggingWorker(0, token_work, cache_blocks=99)
    first, second = sibling(0), sibling(1)
    placed(router, [first, second])
    for prompt in (first, second):
        router.apply(worker.accept(prompt))
    router.apply(worker.append_report(ended=(first.key,)))
    assert router.load(0) == 1
    router.apply(worker.append_report(progress=(PromptProgress(second.key, 0),)))
    assert router.load(0) == len(DOCUMENT) + 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ended": (RequestKey(0, 9),)}, r"request \(0, 9\) is not open on this worker"),
        ({"accepted": (sibling(0), sibling(0))}, r"request \(0, 0\) is already open"),
        (
            {"accepted": (sibling(0),), "progress": (PromptProgress(RequestKey(0, 0), 99),)},
            r"request \(0, 0\): done_tokens=99, until_tokens=0 of a prompt of 21 tokens",
        ),
    ],
)
def test_contradictory_log_is_rejected(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router_of(tau=1000).apply(WorkerReport(worker=0, epoch=0, number=0, **parts))


def test_retired_worker_accepts_no_requests_and_finishes_its_own() -> None:
    router = router_of(tau=1000, workers=2)
    assert placed(router, [sibling(0)]) == [0]
    router.retire(0)
    assert not router.is_open(0)
    assert [one.worker for one in router.candidates(sibling(1))] == [1]
    assert placed(router, [sibling(1), sibling(2)]) == [1, 1]
    assert router.load(0) > 0, "what it has is still its own"
    router.readmit(0)
    assert router.is_open(0)
    assert [one.worker for one in router.candidates(sibling(3))] == [0, 1]


def new_state() -> WorkerState:
    return WorkerState(lambda cached, tokens: tokens - cached, 4)


def report(epoch: int, number: int, *stored: bytes) -> WorkerReport:
    return WorkerReport(worker=0, epoch=epoch, number=number, stored=stored)


def test_report_after_a_gap_is_rejected() -> None:
    state = new_state()
    state.apply(report(1, 0, b"a"))
    with pytest.raises(MissingReportsError, match=r"1\.2 follows 1\.0"):
        state.apply(report(1, 2, b"c"))
    assert state.snapshot(0).committed == (b"a",)
    with pytest.raises(MissingReportsError):
        state.apply(report(2, 1, b"d"))
    state.apply(report(1, 1, b"b"))
    assert state.snapshot(0).committed == (b"a", b"b")


def test_reports_of_a_lost_epoch_are_ignored() -> None:
    state = new_state()
    state.apply(report(3, 0, b"a"))
    snapshot = state.snapshot(0)
    state.lose()
    assert state.apply(report(3, 0, b"a")) is None
    assert not state.restore(snapshot)
    assert not state.present
    assert state.snapshot(0).committed == ()
    assert state.apply(report(4, 0, b"b")) == []
    assert state.snapshot(0).committed == (b"b",)
