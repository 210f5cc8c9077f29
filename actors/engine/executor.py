"""The event loop of a worker: micro-batches as state machines over a ready set.

    ATTENTION(t) ──> experts(t), on their plane ──> ATTENTION(t+1) ... ──> FINISH
         └────> SHARED(t) ──────────────────────────┘

What can run now is the *ready set*. A task is a generator: it yields where others may go first
(kernels/steps.py), and what goes on is chosen anew (planner/scheduling/preemption.py). To preempt a
task is not to resume it: everything it needs stays in its frame. Tasks never wait: only the loop
does, and only when nothing is ready, or what is ready would make others late.

Owned by one thread. Where experts are computed is the plane's business (actors/moe/backend.py):
FinDEP's A2E and E2A tasks, copies of weights, or a step of all workers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from actors.batching.scheduled_batch import Chunk, ScheduledBatch, slice_of
from actors.engine.micro_batch import BatchRun, MicroBatch, PassTimes, TaskSpans, cut_batch
from actors.moe.backend import ExpertBackend, TaskKey
from actors.moe.routing_sample import RoutingSample
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from models.experts.router import RoutedTokens
from planner.scheduling.batching import LiveBatch
from planner.scheduling.preemption import POLL_INTERVAL_S, Preemption
from planner.scheduling.task_order import Task, TaskPolicy, TaskStage, by_plan

HOLD_S = 0.001  # while work is held back


class HiddenStateSink(Protocol):
    """Where finished hidden states go (logits, sampling, answers)."""

    def __call__(
        self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: Tensor
    ) -> Iterable[None]:
        """Its work is done once that has been gone through. `hidden_TD`: residual after the last
        layer, rows as in `batch`, whose sequences are those of the chunks, in their order; of each
        at least the rows whose logits are wanted."""


class ExecutorParts(NamedTuple):
    """What an executor works with. name: of the rank, for its spans. sample: told of micro-batches
    that are about to run."""

    name: str
    half: AttentionHalf
    kv: KvPool
    backend: ExpertBackend[Any]
    sink: HiddenStateSink
    timeline: Timeline
    clock: Clock
    sample: RoutingSample | None = None


class Chosen(NamedTuple):
    micro_batch: MicroBatch
    task: Task


class Executor:
    """Runs batches, several at a time. failure: what made its plane unusable, if anything."""

    def __init__(
        self,
        parts: ExecutorParts,
        *,
        chunk_cost: Callable[[int, int], float],
        policy: TaskPolicy = by_plan,
        choice: Preemption[Task] | None = None,
        last_rows_only: bool = False,
    ) -> None:
        """`chunk_cost(start, stop)`: relative attention cost of new tokens [start, stop).
        policy: the choice among ready tasks; choice: if there is one, it makes it instead, at every
        yield. wanted_rows_only: the last layer is computed for rows whose logits are wanted."""
        self._half = parts.half
        self._kv = parts.kv
        self._backend = parts.backend
        self._sample = parts.sample
        self._sink = parts.sink
        self._timeline = parts.timeline
        self._clock = parts.clock
        self._name = parts.name
        self._chunk_cost = chunk_cost
        self._policy = policy
        self._choice = choice if parts.backend.interleaves else None
        self._wanted_rows_only = last_rows_only
        self._runs: dict[int, BatchRun] = {}
        self._spans = TaskSpans(parts.name, parts.timeline, parts.clock)
        self._times = PassTimes(parts.half.spec.num_layers)
        self._parked: Chosen | None = None  # what ran last, where it stands at a yield
        self.layers = parts.half.spec.num_layers
        self.failure: ChannelError | None = None

    @property
    def is_engaged(self) -> bool:
        """Whether no batch may begin now, because the plane computes for others."""
        return self._backend.is_engaged

    @property
    def in_flight(self) -> int:
        return len(self._runs)

    @property
    def live(self) -> list[LiveBatch]:
        """The batches in flight."""
        return [
            LiveBatch(
                run.scheduled.priority,
                run.scheduled.tokens,
                max(self.layers - m.layer for m in run.micro_batches if m.layer >= 0),
                run.scheduled.number,
                run.scheduled.phase,
                run.ran_s,
                self._clock() - run.started_s,
                self._times.left_s(run),
            )
            for run in self._runs.values()
        ]

    def wake(self) -> None:
        """Ends a `step` that waits. Called from any thread."""
        self._backend.wake()

    def submit(self, scheduled: ScheduledBatch, plan: Plan) -> None:
        """Cuts the batch into micro-batches as `plan` says; they are ready at once."""
        run = BatchRun(scheduled, plan, self._clock())
        costs = [self._chunk_cost(chunk.start, chunk.stop) for chunk in scheduled.chunks]
        for index, part in enumerate(cut_batch(scheduled, plan, costs)):
            micro_batch = MicroBatch(run, index, part.chunks)
            micro_batch.after = [run.micro_batches[other] for other in sorted(part.after)]
            if part.previous is not None:
                micro_batch.previous = run.micro_batches[part.previous]
            run.micro_batches.append(micro_batch)
        run.remaining = len(run.micro_batches)
        self._runs[scheduled.number] = run

    def step(self, timeout_s: float) -> list[ScheduledBatch]:
        """Takes what has arrived, runs one ready task if there is one, else waits for something.

        Returns the batches that this step completed. Raises ChannelError for what ends the batches
        in flight, but not the plane.
        """
        ready = self._ready()
        try:
            if self._backend.poll(0.0 if ready else timeout_s, idle=not self._runs):
                ready = self._ready()
            if not ready or self.failure is not None:
                return []
            chosen = self._pick(ready)
            if chosen is None:
                self._hold()
                return []
            self._run(chosen)
        except self._backend.fatal as error:
            self.failure = self.failure or error
            return []
        run = chosen.micro_batch.batch
        if run.remaining:
            return []
        del self._runs[run.scheduled.number]
        return [run.scheduled]

    def drop(self, number: int) -> ScheduledBatch | None:
        """Forgets a batch wherever it stands; answers to what it has sent are released when they
        come. None: there is no such batch."""
        run = self._runs.pop(number, None)
        if run is None:
            return None
        self._spans.close()
        self._parked = None
        if self._choice is not None:
            self._choice.forget()
        for micro_batch in run.micro_batches:
            if micro_batch.steps is not None:
                micro_batch.steps.close()
            if micro_batch.pending is not None:
                self._backend.drop(micro_batch.pending)
        return run.scheduled

    def fail_all(self) -> list[ScheduledBatch]:
        """Drops everything in flight; returns what was dropped."""
        dropped = [self.drop(number) for number in list(self._runs)]
        return [scheduled for scheduled in dropped if scheduled is not None]

    def _ready(self) -> list[MicroBatch]:
        return [
            micro_batch
            for run in self._runs.values()
            for micro_batch in run.micro_batches
            if micro_batch.layer >= 0 and micro_batch.is_ready
        ]

    def _pick(self, ready: list[MicroBatch]) -> Chosen | None:
        """What runs next; None: nothing, for now."""
        if self._parked is not None and len(self._runs) == 1:
            return self._parked
        if self._choice is None:
            tasks = [micro_batch.task() for micro_batch in ready]
            task = tasks[0] if len(tasks) == 1 else self._policy(tasks)
            return Chosen(ready[tasks.index(task)], task)
        tasks = [micro_batch.task(self._times.slice_s(micro_batch)) for micro_batch in ready]
        passes = self._times.passes(self._runs.values())
        chosen = self._choice.pick(tasks, passes, self._clock())
        return None if chosen is None else Chosen(ready[tasks.index(chosen)], chosen)

    def _hold(self) -> None:
        """Waits for the LS work that BE work would make late."""
        self._spans.close()
        start_s = self._clock()
        self._backend.poll(HOLD_S, idle=True)
        self._timeline.add(TaskSpan(self._name, Stage.HELD, start_s, self._clock()))

    def _run(self, chosen: Chosen) -> None:
        """A slice of a task: to its end, or to the first yield after LOOK_S."""
        micro_batch, task = chosen
        start_s = self._clock()
        self._spans.runs(micro_batch, start_s)
        self._parked = None
        if micro_batch.steps is None:
            micro_batch.steps, micro_batch.ran_s = self._task(micro_batch), 0.0
        is_whole = self._choice is None or not (self._backend.yields or micro_batch.pending is None)
        until_s = math.inf if is_whole else start_s + POLL_INTERVAL_S
        for _ in micro_batch.steps:
            if not micro_batch.is_ready:  # the rest of its experts has not come
                break
            if self._clock() >= until_s:
                self._parked = chosen
                break
        else:
            micro_batch.steps = None
        end_s = self._clock()
        if micro_batch.steps is not None:
            self._spans.yields(micro_batch, end_s)
            if self._parked is None:  # it waits
                self._spans.close()
        if self._choice is None:
            return
        ended = None if micro_batch.steps is not None else task.stage
        self._times.ran(micro_batch, end_s - start_s, ended)
        self._choice.ran(task, start_s, end_s)

    def _task(self, micro_batch: MicroBatch) -> Steps[None]:
        if micro_batch.inputs is None:
            yield from self._prepare(micro_batch)
        if micro_batch.stage is TaskStage.SHARED:
            micro_batch.doing = Stage.SHARED, micro_batch.layer
            yield from self._shared(micro_batch)
            self._spans.note(micro_batch)
            return
        if micro_batch.pending is not None:
            yield from self._add_experts(micro_batch)
        if micro_batch.stage is TaskStage.FINISH:
            yield from self._finish(micro_batch)
        else:
            yield from self._attend(micro_batch)

    def _prepare(self, micro_batch: MicroBatch) -> Steps[None]:
        """What is made once and used at every layer."""
        micro_batch.doing = Stage.ATTENTION, 0
        inputs = micro_batch.inputs = AttentionBatch.build(
            list(map(slice_of, micro_batch.chunks)),
            block_tokens=self._kv.block_tokens,
            device=self._kv.device,
        )
        self._backend.prepare(self._key(micro_batch, 0), inputs.token_ids_T)
        if self._sample is not None:
            self._sample.prepare(self._key(micro_batch, 0).owner, micro_batch.chunks)
        yield
        self._half.prepare(inputs)
        if not self._wanted_rows_only:
            return
        counts = [
            len(chunk.sequence.output_positions(chunk.start, chunk.stop))
            for chunk in micro_batch.chunks
        ]
        if sum(counts) < inputs.num_tokens:
            counts[-1] = max(1, counts[-1])
            last = micro_batch.last = inputs.last(counts)
            self._half.prepare(last.batch)  # now: it would hold a GPU up between layers
        yield

    def _add_experts(self, micro_batch: MicroBatch) -> Steps[None]:
        """Adds what the experts of the layer before gave."""
        stage = self._backend.stage
        if stage is not None:
            micro_batch.doing = stage, micro_batch.attended
        elif self._choice is not None:
            self._times.returned(micro_batch, self._clock())
        assert micro_batch.hidden_TD is not None
        pending, shared_TD = micro_batch.pending, micro_batch.shared_TD
        yield from self._backend.combine(micro_batch.hidden_TD, pending, shared_TD)
        micro_batch.pending = micro_batch.shared_TD = None
        if stage is not None:
            self._spans.note(micro_batch)
        yield

    def _attend(self, micro_batch: MicroBatch) -> Steps[None]:
        """Runs attention of one layer, and the dense feed-forward of a layer without experts."""
        layer, half, inputs = micro_batch.layer, self._half, micro_batch.inputs
        assert inputs is not None
        micro_batch.doing = Stage.ATTENTION, layer
        hidden_TD = micro_batch.hidden_TD
        if hidden_TD is None:
            hidden_TD = half.embed(inputs)
        last = micro_batch.last if layer == self.layers - 1 else None
        attended = yield from half.steps(layer, hidden_TD, inputs, self._kv, last)
        micro_batch.hidden_TD = attended.hidden_TD
        micro_batch.attended = layer
        routed = attended.routed
        if routed is not None and half.has_shared(layer):
            micro_batch.x_TD = routed.x_TD
            micro_batch.stage = TaskStage.SHARED
            if micro_batch.batch.plan.order.shared_before_dispatch:
                yield from self._shared(micro_batch)
        else:
            self._advance(micro_batch)
        self._spans.note(micro_batch)
        if routed is not None:
            yield  # before the experts have to do with it
            self._begin_experts(micro_batch, layer, routed)

    def _begin_experts(self, micro_batch: MicroBatch, layer: int, routed: RoutedTokens) -> None:
        micro_batch.doing = Stage.SEND, layer
        hidden_TD, plan = micro_batch.hidden_TD, micro_batch.batch.plan
        assert hidden_TD is not None
        key = self._key(micro_batch, layer)
        micro_batch.pending = self._backend.dispatch(key, hidden_TD, routed, plan)
        if self._backend.stage is None:
            self._spans.note(micro_batch)
        micro_batch.sent_s = self._clock()

    def _key(self, micro_batch: MicroBatch, layer: int) -> TaskKey:
        scheduled = micro_batch.batch.scheduled
        decodes = micro_batch.tokens == len(micro_batch.chunks)
        return TaskKey(scheduled.number, layer, micro_batch.index, scheduled.priority, decodes)

    def _shared(self, micro_batch: MicroBatch) -> Steps[None]:
        assert micro_batch.x_TD is not None
        steps = self._half.shared_steps(micro_batch.layer, micro_batch.x_TD)
        micro_batch.shared_TD = yield from steps
        micro_batch.x_TD = None
        self._advance(micro_batch)

    def _advance(self, micro_batch: MicroBatch) -> None:
        """On to the next layer, which runs once the experts of this one have."""
        micro_batch.layer += 1
        is_last = micro_batch.layer == self.layers
        micro_batch.stage = TaskStage.FINISH if is_last else TaskStage.ATTENTION

    def _finish(self, micro_batch: MicroBatch) -> Steps[None]:
        micro_batch.doing = Stage.FINISH, micro_batch.layer
        last = micro_batch.last
        inputs = micro_batch.inputs if last is None else last.batch
        assert inputs is not None
        assert micro_batch.hidden_TD is not None
        yield from self._sink(micro_batch.chunks, inputs, micro_batch.hidden_TD)
        micro_batch.layer = -1
        micro_batch.hidden_TD = None
        micro_batch.batch.remaining -= 1
        self._spans.note(micro_batch)
