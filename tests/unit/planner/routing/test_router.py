"""The router's cascade in simple cases, and invalid logs."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.routing_messages import Calibration, Prompt, PromptProgress, RequestKey, WorkerReport
from planner.routing.request_work import token_work
from planner.routing.router import Router, RouterConfig
from planner.routing.saturation import SaturationConfig
from tests.support.routing import BLOCK, LoggingWorker, prompt_of

DOCUMENT = [7] * 5 * BLOCK


def router_of(tau: int, workers: int = 3) -> Router:
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=tau)
    config = RouterConfig(workers=workers, saturation=saturation, block_tokens=BLOCK)
    return Router(config, token_work)


def sibling(number: int) -> Prompt:
    return prompt_of([*DOCUMENT, 1000 + number], number)


def placed(router: Router, prompts: list[Prompt]) -> list[int | None]:
    decisions = [router.route(prompt) for prompt in prompts]
    return [decision and decision.worker for decision in decisions]


def test_ten_siblings_cost_one_prefix_and_ten_suffixes() -> None:
    router = router_of(tau=1000)
    assert placed(router, [sibling(n) for n in range(10)]) == [0] * 10
    assert router.load(0) == len(DOCUMENT) + 10


def test_popular_prefix_spills_to_least_loaded_worker() -> None:
    router = router_of(tau=len(DOCUMENT) + 2)
    assert placed(router, [sibling(n) for n in range(5)]) == [0, 0, 1, 1, 2]


def test_requests_wait_for_a_report_if_all_workers_are_saturated() -> None:
    router, worker = router_of(tau=1, workers=1), LoggingWorker(0, token_work, cache_blocks=99)
    assert placed(router, [sibling(0), sibling(1)]) == [0, None]
    for report in (worker.accept(sibling(0)), worker.start(), worker.finish()):
        router.apply(report)
    decision = router.route(sibling(1))
    assert decision is not None
    assert decision.cached_tokens == len(DOCUMENT)


def test_last_block_of_fully_cached_prompt_is_computed() -> None:
    router = router_of(tau=1000)
    assert placed(router, [prompt_of(DOCUMENT, 0), prompt_of(DOCUMENT, 1)]) == [0, 0]
    assert router.load(0) == len(DOCUMENT) + BLOCK


def test_calibration_sets_threshold_of_its_worker_only() -> None:
    config = RouterConfig(workers=2, saturation=SaturationConfig(fallback_prompts=(100,)))
    router = Router(config, token_work)
    measured = Calibration(first_layer_s=1.0, slowest_layer_s=3.0, reference_prompts=(100,))
    router.apply(WorkerReport(worker=1, epoch=0, number=0, calibration=measured))
    assert [router.threshold(worker) for worker in (0, 1)] == pytest.approx([110, 330], abs=1)


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


def test_snapshot_restores_cached_and_pending_blocks() -> None:
    worker, joined = LoggingWorker(1, token_work, cache_blocks=99), router_of(tau=1000)
    cached, promised = prompt_of([1] * 2 * BLOCK, 0), prompt_of([2] * 3 * BLOCK, 1)
    worker.accept(cached)
    worker.start()
    worker.finish()
    worker.accept(promised)
    joined.restore(worker.state.snapshot(1))
    assert joined.load(1) == 3 * BLOCK
    assert placed(joined, [prompt_of([1] * 9, 2), prompt_of([2] * 13, 3)]) == [1, 1]


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
