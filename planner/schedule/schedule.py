"""A plan with the times of its tasks, and its exact replay: start and end of each task.

    attention group   A(t,0) S(t,0) A(t,1) S(t,1)         A(t+1,0) ...
    A2E link               c(0,0) c(0,1) c(1,0) c(1,1)
    expert group                  e(0,0) e(0,1) e(1,0) ...
    E2A link                             c(0,0) c(0,1) ...

Each resource runs one task at a time. Links and experts serve in the order of sending; the
attention group runs the paper's static order, in which a task that waits for a message delays all
behind it. This defines a plan's makespan in the planner. The executor picks among runnable tasks
instead (`actors/engine/executor.py`) and merges token groups at expert ranks.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from contracts.plan import Order, Plan
from contracts.traces import Stage, TaskSpan
from planner.costs.stages import PlanSpec
from planner.scheduling.task_order import Task, TaskStage, static_order


class GroupRun(NamedTuple):
    """Consecutive equal token groups; times of one of them in ms."""

    repeats: int
    a2e_ms: float
    expert_ms: float
    e2a_ms: float


class MicroBatchTimes(NamedTuple):
    """One layer's task times of a micro-batch in ms; token groups in the order of sending."""

    attention_ms: float
    shared_ms: float  # 0: no such task
    groups: tuple[GroupRun, ...]


class Schedule(NamedTuple):
    """Tasks of every layer and their order on the attention group."""

    micro_batches: tuple[MicroBatchTimes, ...]
    num_layers: int
    order: Order
    shared_lag: int


class Piece(NamedTuple):
    """A micro-batch: attention and shared time in ms; amount: its tokens in samples of the spec."""

    attention_ms: float
    shared_ms: float
    amount: float


def schedule_of(spec: PlanSpec, plan: Plan) -> Schedule:
    """Return the schedule of `plan`. Raises ValueError if the spec lacks what the plan needs.

    Without `plan.micro_batch_samples`, micro-batches have `plan.ma` samples each.
    """
    sizes = plan.micro_batch_samples
    if not sizes:
        if plan.ma is None:
            raise ValueError("ma is missing: a plan without micro_batch_samples needs it")
        sizes = (plan.ma,) * (plan.r1 // max(1, len(plan.sequence_chunks)))
    return schedule_of_pieces(spec, plan, pieces_of(spec, plan, sizes))


def schedule_of_pieces(spec: PlanSpec, plan: Plan, pieces: Sequence[Piece]) -> Schedule:
    """Return the schedule of `plan` with the given micro-batches."""
    return Schedule(
        tuple(
            MicroBatchTimes(
                piece.attention_ms, piece.shared_ms, (token_groups(spec, piece.amount, plan.r2),)
            )
            for piece in pieces
        ),
        spec.num_layers,
        plan.order,
        plan.shared_lag,
    )


def pieces_of(spec: PlanSpec, plan: Plan, sizes: Sequence[int]) -> list[Piece]:
    """Return micro-batches of `sizes` samples, each cut into the plan's chunks."""
    return [piece for size in sizes for piece in _chunks(spec, plan, size)]


def _chunks(spec: PlanSpec, plan: Plan, size: int) -> list[Piece]:
    """Return the chunks of `size` samples.

    A chunk [u, v) of the length has v - u of the tokens and, causally, v^2 - u^2 of the pairs; a
    later chunk reads keys and values up to v back.
    """
    attention, shared = spec.stages.attention, spec.shared
    if not plan.sequence_chunks:
        return [Piece(attention.at(size), shared.at(size), size)]
    quadratic = spec.attention_quadratic_fraction
    if quadratic is None:
        raise ValueError("attention_quadratic_fraction is missing: sequence_chunks need it")
    pieces = []
    for u, v in itertools.pairwise((0.0, *plan.sequence_chunks)):
        attention_ms = attention.at(
            size * ((1 - quadratic) * (v - u) + quadratic * (v * v - u * u))
        )
        if u > 0:
            attention_ms += size * (spec.attention_chunk_ms + spec.attention_context_ms * v)
        pieces.append(Piece(attention_ms, shared.at(size * (v - u)), size * (v - u)))
    return pieces


def token_groups(spec: PlanSpec, amount: float, r2: int) -> GroupRun:
    """Return r2 equal token groups of `amount` samples, each with `me` tokens per expert."""
    stages, me = spec.stages, spec.me(amount, r2)
    return GroupRun(r2, stages.a2e.at(me), stages.expert.at(me), stages.e2a.at(me))


ATTENTION_GROUP = "attention-0"
A2E_LINK = "attention-0>expert-0"
EXPERT_GROUP = "expert-0"
E2A_LINK = "expert-0>attention-0"
RESOURCES = (ATTENTION_GROUP, A2E_LINK, EXPERT_GROUP, E2A_LINK)


class Replay(NamedTuple):
    """Spans in seconds in the order of placing."""

    spans: list[TaskSpan]
    makespan_ms: float


class ScheduleSimulator:
    """Time from which each resource is free, and each micro-batch's next task can start."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.spans: list[TaskSpan] = []
        self.free_ms = dict.fromkeys(RESOURCES, 0.0)
        self.returned_ms = [0.0] * len(schedule.micro_batches)  # last E2A of the layer before

    def run(self, layer: int, micro_batch: int, stage: TaskStage) -> None:
        """Run a task of the attention group as soon as it can start, and all that it sends."""
        times = self.schedule.micro_batches[micro_batch]
        key = (layer, micro_batch)
        if stage is TaskStage.SHARED:
            self._place(ATTENTION_GROUP, Stage.SHARED, 0.0, times.shared_ms, *key)
            return
        end_ms = self._place(
            ATTENTION_GROUP,
            Stage.ATTENTION,
            self.returned_ms[micro_batch],
            times.attention_ms,
            *key,
        )
        if self.schedule.order.shared_before_dispatch and times.shared_ms:
            end_ms = self._place(ATTENTION_GROUP, Stage.SHARED, end_ms, times.shared_ms, *key)
        self.returned_ms[micro_batch] = self._send(times, end_ms, *key)

    def _send(self, times: MicroBatchTimes, ready_ms: float, layer: int, micro_batch: int) -> float:
        """Run A2E, experts and E2A of every token group; return the end of the last."""
        groups = (group for group in times.groups for _ in range(group.repeats))
        for number, group in enumerate(groups):
            key = (layer, micro_batch, number)
            sent_ms = self._place(A2E_LINK, Stage.A2E, ready_ms, group.a2e_ms, *key)
            computed_ms = self._place(EXPERT_GROUP, Stage.EXPERT, sent_ms, group.expert_ms, *key)
            end_ms = self._place(E2A_LINK, Stage.E2A, computed_ms, group.e2a_ms, *key)
        return end_ms

    def _place(
        self, resource: str, stage: Stage, ready_ms: float, length_ms: float, *key: int
    ) -> float:
        start_ms = max(self.free_ms[resource], ready_ms)
        end_ms = start_ms + length_ms
        self.free_ms[resource] = end_ms
        layer, micro_batch, group = (*key, 0)[:3]
        self.spans.append(
            TaskSpan(resource, stage, start_ms / 1e3, end_ms / 1e3, 0, layer, micro_batch, group)
        )
        return end_ms

    def result(self) -> Replay:
        return Replay(self.spans, max(self.free_ms.values()))


def replay(schedule: Schedule) -> Replay:
    """Replay the schedule in its static order (FinDEP Section 4.2)."""
    simulator = ScheduleSimulator(schedule)
    for task in attention_tasks(schedule, schedule.num_layers):
        simulator.run(task.layer, task.micro_batch, task.stage)
    return simulator.result()


def attention_tasks(schedule: Schedule, num_layers: int) -> list[Task]:
    """Return the attention group's tasks in the static order."""
    count = len(schedule.micro_batches)
    return [
        task
        for task in static_order(schedule.order, count, num_layers, schedule.shared_lag)
        if task.stage is TaskStage.ATTENTION or has_shared_task(schedule, task.micro_batch)
    ]


def has_shared_task(schedule: Schedule, micro_batch: int) -> bool:
    before = schedule.order.shared_before_dispatch
    return not before and schedule.micro_batches[micro_batch].shared_ms > 0
