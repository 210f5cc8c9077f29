"""The log of a real prefill worker, as clients and routers receive it."""

import logging
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.clock import monotonic_s
from contracts.messages import Cancel
from contracts.requests import Caller
from contracts.routing_messages import RequestKey, WorkerReport, WorkerSnapshot
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import SaturationConfig
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    greedy,
    loop_of,
    prefill_config,
)
from tests.support.tiny_models import Checkpoints

pytestmark = pytest.mark.long


def tokens_work(done_tokens: int, prompt_tokens: int) -> int:
    return prompt_tokens - done_tokens


def router_of(connection: RankConnection) -> Router:
    """Return a router with all reports of the connection."""
    saturation = SaturationConfig(fallback_prompts=(64,))
    router = Router(RouterConfig(workers=1, saturation=saturation), tokens_work)
    for entry in connection.log:
        if isinstance(entry, WorkerSnapshot):
            router.restore(entry)
        else:
            router.apply(entry)
    return router


def wait_for_report(connection: RankConnection, number: int) -> None:
    """Read up to that report."""
    connection.read_until(lambda: bool(connection.log) and connection.log[-1].number >= number)


def test_all_clients_receive_every_report_and_late_ones_a_snapshot(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    with (
        PrefillThreads(folder, prefill_config()) as group,
        group.client() as first,
        group.client() as second,
    ):
        key = RequestKey(7, 0)
        second.read_until(lambda: bool(second.log))  # it has joined
        first.scored(first.submit(range(3, 53), candidates=[0], key=key))
        wait_for_report(second, first.log[-1].number)
        assert first.log[1:] == second.log[-len(first.log) + 1 :]
        assert isinstance(first.log[0], WorkerSnapshot)
        reports = [entry for entry in first.log if isinstance(entry, WorkerReport)]
        assert [prompt.key for report in reports for prompt in report.accepted] == [key]
        progress_reports = [progress for report in reports for progress in report.progress]
        # It ends in the batch in which it starts.
        assert [progress.done_tokens for progress in progress_reports] == [0]
        assert sum(len(report.stored) for report in reports) == 3
        with group.client() as late:
            wait_for_report(late, first.log[-1].number)
            (snapshot,) = late.log
            assert isinstance(snapshot, WorkerSnapshot)
            assert len(snapshot.committed) == 3
            assert snapshot.requests == ()


def test_open_or_invalid_key_is_rejected(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    with PrefillThreads(folder, prefill_config()) as group, group.client() as client:
        key = RequestKey(1, 1)
        first = client.submit(range(3, 103), sampling=greedy(100), key=key)
        again = client.submit([5], candidates=[0], key=key)
        assert "in use" in client.failed(again).message
        assert "0 or more" in client.failed(client.submit([5], key=RequestKey(-1, 1))).message
        client.generated(first)
        client.scored(client.submit([5], candidates=[0], key=key))


def test_first_report_has_the_reference_pass(tiny_checkpoint: Checkpoints) -> None:
    config = prefill_config(prefill={"saturation": None, "max_batch_tokens": 200})
    with PrefillThreads(tiny_checkpoint("qwen3_moe"), config) as group, group.client() as client:
        client.scored(client.submit([3, 4], candidates=[0]))
        snapshot = client.log[0]
        assert isinstance(snapshot, WorkerSnapshot)
        assert snapshot.number == 0
        assert snapshot.calibration is not None
        assert sum(snapshot.calibration.reference_prompts) == 200
        status = group.workers[0].status()
        assert status.sections["work"]["saturation"] > 0
        assert status.sections["work"]["computed_flops"] > 0
        text = group.workers[0].metrics()
        assert 'tandem_saturation_flops{rank="prefill-0"}' in text
        assert 'tandem_model_flops_utilization{rank="prefill-0"}' in text


class Script(NamedTuple):
    """A request: prompt length, prefix, generation and cancellation."""

    tokens: int
    beginning: int
    generates: bool
    cancelled: bool


scripts = st.lists(
    st.builds(Script, st.integers(1, 70), st.integers(3, 6), st.booleans(), st.booleans()),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def crowded(tiny_checkpoint: Checkpoints) -> Iterator[PrefillThreads]:
    config = prefill_config(kv={"pool_tokens": 16 * 8}, prefill={"max_batch_tokens": 40})
    with PrefillThreads(tiny_checkpoint("qwen3_moe"), config) as group:
        yield group


@settings(deadline=None, max_examples=25)
@given(scripts)
def test_log_ends_without_load_after_any_requests(
    crowded: PrefillThreads, script: list[Script]
) -> None:
    with crowded.client() as client:
        ids = []
        for number, (tokens, beginning, generates, cancelled) in enumerate(script):
            sampling = greedy(5) if generates else None
            prompt = [beginning] * (tokens // 2) + [7 + number] * (tokens - tokens // 2)
            request = client.submit(prompt, sampling=sampling, key=RequestKey(0, number))
            if cancelled:
                client.send(Cancel(request))
            else:
                ids.append(request)
        ids.append(client.submit([3], candidates=[0]))  # the cancelled ones have gone before it
        client.wait(*ids)
        router = router_of(client)
        assert router.load(0) == 0
        assert set(router.snapshot(0).committed) == set(
            loop_of(crowded.workers[0]).scheduler.blocks._block_of
        )


def test_failing_worker_reports_before_it_fails_requests(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise requests return to it for its cached prefix."""
    with PrefillThreads(tiny_checkpoint(), prefill_config()) as group, group.client() as connection:
        executor = loop_of(group.workers[0]).executor
        step = executor.step

        def broken(timeout_s: float) -> object:
            if executor.live:
                raise RuntimeError("out of memory")
            return step(timeout_s)

        monkeypatch.setattr(executor, "step", broken)
        failed = connection.failed(connection.submit([1, 2, 3], candidates=[1]))
        assert "out of memory" in failed.message
        assert connection.state is not None
        assert not connection.state.healthy


def test_stalled_loop_logs_its_stack_and_continues(
    tiny_checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = threading.Event()

    def on_record(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("event_loop_blocked"):
            logged.set()
        return True

    config = prefill_config(log={"stall_threshold_s": 0.3})
    with PrefillThreads(tiny_checkpoint(), config) as group, group.client() as connection:
        executor = loop_of(group.workers[0]).executor
        step = executor.step

        def a_step_that_holds(timeout_s: float) -> object:
            logged.wait(20.0)
            return step(timeout_s)

        caplog.handler.addFilter(on_record)
        monkeypatch.setattr(executor, "step", a_step_that_holds)
        connection.wait(connection.submit([1, 2, 3]))
        caplog.handler.removeFilter(on_record)
    (line,) = (m for m in caplog.messages if m.startswith("event_loop_blocked"))
    assert "rank=prefill-0" in line
    assert "thread prefill-0-loop:" in line
    assert "a_step_that_holds" in line


def test_trace_names_the_requests_of_a_batch(tiny_checkpoint: Checkpoints) -> None:
    with PrefillThreads(tiny_checkpoint(), prefill_config()) as group, group.client() as client:
        (worker,) = group.workers
        since_s = monotonic_s()
        client.wait(client.submit([1, 2, 3], caller=Caller(request=1, name="mine")))
        trace = worker.trace(since_s)
        assert trace.rank == "prefill-0"
        assert [batch.requests for batch in trace.batches] == [("mine",)]
        assert worker.trace(monotonic_s()).batches == []
