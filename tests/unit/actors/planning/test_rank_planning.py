"""Plans of an attention rank: requested ahead, checked and counted."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from actors.planning.planner_link import PlannerLink
from actors.planning.rank_planning import RankPlanning
from actors.telemetry.telemetry import Telemetry
from contracts.clock import Clock, monotonic_s
from contracts.config import ScheduleConfig
from contracts.messages import Submit
from contracts.plan import Order, Plan
from contracts.planner_messages import BatchReport, ExpertReport, PlanRequest, PlanResponse
from contracts.ranks import Group, RankSpec
from contracts.requests import Sampling
from contracts.traces import Stage, TaskSpan
from tests.support.fake_planner import DEADLINE_S, TOKEN, FakePlanner, never, real_planner
from tests.support.group_harness import ThreadGroup, greedy, group_config, loop_of
from tests.support.local_model import LocalModel
from tests.support.simulated_group import hardware
from tests.support.tiny_models import prompts

Checkpoints = Callable[..., Path]
CHOSEN = Plan(r1=3, r2=2)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition of another thread holds."""
    end_s = monotonic_s() + DEADLINE_S
    while not condition():
        assert monotonic_s() < end_s, "it never came true"
        time.sleep(0.001)


def always(plan: Plan) -> Callable[[PlanRequest], PlanResponse]:
    return lambda query: PlanResponse(number=query.number, version=1, plan=plan, predicted_ms=1.0)


def spec(**planner: object) -> RankSpec:
    return RankSpec(
        group=Group.ATTENTION,
        rank=0,
        attention_ranks=1,
        expert_ranks=1,
        model_folder="",
        token=TOKEN,
        epoch=1,
        device="cpu",
        backend="shm",
        config=group_config(planner=planner),
    )


class Rank:
    """Scheduler and planning of an attention rank; batches take no time."""

    def __init__(self, clock: Clock = monotonic_s, **planner: object) -> None:
        self.scheduler = Scheduler(ScheduleConfig(), BlockManager(1024))
        self.planning = RankPlanning(
            spec(**planner),
            chunk_cost=lambda start, stop: float(stop - start),
            upcoming=self.scheduler.upcoming,
            clock=clock,
            telemetry=Telemetry(),
        )
        self._requests = 0

    def submit(self, tokens: int, max_tokens: int = 100) -> None:
        """Submit a prompt that shares no block with others."""
        self._requests += 1
        ids = [1000 * self._requests + position for position in range(tokens)]
        sampling = Sampling(max_tokens=max_tokens)
        submit = Submit(request_id=self._requests, token_ids=ids, sampling=sampling)
        self.scheduler.add(Sequence((0, self._requests), submit, 16))

    @property
    def link(self) -> PlannerLink:
        link = self.planning._link
        assert link is not None
        return link

    @property
    def answers(self) -> int:
        """Return the shapes of batches with plans."""
        return len(self.link.plans)

    def form(self) -> tuple[ScheduledBatch, Plan]:
        batch = self.scheduler.next_batch()
        assert batch is not None
        return batch, self.planning.choose(batch)

    def run(self, batch: ScheduledBatch) -> None:
        """Each sequence whose prompt is through gets a token."""
        for chunk in batch.chunks:
            if chunk.stop == len(chunk.sequence.token_ids):
                chunk.sequence.token_ids.append(5)
        self.scheduler.complete(batch)
        self.planning.completed(batch)

    def close(self) -> None:
        self.planning.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    with closing(Rank()) as made:
        yield made


def test_default_plan_runs_without_planner(rank: Rank) -> None:
    rank.submit(100)
    _, plan = rank.form()
    assert plan == Plan(r1=2)
    assert (rank.planning.state, dict(rank.planning.chosen)) == ("off", {"default off": 1})


def test_plan_requested_ahead_is_used_when_the_batch_is_formed(rank: Rank) -> None:
    with FakePlanner(always(CHOSEN)) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        for tokens in (100, 101, 102):
            rank.submit(tokens)
        rank.planning.request_upcoming()
        until(lambda: rank.answers == 1)
        _, plan = rank.form()
        assert plan == CHOSEN
        assert dict(rank.planning.chosen) == {"planner": 1}


def test_unknown_shape_runs_default_plan_and_is_requested(rank: Rank) -> None:
    with FakePlanner(always(CHOSEN)) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        rank.submit(64)
        batch, plan = rank.form()
        assert plan == Plan(r1=2)
        assert dict(rank.planning.chosen) == {"default new_shape": 1}
        assert planner.next_query().batch == [(0, 64)]
        rank.run(batch)


def test_upcoming_batch_is_predicted_exactly(rank: Rank) -> None:
    for tokens in (40, 3000, 2000):
        rank.submit(tokens)
    for _ in range(4):
        batch, _ = rank.form()
        [guess] = rank.scheduler.upcoming()
        rank.run(batch)
        following, _ = rank.form()
        assert [(chunk.start, chunk.stop) for chunk in following.chunks] == guess
        rank.run(following)


def test_ending_sequences_are_not_in_upcoming_batch(rank: Rank) -> None:
    rank.submit(20, max_tokens=1)
    rank.submit(30, max_tokens=5)
    rank.form()
    assert rank.scheduler.upcoming() == [[(30, 31)]]


def test_plan_follows_shape_within_one_batch(tiny_checkpoint: Checkpoints, rank: Rank) -> None:
    """A long prompt arrives while the last short batch runs."""
    folder = tiny_checkpoint("qwen3_moe", max_position_embeddings=8192)
    with real_planner(folder, group_config(), hardware(), TOKEN) as planner:
        rank.planning.join(planner.ready.channel_address)
        until(lambda: rank.planning.state == "ready")
        for _ in range(2):
            rank.submit(256, max_tokens=1)
        batch, _ = rank.form()  # asks, too late for this one
        rank.submit(4096, max_tokens=1)
        rank.planning.request_upcoming()  # as the loop does while it runs
        until(lambda: rank.answers == 2)
        rank.run(batch)
        for chunk in batch.chunks:
            rank.scheduler.cancel(chunk.sequence.key)
        long_batch, plan = rank.form()
        assert long_batch.tokens == 4096
        assert rank.planning.chosen["planner"] == 1
        assert plan.sequence_chunks, "a long prompt alone is cut along its length"


def test_pinned_plan_overrides_the_planner_without_query(rank: Rank) -> None:
    with FakePlanner(always(CHOSEN)) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        rank.planning.pin(Plan(order=Order.NAIVE))
        rank.submit(100)
        rank.planning.request_upcoming()
        batch, plan = rank.form()
        assert plan == Plan(order=Order.NAIVE)
        assert dict(rank.planning.chosen) == {"pinned": 1}
        rank.run(batch)
        reported = threading.Event()
        rank.link.report(reported.set)  # runs after all earlier messages
        assert reported.wait(DEADLINE_S)
        rank.planning.pin(None)
        rank.submit(7)
        rank.planning.request_upcoming()
        assert (0, 7) in planner.next_query().batch


def test_plan_with_too_many_micro_batches_is_rejected(rank: Rank) -> None:
    with FakePlanner(always(Plan(r1=4))) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        rank.submit(50)
        rank.planning.request_upcoming()
        until(lambda: rank.answers == 1)
        _, plan = rank.form()
        assert plan == Plan(r1=1)
        assert dict(rank.planning.chosen) == {"default misfit": 1}


def test_cold_planner_is_reported_with_its_reason(rank: Rank) -> None:
    def cold(query: PlanRequest) -> PlanResponse:
        return PlanResponse(number=query.number, version=1, reason="too few times yet of: expert")

    with FakePlanner(cold) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        rank.submit(50)
        batch, _ = rank.form()
        until(lambda: rank.planning.state == "cold: too few times yet of: expert")
        rank.run(batch)
        rank.form()
        assert rank.planning.chosen["default cold"] == 1


def test_overdue_planner_is_slow_and_gets_no_query() -> None:
    with closing(Rank(answer_timeout_s=1e-6)) as rank, FakePlanner(never) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        rank.submit(10)
        rank.run(rank.form()[0])
        until(lambda: rank.planning.state == "slow")
        rank.planning.chosen.clear()  # the first: slow by then, or not yet
        for tokens in (20, 40, 80, 160):
            rank.submit(tokens)
            rank.run(rank.form()[0])
        assert dict(rank.planning.chosen) == {"default slow": 4}
        assert planner.next_query().number == 1
        assert planner.next_query().number == 2
        assert planner.received.empty()


def test_each_change_of_state_is_logged_once(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.planning")
    with FakePlanner(always(CHOSEN)) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        rank.submit(50)
        for _ in range(3):
            rank.run(rank.form()[0])
    until(lambda: rank.planning.state == "lost")
    for _ in range(3):
        rank.run(rank.form()[0])
    start = "planner_state rank=attention-0 state="
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"{start}ready", f"{start}lost"]


def test_lost_planner_answers_are_discarded(rank: Rank) -> None:
    with FakePlanner(always(CHOSEN)) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        rank.submit(50)
        rank.planning.request_upcoming()
        until(lambda: rank.answers == 1)
    until(lambda: rank.planning.state == "lost")
    rank.form()
    assert dict(rank.planning.chosen) == {"default lost": 1}


def test_returning_planner_is_reconnected(rank: Rank) -> None:
    with FakePlanner(always(CHOSEN)) as planner:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        planner.hang_up()
        until(lambda: rank.planning.state == "lost")
        until(lambda: rank.planning.state == "ready")


def test_silent_planner_delays_no_batch(tiny_checkpoint: Checkpoints) -> None:
    started, release = threading.Event(), threading.Event()

    def stuck() -> None:
        started.set()
        release.wait()

    folder = tiny_checkpoint("qwen3_moe")
    config = group_config(planner={"answer_timeout_s": 1e-6, "report_interval_s": 0})
    with ThreadGroup(folder, config) as group, FakePlanner(never, group.token) as planner:
        group.join_planner(planner.address)
        worker = group.attention[0]
        (planning, *_) = loop_of(worker)._observers
        assert isinstance(planning, RankPlanning)
        joined = ("ready", "slow")  # slow after the first request
        until(lambda: worker.status().notes["planner"] in joined)
        link = planning._link
        assert link is not None
        try:
            link.report(stuck)
            while not started.wait(1.0):  # the connection was lost meanwhile: again on the next one
                until(lambda: worker.status().notes["planner"] in joined)
                link.report(stuck)
            with group.client() as client:
                lengths = [5, 90, 33]
                requests = [client.submit(ids, sampling=greedy(8)) for ids in prompts(1, lengths)]
                answers = [client.generated(request)[0] for request in requests]
        finally:
            release.set()
    assert [len(tokens) for tokens in answers] == [8, 8, 8]
    assert worker.status().sections["chosen_by"].keys() <= {
        "default off",
        "default new_shape",
        "default slow",
    }


ANY_PLAN = [
    Plan(r1=2, r2=2),
    Plan(r1=3, micro_batch_samples=(1, 1, 1)),
    Plan(r1=4, r2=2, sequence_chunks=(0.5, 1.0)),
    Plan(r1=3, r2=3, shared_lag=2),
    Plan(order=Order.AASS, r1=2, r2=2),
]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_greedy_tokens_are_equal_under_every_plan(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    sequences = prompts(2, [5, 40, 33, 120])
    queries = []

    def any_plan(query: PlanRequest) -> PlanResponse:
        queries.append(query)
        return always(ANY_PLAN[len(queries) % len(ANY_PLAN)])(query)

    expected = [_greedy(local, ids, 12) for ids in sequences]
    with (
        ThreadGroup(folder, group_config(1, 2, planner={"report_interval_s": 0})) as group,
        FakePlanner(any_plan, group.token) as planner,
        group.client() as client,
    ):
        group.join_planner(planner.address)
        for _ in range(4):
            requests = [client.submit(ids, sampling=greedy(12)) for ids in sequences]
            assert [client.generated(request)[0] for request in requests] == expected
        assert group.attention[0].status().sections["chosen_by"]["planner"] > 0


def _greedy(local: LocalModel, ids: list[int], count: int) -> list[int]:
    ids, prompt = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(local.forward([ids])[0][-1].argmax()))
    return ids[prompt:]


def test_ranks_report_stage_times(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("deepseek_v2")
    found: dict[type, object] = {}
    with (
        ThreadGroup(folder, group_config(planner={"report_interval_s": 0})) as group,
        FakePlanner(never, group.token) as planner,
        group.client() as client,
    ):
        group.join_planner(planner.address)
        while found.keys() != {BatchReport, ExpertReport}:
            client.generated(client.submit(prompts(3, [70])[0], sampling=greedy(3)))
            while not planner.received.empty():
                message = planner.received.get()
                if isinstance(message, BatchReport | ExpertReport):
                    found[type(message)] = message
    batch, experts = found[BatchReport], found[ExpertReport]
    assert isinstance(batch, BatchReport)
    assert isinstance(experts, ExpertReport)
    assert sum(times.attention_ms + times.shared_ms for times in batch.micro_batches) > 0
    assert all(times.shared_ms > 0 for times in batch.micro_batches)
    assert batch.measured_ms > sum(times.attention_ms for times in batch.micro_batches)
    assert experts.experts[0].rows >= 1


def test_gap_between_batches_is_reported_for_continuing_sequence() -> None:
    now_s = 10.0
    found: list[BatchReport] = []
    with FakePlanner(never) as planner, closing(Rank(lambda: now_s, report_interval_s=0)) as rank:
        rank.planning.join(planner.address)
        until(lambda: rank.planning.state != "joining")

        def run(begin_s: float, end_s: float, left_s: float) -> None:
            """Formed now; its only task is from begin_s to end_s, and it is left at left_s."""
            nonlocal now_s
            batch, _ = rank.form()
            for stage in (Stage.ATTENTION, Stage.SEND):
                span = TaskSpan("attention-0", stage, begin_s, end_s, batch.number)
                rank.planning.observe(span)
            now_s = left_s
            rank.run(batch)

        rank.submit(1, max_tokens=8)
        run(10.1, 10.9, 11.0)  # the first: nothing was before it
        now_s = 11.2
        run(11.3, 11.8, 12.0)
        while len(found) < 2:
            message = planner.received.get(timeout=DEADLINE_S)
            if isinstance(message, BatchReport):
                found.append(message)
    assert found[0].between_ms == 0
    assert found[1].measured_ms == pytest.approx(500)
    assert found[1].between_ms == pytest.approx(500), "a second from end to end, half of it tasks"


def test_connecting_planner_is_not_reported_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the call, and says nothing yet
        address = f"tcp:127.0.0.1:{silent.getsockname()[1]}"
        rank = Rank()
        rank.planning.join(address)
        rank.submit(8)
        with caplog.at_level(logging.INFO, "tandem.planning"), closing(rank.planning):
            rank.run(rank.form()[0])
            assert rank.planning.state == "joining"
            silent.accept()[0].close()
            until(lambda: rank.planning.state == "lost")
            rank.run(rank.form()[0])
    messages = [(r.levelname, r.getMessage().split()[-1]) for r in caplog.records]
    assert messages == [("INFO", "state=joining"), ("WARNING", "state=lost")]
