"""The event loop of a rank: micro-batches as state machines over a ready set.

    ATTENTION(t) ──> experts(t), in their backend ──> ATTENTION(t+1) ... ──> FINISH
         └────> SHARED(t) ──────────────────────────┘

A task is a generator that yields where another task may run first (kernels/steps.py); the next task
is then selected again (planner/scheduling/task_order.py). A preempted task is simply not resumed:
its state stays in its frame. Tasks never wait. Only the loop waits: when nothing is ready, or when
ready work would make other work late.

Owned by one thread. The expert backend (actors/moe/backend.py) decides how experts are computed:
FinDEP's A2E and E2A tasks, copies of weights, or one step of all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from actors.batching.batch_builder import Chunk, ScheduledBatch, slice_of
from actors.engine.micro_batch import BatchRun, MicroBatch, PassTimes, TaskSpans, cut_batch
from actors.moe.backend import ExpertBackend, SharedLayers, TaskKey, WholeBatch
from actors.moe.routing_sample import RoutingSample
from actors.telemetry.telemetry import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.device import work_times
from kernels.steps import Steps
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch
from models.decoder.decode_graphs import DecodeGraphs
from models.decoder.decoder import AttentionHalf
from models.decoder.layer_decoder import CallOwner
from models.experts.expert_half import RoutedTokens
from planner.scheduling.batching import LiveBatch
from planner.scheduling.task_order import (
    POLL_INTERVAL_S,
    Preemption,
    Task,
    TaskPolicy,
    TaskStage,
    by_plan,
)

HOLD_S = 0.001  # while best-effort work is held
_INTERVALS_ALONE = 20  # of layers in one call, which `wake` interrupts


HiddenStateSink = Callable[[list[Chunk], AttentionBatch, Tensor], Iterable[None]]
"""Processes a finished micro-batch: logits, sampling, answers; done when it is exhausted.

The tensor: residual after the last layer, rows as in the batch, whose sequences are those of the
chunks in order; at least the rows whose logits are needed.
"""


class ExecutorParts(NamedTuple):
    """Parts of an executor. name: of the rank, for spans. sample: is informed of micro-batches.

    graphs: for batches in decode.
    """

    name: str
    half: AttentionHalf
    kv: KvPool
    backend: ExpertBackend[Any]
    sink: HiddenStateSink
    timeline: Timeline
    clock: Clock
    sample: RoutingSample | None = None
    graphs: DecodeGraphs | None = None


class Chosen(NamedTuple):
    micro_batch: MicroBatch
    task: Task


class Executor:
    """Runs batches, several at a time. failure: why the backend is unusable."""

    def __init__(
        self,
        parts: ExecutorParts,
        *,
        chunk_cost: Callable[[int, int], float],
        policy: TaskPolicy = by_plan,
        choice: Preemption[Task] | None = None,
        last_rows_only: bool = False,
    ) -> None:
        """Set up an executor over a backend.

        chunk_cost(start, stop): relative attention cost of new tokens. policy: selects among ready
        tasks. choice: replaces it, and selects again at every yield. last_rows_only: the last layer
        is computed only for rows whose logits are needed.
        """
        self._half = parts.half
        self._kv = parts.kv
        self.backend = parts.backend
        self._layer_decoder = parts.backend.layer_decoder(parts.kv)
        self._sample = parts.sample
        self._graphs = parts.graphs
        self._sink = parts.sink
        self._timeline = parts.timeline
        self._clock = parts.clock
        self._name = parts.name
        self._chunk_cost = chunk_cost
        self._policy = policy
        self._choice = choice if parts.backend.interleaves else None
        self._wanted_rows_only = last_rows_only
        self._runs: dict[int, BatchRun] = {}
        self._work = work_times(parts.kv.device)
        self._spans = TaskSpans(parts.name, parts.timeline, parts.clock, self._work)
        self._times = PassTimes(parts.half.spec.num_layers)
        self._parked: Chosen | None = None  # the last task, if suspended
        self.layers = parts.half.spec.num_layers
        self.failure: ChannelError | None = None

    @property
    def in_flight(self) -> int:
        return len(self._runs)

    @property
    def live(self) -> list[LiveBatch]:
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
        """End a waiting `step`, and one of several layers after a layer. Thread-safe."""
        if self._layer_decoder is not None:
            self._layer_decoder.interrupt()
        self.backend.wake()

    def submit(self, scheduled: ScheduledBatch, plan: Plan) -> None:
        """Cut a batch into micro-batches by `plan`; they are ready at once."""
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
        """Receive results and run one ready task, or wait; return the batches completed.

        Raises ChannelError for errors that end the batches in flight but not the backend.
        """
        self._work.settle()
        ready = self._ready()
        try:
            if self.backend.poll(0.0 if ready else timeout_s, idle=not self._runs):
                ready = self._ready()
            if not ready or self.failure is not None:
                return []
            chosen = self._pick(ready)
            if chosen is None:
                self._hold()
                return []
            self._run(chosen)
        except self.backend.fatal as error:
            self.failure = self.failure or error
            return []
        run = chosen.micro_batch.batch
        if run.remaining:
            return []
        del self._runs[run.scheduled.number]
        return [run.scheduled]

    def drop(self, number: int) -> ScheduledBatch | None:
        """Discard a batch in any state, or return None if there is none with that number."""
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
                self.backend.drop(micro_batch.pending)
            if micro_batch.shared_layers is not None:
                micro_batch.shared_layers.close()
        return run.scheduled

    def fail_all(self) -> list[ScheduledBatch]:
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
        """Return the task to run, or None to hold."""
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
        """Wait for latency-sensitive work that best-effort work would delay."""
        self._spans.close()
        start_s = self._clock()
        self.backend.poll(HOLD_S, idle=True)
        self._timeline.add(TaskSpan(self._name, Stage.HELD, start_s, self._clock()))

    def _run(self, chosen: Chosen) -> None:
        """Run a task to its end or to the first yield after POLL_INTERVAL_S."""
        micro_batch, task = chosen
        start_s = self._work.mark(self._clock())
        self._spans.resume(micro_batch, start_s)
        self._parked = None
        is_first = micro_batch.steps is None
        if micro_batch.steps is None:
            micro_batch.steps = self._task(micro_batch)
        is_whole = self._choice is None or not (self.backend.yields or micro_batch.pending is None)
        until_s = math.inf if is_whole else start_s + POLL_INTERVAL_S
        for _ in micro_batch.steps:
            if not micro_batch.is_ready:  # it waits for more experts
                break
            if self._clock() >= until_s:
                self._parked = chosen
                break
        else:
            micro_batch.steps = None
        end_s = self._work.mark(self._clock())
        if micro_batch.steps is not None:
            self._spans.pause(micro_batch, end_s)
            if self._parked is None:  # it waits for experts
                self._spans.close()
        if self._choice is None:
            return
        is_ended = micro_batch.steps is None and 0 <= micro_batch.layer <= task.layer + 1
        ended = task.stage if is_ended else None
        self._choice.ran(task, start_s, end_s)
        charge = partial(self._choice.charge, task)

        def measured(begin_s: float, finish_s: float) -> None:
            self._times.ran(micro_batch, finish_s - begin_s, ended, is_first=is_first)
            charge(finish_s - begin_s - (end_s - start_s))

        self._work.measure(start_s, end_s, measured)

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
        elif (shared := self._shared_layers(micro_batch)) is not None:
            yield from self._share(micro_batch, shared)
        elif self._decodes_at_once(micro_batch):
            yield from self._decode(micro_batch)
            if micro_batch.layer == self.layers and micro_batch.pending is None:
                yield from self._finish(micro_batch)
        else:
            yield from self._attend(micro_batch)

    def _decodes_at_once(self, micro_batch: MicroBatch) -> bool:
        inputs, decoder = micro_batch.inputs, self._layer_decoder
        if decoder is None or inputs is None or inputs.num_tokens > len(micro_batch.chunks):
            return False
        if micro_batch.after or micro_batch.previous is not None:
            return False
        if decoder.uses_loop and (len(self._runs) > 1 or len(micro_batch.batch.micro_batches) > 1):
            return False
        return decoder.accepts(inputs)

    def _decode(self, micro_batch: MicroBatch) -> Steps[None]:
        """Run the remaining layers, with a yield about every POLL_INTERVAL_S beside other batches.

        Returns early where the decoder accepts the batch no more, or a layer's experts have to be
        dispatched.
        """
        inputs, decoder, tokens = micro_batch.inputs, self._layer_decoder, micro_batch.tokens
        assert inputs is not None
        assert decoder is not None
        micro_batch.last = None  # the call computes all rows
        if micro_batch.hidden_TD is None:
            micro_batch.hidden_TD = self._half.embed(inputs)
        micro_batch.hidden_TD = yield from self._half.residual(micro_batch.hidden_TD, inputs)
        scheduled = micro_batch.batch.scheduled
        owner = CallOwner(scheduled.number, micro_batch.index, scheduled.priority)
        try:
            while micro_batch.layer < self.layers:
                first, layer_s = micro_batch.layer, self._times.layer_s(tokens)
                is_alone = len(self._runs) == 1
                call_s = POLL_INTERVAL_S * (_INTERVALS_ALONE if is_alone else 1)
                last = min(self.layers, first + max(1, int(call_s / layer_s) if layer_s else 1))
                start_s = self._clock()
                done = decoder.run(
                    (first, last), micro_batch.hidden_TD, inputs, owner, is_alone=is_alone
                )
                if done.ends:
                    self._times.ran_layers(len(done.ends), tokens, self._clock() - start_s)
                    self._spans.end_layers(micro_batch, first, done.ends)
                micro_batch.layer += len(done.ends)
                micro_batch.attended = micro_batch.layer - 1
                if done.routed is not None:
                    hidden_TD, layer = micro_batch.hidden_TD, micro_batch.layer
                    micro_batch.hidden_TD = self._half.begin_sum(layer, hidden_TD, inputs)
                    micro_batch.doing = Stage.ATTENTION, micro_batch.layer
                    yield from self._route(micro_batch, done.routed)
                    return
                yield
                is_done = micro_batch.layer == self.layers
                if not is_done and not decoder.waits and not self._decodes_at_once(micro_batch):
                    return
            micro_batch.stage = TaskStage.FINISH
        finally:
            if decoder.waits:
                decoder.end()

    def _prepare(self, micro_batch: MicroBatch) -> Steps[None]:
        """Build the inputs that all layers share."""
        micro_batch.doing = Stage.ATTENTION, 0
        slices = list(map(slice_of, micro_batch.chunks))
        inputs = micro_batch.inputs = AttentionBatch.build(
            slices, block_tokens=self._kv.block_tokens, device=self._kv.device
        )
        self.backend.prepare(self._key(micro_batch, 0), inputs.token_ids_T)
        if self._sample is not None:
            self._sample.prepare(self._key(micro_batch, 0).owner, micro_batch.chunks)
        yield
        self._half.prepare(inputs)
        counts = self._last_counts(micro_batch, inputs)
        if counts is not None:
            last = micro_batch.last = inputs.last(counts)
            self._half.prepare(last.batch)  # now: between layers it would stall a GPU
        if len(micro_batch.batch.micro_batches) == 1:
            micro_batch.whole = WholeBatch(slices, counts, inputs, self._kv)
        yield

    def _last_counts(self, micro_batch: MicroBatch, inputs: AttentionBatch) -> list[int] | None:
        """Return the rows of each sequence that the last layer needs; None: all."""
        if not self._wanted_rows_only:
            return None
        counts = [
            len(chunk.sequence.output_positions(chunk.start, chunk.stop))
            for chunk in micro_batch.chunks
        ]
        if sum(counts) == inputs.num_tokens:
            return None
        counts[-1] = max(1, counts[-1])
        return counts

    def _shared_layers(self, micro_batch: MicroBatch) -> SharedLayers | None:
        """Return the rest of a batch if other workers compute it too; ask them before each layer.

        None: they do not.
        """
        if micro_batch.shared_layers is None and micro_batch.whole is not None:
            micro_batch.shared_layers = self.backend.share(micro_batch.whole, micro_batch.layer)
        return micro_batch.shared_layers

    def _share(self, micro_batch: MicroBatch, shared: SharedLayers) -> Steps[None]:
        """Run a layer with other workers; if one is lost, without them."""
        inputs = micro_batch.inputs
        assert inputs is not None
        micro_batch.doing = Stage.ATTENTION, micro_batch.layer
        if micro_batch.hidden_TD is not None:
            micro_batch.hidden_TD = yield from self._half.residual(micro_batch.hidden_TD, inputs)
        try:
            micro_batch.hidden_TD = yield from shared.steps(
                micro_batch.layer, micro_batch.hidden_TD
            )
        except PeerError:
            micro_batch.shared_layers = None
            return
        micro_batch.attended = micro_batch.layer
        self._advance(micro_batch)
        self._spans.note(micro_batch)

    def _add_experts(self, micro_batch: MicroBatch) -> Steps[None]:
        """Add the experts' output of the previous layer."""
        stage = self.backend.stage
        if stage is not None:
            micro_batch.doing = stage, micro_batch.attended
        elif self._choice is not None:
            self._times.returned(micro_batch, self._clock())
        assert micro_batch.hidden_TD is not None
        pending, shared_TD = micro_batch.pending, micro_batch.shared_TD
        yield from self.backend.combine(micro_batch.hidden_TD, pending, shared_TD)
        micro_batch.pending = micro_batch.shared_TD = None
        if stage is not None:
            self._spans.note(micro_batch)
        yield

    def _attend(self, micro_batch: MicroBatch) -> Steps[None]:
        """Run attention of one layer, and the dense feed-forward of a layer without experts."""
        layer, half, inputs = micro_batch.layer, self._half, micro_batch.inputs
        assert inputs is not None
        micro_batch.doing = Stage.ATTENTION, layer
        hidden_TD = micro_batch.hidden_TD
        if hidden_TD is None:
            hidden_TD = half.embed(inputs)
        last = micro_batch.last if layer == self.layers - 1 else None
        graphs = self._graphs
        if graphs is not None and last is None and graphs.accepts(inputs):
            attended = graphs.attend(layer, hidden_TD, inputs)
        else:
            attended = yield from half.steps(layer, hidden_TD, inputs, self._kv, last)
        micro_batch.hidden_TD = attended.hidden_TD
        yield from self._route(micro_batch, attended.routed)

    def _route(self, micro_batch: MicroBatch, routed: RoutedTokens | None) -> Steps[None]:
        """Begin what follows the attention of a layer."""
        layer = micro_batch.attended = micro_batch.layer
        if routed is not None and self._half.has_shared(layer):
            micro_batch.x_TD = routed.router_input
            micro_batch.stage = TaskStage.SHARED
            if micro_batch.batch.plan.order.shared_before_dispatch:
                yield from self._shared(micro_batch)
        else:
            self._advance(micro_batch)
        self._spans.note(micro_batch)
        if routed is not None:
            yield  # before the experts start
            self._begin_experts(micro_batch, layer, routed)

    def _begin_experts(self, micro_batch: MicroBatch, layer: int, routed: RoutedTokens) -> None:
        micro_batch.doing = Stage.SEND, layer
        hidden_TD, plan = micro_batch.hidden_TD, micro_batch.batch.plan
        assert hidden_TD is not None
        key = self._key(micro_batch, layer)
        micro_batch.pending = self.backend.dispatch(key, hidden_TD, routed, plan)
        if self.backend.stage is None:
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
        """Go to the next layer, which runs once this layer's experts are complete."""
        micro_batch.layer += 1
        is_last = micro_batch.layer == self.layers
        micro_batch.stage = TaskStage.FINISH if is_last else TaskStage.ATTENTION

    def _finish(self, micro_batch: MicroBatch) -> Steps[None]:
        micro_batch.doing = Stage.FINISH, micro_batch.layer
        last = micro_batch.last
        inputs = micro_batch.inputs if last is None else last.batch
        assert inputs is not None
        assert micro_batch.hidden_TD is not None
        hidden_TD = yield from self._half.residual(micro_batch.hidden_TD, inputs)
        yield from self._sink(micro_batch.chunks, inputs, hidden_TD)
        micro_batch.layer = -1
        micro_batch.hidden_TD = None
        micro_batch.batch.remaining -= 1
        self._spans.note(micro_batch)
