"""The event loop of a worker: micro-batches as state machines over a ready set.

    ATTENTION(t) ──> experts(t), on their plane ──> ATTENTION(t+1) ... ──> FINISH
         └────> SHARED(t) ──────────────────────────┘

What can run now is the *ready set*; a policy (planner/findep/orders.py) picks from it after every
task. To "preempt" a micro-batch is not to pick it: everything it needs stays where it is. Tasks
never wait: only the loop does, and only when nothing is ready.

Owned by one thread. Where experts are computed is the plane's business (actors/experts/plane.py):
FinDEP's A2E and E2A tasks, copies of weights, or a step of all workers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from actors.batching.scheduled_batch import Chunk, ScheduledBatch, slice_of
from actors.engine.micro_batch import BatchRun, MicroBatch, cut_batch
from actors.experts.plane import ExpertPlane, TaskKey
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError
from contracts.events import Stage, TaskSpan
from contracts.plan import Plan
from models.decoder.batch import AttentionBatch, LastRows
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from planner.findep.orders import Policy, TaskStage, by_plan
from planner.policies.batching import LiveBatch


class Sink(Protocol):
    """Where finished hidden states go (logits, sampling, answers)."""

    def __call__(self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: Tensor) -> None:
        """`hidden_TD`: residual after the last layer, rows as in `batch`, whose sequences are those
        of the chunks, in their order; of each at least the rows whose logits are wanted."""


class ExecutorParts(NamedTuple):
    """What an executor works with. name: of the rank, for its spans."""

    name: str
    half: AttentionHalf
    kv: KvPool
    plane: ExpertPlane[Any]
    sink: Sink
    timeline: Timeline
    clock: Clock


class Executor:
    """Runs batches, several at a time. failure: what made its plane unusable, if anything."""

    def __init__(
        self,
        parts: ExecutorParts,
        *,
        chunk_cost: Callable[[int, int], float],
        policy: Policy = by_plan,
        wanted_rows_only: bool = False,
    ) -> None:
        """`chunk_cost(start, stop)`: relative attention cost of new tokens [start, stop).
        wanted_rows_only: the last layer is computed for rows whose logits are wanted."""
        self._half = parts.half
        self._kv = parts.kv
        self._plane = parts.plane
        self._sink = parts.sink
        self._timeline = parts.timeline
        self._clock = parts.clock
        self._name = parts.name
        self._chunk_cost = chunk_cost
        self._policy = policy
        self._wanted_rows_only = wanted_rows_only
        self._runs: dict[int, BatchRun] = {}
        self.layers = parts.half.spec.num_layers
        self.failure: ChannelError | None = None

    @property
    def is_engaged(self) -> bool:
        """Whether no batch may begin now, because the plane computes for others."""
        return self._plane.is_engaged

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
            )
            for run in self._runs.values()
        ]

    def wake(self) -> None:
        """Ends a `step` that waits. Called from any thread."""
        self._plane.wake()

    def submit(self, scheduled: ScheduledBatch, plan: Plan) -> None:
        """Cuts the batch into micro-batches as `plan` says; they are ready at once."""
        run = BatchRun(scheduled, plan)
        costs = [self._chunk_cost(chunk.start, chunk.stop) for chunk in scheduled.chunks]
        for index, part in enumerate(cut_batch(scheduled, plan, costs)):
            micro_batch = MicroBatch(run, index, part.chunks, self._inputs(part.chunks))
            micro_batch.after = [run.micro_batches[other] for other in sorted(part.after)]
            if part.previous is not None:
                micro_batch.previous = run.micro_batches[part.previous]
            if self._wanted_rows_only:
                micro_batch.last = self._wanted_rows(micro_batch)
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
            if self._plane.poll(0.0 if ready else timeout_s, idle=not self._runs):
                ready = self._ready()
            if not ready or self.failure is not None:
                return []
            micro_batch = self._pick(ready)
            self._run_task(micro_batch)
        except self._plane.fatal as error:
            self.failure = self.failure or error
            return []
        run = micro_batch.batch
        if run.remaining:
            return []
        del self._runs[run.scheduled.number]
        return [run.scheduled]

    def fail_all(self) -> list[ScheduledBatch]:
        """Drops everything in flight; returns what was dropped."""
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            for micro_batch in run.micro_batches:
                if micro_batch.pending is not None:
                    self._plane.drop(micro_batch.pending)
        return [run.scheduled for run in runs]

    def _inputs(self, chunks: Sequence[Chunk]) -> AttentionBatch:
        return AttentionBatch.build(
            list(map(slice_of, chunks)),
            block_tokens=self._kv.block_tokens,
            device=self._kv.device,
        )

    def _wanted_rows(self, micro_batch: MicroBatch) -> LastRows | None:
        """Those whose logits are wanted, one at least; None: all rows are."""
        inputs = micro_batch.inputs
        counts = [
            len(chunk.sequence.wanted_positions(chunk.start, chunk.stop))
            for chunk in micro_batch.chunks
        ]
        if sum(counts) == inputs.num_tokens:
            return None
        counts[-1] = max(1, counts[-1])
        last = inputs.last(counts)
        self._half.prepare(last.batch)  # now: it would hold a GPU up between layers
        return last

    def _ready(self) -> list[MicroBatch]:
        return [
            micro_batch
            for run in self._runs.values()
            for micro_batch in run.micro_batches
            if micro_batch.layer >= 0 and micro_batch.is_ready
        ]

    def _pick(self, ready: list[MicroBatch]) -> MicroBatch:
        if len(ready) == 1:
            return ready[0]
        tasks = [micro_batch.task() for micro_batch in ready]
        return ready[tasks.index(self._policy(tasks))]

    def _run_task(self, micro_batch: MicroBatch) -> None:
        start_s = self._clock()
        layer = micro_batch.layer
        if micro_batch.stage is TaskStage.SHARED:
            self._shared(micro_batch)
            self._span(Stage.SHARED, start_s, micro_batch, layer)
            return
        if micro_batch.pending is not None:
            start_s = self._add_experts(micro_batch, start_s)
        if micro_batch.stage is TaskStage.FINISH:
            self._finish(micro_batch)
            self._span(Stage.FINISH, start_s, micro_batch, layer)
        else:
            self._attend(micro_batch, start_s)

    def _add_experts(self, micro_batch: MicroBatch, start_s: float) -> float:
        """Adds what the experts of the layer before gave. Returns when what follows begins."""
        pending, micro_batch.pending = micro_batch.pending, None
        shared_TD, micro_batch.shared_TD = micro_batch.shared_TD, None
        assert micro_batch.hidden_TD is not None
        self._plane.add_to(micro_batch.hidden_TD, pending, shared_TD)
        if self._plane.stage is None:
            return start_s
        self._span(self._plane.stage, start_s, micro_batch, micro_batch.attended)
        return self._clock()

    def _attend(self, micro_batch: MicroBatch, start_s: float) -> None:
        """Runs attention of one layer, and the dense feed-forward of a layer without experts."""
        layer, half, inputs = micro_batch.layer, self._half, micro_batch.inputs
        hidden_TD = micro_batch.hidden_TD
        if hidden_TD is None:
            hidden_TD = half.embed(inputs)
        last = micro_batch.last if layer == self.layers - 1 else None
        attended = half.attend(layer, hidden_TD, inputs, self._kv, last)
        micro_batch.hidden_TD = attended.hidden_TD
        micro_batch.attended = layer
        routed = attended.routed
        if routed is not None and half.has_shared(layer):
            micro_batch.x_TD = routed.x_TD
            micro_batch.stage = TaskStage.SHARED
            if micro_batch.batch.plan.order.shared_before_dispatch:
                self._shared(micro_batch)
        else:
            self._advance(micro_batch)
        self._span(Stage.ATTENTION, start_s, micro_batch, layer)
        if routed is not None:
            sent_s = self._clock()
            scheduled, plan = micro_batch.batch.scheduled, micro_batch.batch.plan
            key = TaskKey(scheduled.number, layer, micro_batch.index, scheduled.priority)
            micro_batch.pending = self._plane.begin(key, routed, plan)
            if self._plane.stage is None:
                self._span(Stage.SEND, sent_s, micro_batch, layer)

    def _shared(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.x_TD is not None
        micro_batch.shared_TD = self._half.shared(micro_batch.layer, micro_batch.x_TD)
        micro_batch.x_TD = None
        self._advance(micro_batch)

    def _advance(self, micro_batch: MicroBatch) -> None:
        """On to the next layer, which runs once the experts of this one have."""
        micro_batch.layer += 1
        is_last = micro_batch.layer == self.layers
        micro_batch.stage = TaskStage.FINISH if is_last else TaskStage.ATTENTION

    def _finish(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.hidden_TD is not None
        last = micro_batch.last
        inputs = micro_batch.inputs if last is None else last.batch
        self._sink(micro_batch.chunks, inputs, micro_batch.hidden_TD)
        micro_batch.layer = -1
        micro_batch.hidden_TD = None
        micro_batch.batch.remaining -= 1

    def _span(self, stage: Stage, start_s: float, micro_batch: MicroBatch, layer: int) -> None:
        number, tokens = micro_batch.batch.scheduled.number, micro_batch.inputs.num_tokens
        end_s = self._clock()
        self._timeline.add(
            TaskSpan(self._name, stage, start_s, end_s, number, layer, micro_batch.index, 0, tokens)
        )
