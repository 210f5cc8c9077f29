"""Plans of an attention rank: requested ahead, checked and counted."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from actors.planning import link_probe as link_probe_module
from actors.planning import stage_probe as stage_probe_module
from actors.planning.calibration import BUDGET_S, PROBE_TOKENS, calibrate
from actors.planning.link_probe import link_probe
from actors.planning.planner_inputs import layer_routing
from actors.planning.planner_link import PlannerLink
from actors.planning.rank_planning import RankPlanning
from actors.planning.stage_probe import StageProbe, pool_tokens_for
from actors.planning.stage_report import micro_batch_times
from actors.telemetry.telemetry import Telemetry
from contracts.clock import Clock, monotonic_s
from contracts.config import ScheduleConfig
from contracts.errors import ResourceError
from contracts.messages import Submit
from contracts.plan import Order, Plan
from contracts.planner_messages import (
    TRIAL_REPORTS,
    BatchReport,
    PlanRequest,
    PlanResponse,
    RoutingSampleReport,
)
from contracts.ranks import Group, RankSpec
from contracts.requests import Sampling
from contracts.traces import Stage, TaskSpan
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from planner.placement.routing import measure
from planner.placement.slots import LayerSlots
from planner.schedule.batch_plan import bucket_of
from tests.support.fake_planner import DEADLINE_S, TOKEN, FakePlanner, never, real_planner
from tests.support.fork_server import start_forked
from tests.support.group_harness import RankConnection, ThreadGroup, greedy, group_config, until
from tests.support.rank_specs import rank_spec
from tests.support.simulated_group import hardware
from tests.support.tiny_models import FAMILIES, Checkpoints, prompts

CHOSEN = Plan(r1=3, r2=2)


def always(plan: Plan) -> Callable[[PlanRequest], PlanResponse]:
    return lambda query: PlanResponse(number=query.number, version=1, plan=plan)


def spec(**planner: object) -> RankSpec:
    return rank_spec(Group.ATTENTION, token=TOKEN, config=group_config(planner=planner))


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
        return self.planning.link

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
        self.planning.link.close()


@contextmanager
def planned(
    rank: Rank, answer: Callable[[PlanRequest], PlanResponse | None]
) -> Iterator[FakePlanner]:
    """Connect the rank to a planner."""
    with FakePlanner(answer) as planner:
        rank.planning.link.join(planner.address)
        until(lambda: rank.planning.state == "ready")
        yield planner


@pytest.fixture
def rank() -> Iterator[Rank]:
    with closing(Rank()) as made:
        yield made


def test_plan_requested_ahead_is_used_when_the_batch_is_formed(rank: Rank) -> None:
    with planned(rank, always(CHOSEN)):
        for tokens in (100, 101, 102):
            rank.submit(tokens)
        rank.planning.request_upcoming()
        until(lambda: rank.answers == 1)
        _, plan = rank.form()
        assert plan == CHOSEN
        assert dict(rank.planning.chosen) == {"planner": 1}


def test_unknown_shape_runs_default_plan_and_is_requested(rank: Rank) -> None:
    with planned(rank, always(CHOSEN)) as planner:
        rank.submit(64)
        batch, plan = rank.form()
        assert plan == Plan(r1=2)
        assert dict(rank.planning.chosen) == {"default new_shape": 1}
        assert planner.next_query().batch == [(0, 64)]
        rank.run(batch)


def test_plan_follows_shape_within_one_batch(tiny_checkpoint: Checkpoints, rank: Rank) -> None:
    """A long prompt arrives while the last short batch runs."""
    folder = tiny_checkpoint("qwen3_moe", max_position_embeddings=8192)
    with real_planner(folder, group_config(), hardware(), TOKEN) as planner:
        rank.planning.link.join(planner.ready.channel_address)
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
    with planned(rank, always(CHOSEN)) as planner:
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
    with planned(rank, always(Plan(r1=4))):
        rank.submit(50)
        rank.planning.request_upcoming()
        until(lambda: rank.answers == 1)
        _, plan = rank.form()
        assert plan == Plan(r1=1)
        assert dict(rank.planning.chosen) == {"default misfit": 1}


def test_cold_planner_is_reported_with_its_reason(rank: Rank) -> None:
    def cold(query: PlanRequest) -> PlanResponse:
        return PlanResponse(number=query.number, version=1, reason="too few times yet of: expert")

    with planned(rank, cold):
        rank.submit(50)
        batch, _ = rank.form()
        until(lambda: rank.planning.state == "cold: too few times yet of: expert")
        rank.run(batch)
        rank.form()
        assert rank.planning.chosen["default cold"] == 1


def test_overdue_planner_is_slow_and_gets_no_query() -> None:
    with closing(Rank(answer_timeout_s=1e-6)) as rank, FakePlanner(never) as planner:
        rank.planning.link.join(planner.address)
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


def test_lost_planner_answers_are_discarded(rank: Rank) -> None:
    with planned(rank, always(CHOSEN)):
        rank.submit(50)
        rank.planning.request_upcoming()
        until(lambda: rank.answers == 1)
    until(lambda: rank.planning.state == "lost")
    rank.form()
    assert dict(rank.planning.chosen) == {"default lost": 1}


def test_returning_planner_is_reconnected(rank: Rank) -> None:
    with planned(rank, always(CHOSEN)) as planner:
        planner.hang_up()
        until(lambda: rank.planning.state == "lost")
        until(lambda: rank.planning.state == "ready")


def test_trial_runs_a_few_batches_which_are_all_reported() -> None:
    trial, reports = Plan(r1=2), list[BatchReport]()

    def answer(query: PlanRequest) -> PlanResponse:
        return msgspec.structs.replace(always(Plan())(query), trial=trial)

    def knows_next() -> bool:
        made.planning.request_upcoming()
        return all(bucket_of(each) in made.link.plans for each in made.scheduler.upcoming())

    with closing(Rank(report_interval_s=3600)) as made, planned(made, answer) as planner:
        seen = []
        for _ in range(4):
            made.submit(1)
        for number in range(3 + 2 * TRIAL_REPORTS):
            batch, plan = made.form()
            seen.append(plan.r1)
            for stage in (Stage.ATTENTION, Stage.SEND):
                for part in range(plan.r1):
                    task = "attention-0", stage, number, number + 1, batch.number, 0, part
                    made.planning.observe(TaskSpan(*task))
            made.run(batch)
            until(knows_next)
        while len(reports) < TRIAL_REPORTS:
            message = planner.received.get(timeout=DEADLINE_S)
            if isinstance(message, BatchReport):
                reports.append(message)
    assert all(report.plan.r1 == 2 for report in reports)
    assert seen.count(2) == TRIAL_REPORTS


def test_gap_between_batches_is_reported_for_continuing_sequence() -> None:
    now_s = 10.0
    found: list[BatchReport] = []
    with FakePlanner(never) as planner, closing(Rank(lambda: now_s, report_interval_s=0)) as rank:
        rank.planning.link.join(planner.address)
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


FOLDER = Path(__file__).resolve().parents[4] / "models" / "bundled"


def test_planner_uses_counted_routing() -> None:
    spec = read_spec(FOLDER)
    counts = RoutingCounts.read(FOLDER / "routing.safetensors", FOLDER, spec)
    for layer in spec.moe_layers:
        routing = layer_routing(counts, layer)
        assert routing.num_experts == spec.num_experts
        assert len(routing.sets_PK) == len(routing.ids_P) == 4096
        assert routing.counts.times_N.min() > 0
        sampled, counted = routing.load() / 4096, counts.layers[layer].load_E / counts.counted
        assert np.abs(sampled - counted).max() < 0.05
        contiguous = LayerSlots(range(spec.num_experts), ((0, 8), (8, 16)))
        assert 1.0 < measure(routing, contiguous).copies < 2.0


@pytest.mark.parametrize("placement", [{"rebalance": "continuous"}, {"record": "/tmp"}])
def test_routing_paths_are_reported_if_needed(
    tiny_checkpoint: Checkpoints, placement: dict[str, Any]
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    spec = read_spec(folder)
    rows = prompts(4, [40, 33, 57])
    config = group_config(1, 2, placement={**placement, "sample_tokens": 64})
    with ThreadGroup(folder, config) as group, FakePlanner(token=group.token) as planner:
        group.join_planner(planner.address)
        with group.client() as client:
            report = _first(planner, client, rows)
    ids_P2 = np.frombuffer(report.ids, "<i4").reshape(-1, 2)
    shape = len(ids_P2), len(spec.moe_layers), spec.top_k
    paths_PLK = np.frombuffer(report.paths, "<i2").reshape(shape)
    assert report.rank == "attention-0"
    assert 0 < len(ids_P2) <= min(report.tokens, 32)
    assert paths_PLK.min() >= 0
    assert paths_PLK.max() < spec.num_experts
    sets = paths_PLK.reshape(-1, spec.top_k).tolist()
    assert all(len(set(experts)) == spec.top_k for experts in sets)


def _first(
    planner: FakePlanner, client: RankConnection, rows: list[list[int]]
) -> RoutingSampleReport:
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        client.generated(client.submit(rows[0], sampling=greedy(4)))
        while not planner.received.empty():
            message = planner.received.get()
            if isinstance(message, RoutingSampleReport):
                return message
    raise AssertionError("nothing was reported")


class SimulatedLayers:
    """Layer times as `token_s` and a transfer have them; the first pass of a size is slow, and
    every other one may be disturbed in one layer. `seconds`: of all passes so far."""

    def __init__(self, token_s: float, transfer_s: float, *, disturbed: bool = False) -> None:
        self.token_s, self.transfer_s, self.layers = token_s, transfer_s, 4
        self.disturbed = disturbed
        self.seconds = 0.0
        self.sizes: list[int] = []

    def __call__(self, lengths: SequenceOf[int]) -> list[float]:
        compute_s = sum(lengths) * self.token_s
        times = [compute_s] + [max(compute_s, self.transfer_s)] * (self.layers - 1)
        if sum(lengths) not in self.sizes:
            times = [3 * time for time in times]
        elif self.disturbed and len(self.sizes) % 2:
            times[2] *= 1.5
        self.sizes.append(sum(lengths))
        self.seconds += sum(times)
        return times


def test_times_exclude_disturbance_of_single_pass() -> None:
    layers = SimulatedLayers(token_s=1e-6, transfer_s=0.008, disturbed=True)
    calibration, _ = calibrate(layers, max_tokens=4096, context_tokens=2048)
    assert calibration.reference_prompts == (512,) * 8
    assert abs(calibration.first_layer_s - 4096e-6) < 1e-9
    assert abs(calibration.slowest_layer_s - 0.008) < 1e-9


@pytest.mark.parametrize(("transfer_s", "slowest_s"), [(1e-3, 4.096), (20.0, 20.0)])
def test_slow_worker_measures_small_batch_and_reports_largest(
    transfer_s: float, slowest_s: float
) -> None:
    layers = SimulatedLayers(token_s=1e-3, transfer_s=transfer_s)
    calibration, batches = calibrate(layers, max_tokens=4096, context_tokens=2048)
    assert PROBE_TOKENS <= max(layers.sizes) < 4096
    assert layers.seconds < 4 * BUDGET_S + 5 * 4 * 3 * transfer_s
    assert calibration.reference_prompts == (512,) * 8
    assert calibration.first_layer_s == pytest.approx(4.096)
    assert calibration.slowest_layer_s == pytest.approx(slowest_s)
    seconds = {sum(prompts): seconds for prompts, seconds in batches}
    assert seconds[4096] == pytest.approx(4.096 + 3 * slowest_s), "all layers, by the same rule"


def test_smaller_batches_are_timed_within_budget() -> None:
    layers = SimulatedLayers(token_s=1e-6, transfer_s=1e-4)
    _, batches = calibrate(layers, max_tokens=4096, context_tokens=2048)
    seconds = {sum(prompts): seconds for prompts, seconds in batches}
    assert list(seconds) == [4096, 512, 64, 8]
    assert seconds[512] == pytest.approx(4 * 512e-6)
    assert seconds[64] == pytest.approx(64e-6 + 3 * 1e-4)
    copied = SimulatedLayers(token_s=1e-6, transfer_s=0.5)
    _, batches = calibrate(copied, max_tokens=4096, context_tokens=2048)
    assert len(batches) == 1, "a pass of any size would take as long as all of them may"


RAGGED = [(0, 20), (16, 17), (32, 40)]  # a prompt, a decode step, a chunk behind a prefix


@pytest.mark.parametrize("family", FAMILIES)
def test_pass_times_every_stage_except_first_layer(
    family: str, tiny_checkpoint: Checkpoints
) -> None:
    folder = tiny_checkpoint(family)
    spec = read_spec(folder)
    with closing(
        StageProbe(folder, spec, torch.float32, pool_tokens=pool_tokens_for(RAGGED))
    ) as probe:
        times = probe.run(RAGGED, seed=0)
    layers = list(spec.moe_layers[1:])
    attention = [task.layer for task in times.attention if task.stage is Stage.ATTENTION]
    shared = [task.layer for task in times.attention if task.stage is Stage.SHARED]
    assert attention == layers
    assert shared == (layers if spec.num_shared_experts else [])
    assert [task.layer for task in times.expert] == layers
    assert all(task.seconds > 0 for task in times.attention)
    assert all(task.seconds > 0 for task in times.expert)


def test_pairs_are_divided_among_expert_ranks(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    spec = read_spec(folder)
    pool = pool_tokens_for(RAGGED)
    with closing(
        StageProbe(folder, spec, torch.float32, pool_tokens=pool, expert_ranks=4)
    ) as probe:
        times = probe.run(RAGGED, seed=0)
    assert 1 < times.copies <= spec.top_k
    for layer in spec.moe_layers[1:]:
        assert sum(task.pairs for task in times.expert if task.layer == layer) == 29 * spec.top_k


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_served_batch_has_time_outside_layers(
    family: str, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is timed takes a second, so that layers with experts are at their median."""
    seconds = itertools.count()
    monkeypatch.setattr(stage_probe_module, "time", SimpleNamespace(thread_time=seconds.__next__))
    folder = tiny_checkpoint(family)
    with closing(StageProbe(folder, read_spec(folder), torch.float32, pool_tokens=512)) as probe:
        for micro_batches in (1, 2):
            # Forming and completing the batch, and at least two steps that end no attention task.
            assert probe.serve([20, 7, 33], micro_batches=micro_batches, seed=1) >= 4
        assert probe.run(RAGGED, seed=0).attention  # goes on as before


def test_model_larger_than_memory_is_rejected(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    with (
        pytest.raises(ResourceError, match="GiB are free"),
        closing(StageProbe(folder, read_spec(folder), torch.float32, pool_tokens=1 << 40)),
    ):
        pass


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.usefixtures("forked_processes")
def test_link_is_timed_in_both_directions(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start_forked(monkeypatch, link_probe_module)
    with link_probe(backend) as probe:
        transfers = [probe.transfer(size) for size in (1, 4096, 1 << 20)]
    assert [transfer.num_bytes for transfer in transfers] == [1, 4096, 1 << 20]
    assert all(transfer.a2e_s > 0 and transfer.e2a_s > 0 for transfer in transfers)
