"""The stub engine: a prefill worker's frames and log without a model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.batching.scheduled_batch import ScheduledBatch
from actors.ranks.prefill_rank import prefill_rank
from actors.ranks.rank import Rank
from actors.ranks.serving_loop import ServingLoop
from actors.ranks.shell import WorkerShell
from contracts.config import KvConfig, LogConfig, PrefillConfig, TandemConfig
from contracts.messages import Submit
from contracts.ranks import Group, RankSpec
from contracts.requests import Caller, Priority
from contracts.routing_messages import RequestKey, WorkerReport, WorkerSnapshot
from planner.routing.request_work import token_work
from planner.routing.worker_state import WorkerState
from tests.support.group_harness import RankConnection, greedy
from tests.support.stub_executor import pseudo_answer

TOKEN = b"a token for tests"
BLOCK = 4
POOL_BLOCKS = 6


HELD_S = 0.3


@pytest.fixture
def stub(tiny_checkpoint: Callable[..., Path]) -> Iterator[Rank]:
    config = TandemConfig(
        kv=KvConfig(block_tokens=BLOCK, pool_tokens=POOL_BLOCKS * BLOCK),
        prefill=PrefillConfig(engine="tests.support.stub_rank:stub_rank", max_batch_tokens=16),
        log=LogConfig(stall_threshold_s=HELD_S),
    )
    spec = RankSpec(
        group=Group.PREFILL,
        rank=1,
        attention_ranks=0,
        expert_ranks=0,
        prefill_ranks=2,
        model_folder=str(tiny_checkpoint()),
        token=TOKEN,
        epoch=7,
        device="cpu",
        backend="shm",
        config=config,
    )
    worker = prefill_rank(spec)
    worker.start()
    yield worker
    worker.stop()


def connect(stub: Rank) -> RankConnection:
    return RankConnection(stub.ready.name, stub.ready.client_address, TOKEN)


def folded(connection: RankConnection) -> WorkerState:
    state = WorkerState(token_work, BLOCK)
    for entry in connection.log:
        if isinstance(entry, WorkerSnapshot):
            state.restore(entry)
        else:
            state.apply(entry)
    return state


def test_stub_answers_are_deterministic(stub: Rank) -> None:
    with connect(stub) as client:
        first = client.scored(client.submit([5, 6, 7], candidates=[1, 2], score_from=1))
        again = client.scored(client.submit([5, 6, 7], candidates=[1, 2], score_from=1))
        other = client.scored(client.submit([5, 6, 8], candidates=[1, 2], score_from=1))
        ids, finished = client.generated(client.submit([5, 6, 7], sampling=greedy(3)))
    assert first.candidate_logits == again.candidate_logits != other.candidate_logits
    assert first.token_logprobs is not None
    assert len(first.token_logprobs) == 2
    assert len(ids) == 3
    assert finished.usage.prompt_tokens == 3


def test_snapshot_is_first_and_every_client_gets_every_report(stub: Rank) -> None:
    with connect(stub) as client, connect(stub) as listener:
        key = RequestKey(3, 1)
        client.scored(client.submit(list(range(9)), candidates=[1], key=key))
        client.scored(client.submit(list(range(9)), candidates=[1]))
        listener.read_until(lambda: folded(listener).number >= folded(client).number)
        assert isinstance(client.log[0], WorkerSnapshot)
        assert isinstance(listener.log[0], WorkerSnapshot)
        assert folded(client).snapshot(1) == folded(listener).snapshot(1)
        reports = [entry for entry in client.log if isinstance(entry, WorkerReport)]
        named = [prompt.key for report in reports for prompt in report.accepted]
        assert named[0] == key
        assert named[1].router < 0


def test_load_is_zero_after_many_requests(
    stub: Rank,
) -> None:
    with connect(stub) as client:
        sent = [client.submit([n] * (1 + n % 13), candidates=[1]) for n in range(60)]
        cached = sum(client.scored(request).usage.cached_tokens for request in sent)
        repeated = client.scored(client.submit([59] * 9, candidates=[1]))
        state = folded(client)
        with connect(stub) as late:
            late.wait(late.submit([1], candidates=[1]))
            snapshot = late.log[0]
    assert isinstance(snapshot, WorkerSnapshot)
    assert state.requests.visible_to(Priority.BE).load == 0
    assert cached == 0
    assert 0 < len(state.committed()) <= POOL_BLOCKS
    assert set(snapshot.committed) == set(state.committed())
    assert repeated.usage.prompt_tokens == 9


def test_oversized_request_is_rejected(stub: Rank) -> None:
    with connect(stub) as client:
        failed = client.failed(client.submit([1] * 600, candidates=[1]))
    assert failed.code == "context_length_exceeded"
    assert "prefill-1" in failed.message


def test_shell_makes_configured_engine(stub: Rank) -> None:
    shell = WorkerShell()
    ready = shell.prepare(stub.spec)
    shell.stop()
    assert ready.name == "prefill-1"
    assert ready.client_address


def test_pseudo_answer_has_valid_log_probabilities() -> None:
    submit = Submit(request_id=1, token_ids=[1, 2, 3], sampling=None, score_from=1, score_top=2)
    (scored,) = pseudo_answer(submit, 0, 100)
    assert all(-8.0 <= logprob <= 0.0 for logprob in getattr(scored, "token_logprobs"))  # noqa: B009


def test_stalled_loop_logs_its_stack_and_continues(
    stub: Rank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(stub.loop, ServingLoop)
    executor, step = stub.loop.executor, stub.loop.executor.step
    logged, released = threading.Event(), threading.Event()

    def on_record(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("event_loop_blocked"):
            logged.set()
        return True

    def a_step_that_holds(timeout_s: float) -> list[ScheduledBatch]:
        released.wait(20.0)
        return step(timeout_s)

    caplog.handler.addFilter(on_record)
    connection = connect(stub)
    try:
        monkeypatch.setattr(executor, "step", a_step_that_holds)
        assert logged.wait(20.0)
        monkeypatch.setattr(executor, "step", step)
        released.set()
        connection.wait(connection.submit([1, 2, 3]))
    finally:
        released.set()
        caplog.handler.removeFilter(on_record)
        connection.close()
    (line,) = (m for m in caplog.messages if m.startswith("event_loop_blocked"))
    assert "rank=prefill-1" in line
    assert "thread prefill-1-loop:" in line
    assert "a_step_that_holds" in line


def test_trace_names_the_requests_of_a_batch(stub: Rank) -> None:
    since_s = stub.clock_s()
    connection = connect(stub)
    connection.wait(connection.submit([1, 2, 3], caller=Caller(request=1, name="mine")))
    connection.close()
    trace = stub.trace(since_s)
    assert trace.rank == "prefill-1"
    assert [batch.requests for batch in trace.batches] == [("mine",)]
    assert stub.trace(stub.clock_s()).batches == []
