"""Runs whole batches on one worker, experts included: a layer a step.

    attend ──> fetch(layer) ──> experts ──> (shared) ──> … ──> finish
                 └ waits where the store's copy is slower than the compute

Between layers the worker's loop takes messages. Owned by that loop's thread. On a GPU a layer is
only queued: the host is some layers ahead, and spans are the host's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from actors.batching.scheduled_batch import Chunk, ScheduledBatch, slice_of
from actors.engine.executor import Sink
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError, NotFiniteError
from contracts.events import Stage, TaskSpan
from kernels.device import Pace, finish
from kernels.routing import local_index
from models.decoder.batch import AttentionBatch, LastRows, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from models.experts.expert_store import ExpertStore
from models.experts.moe import expert_sums
from models.experts.router import Routed

_LAYERS_AHEAD = 3


class PrefillParts(NamedTuple):
    """What a prefill executor works with. name: of the worker, for its spans."""

    name: str
    half: AttentionHalf
    kv: KvPool
    store: ExpertStore
    sink: Sink
    timeline: Timeline
    clock: Clock


class PrefillRun:
    """A batch on its way through the layers. hidden_TD: the residual before `layer`. last: the rows
    that the last layer is computed for, None: all."""

    __slots__ = ("hidden_TD", "inputs", "last", "layer", "number")

    def __init__(self, number: int, inputs: AttentionBatch, hidden_TD: Tensor) -> None:
        self.number = number
        self.inputs = inputs
        self.hidden_TD = hidden_TD
        self.last: LastRows | None = None
        self.layer = 0


class PrefillExecutor:
    """One batch at a time."""

    def __init__(self, parts: PrefillParts) -> None:
        self._half = parts.half
        self._kv = parts.kv
        self._store = parts.store
        self._sink = parts.sink
        self._timeline = parts.timeline
        self._clock = parts.clock
        self._name = parts.name
        spec = parts.half.spec
        self._local_of_E = local_index(list(range(spec.num_experts)), spec.num_experts).to(
            parts.half.device
        )
        self._scheduled: ScheduledBatch | None = None
        self._run: PrefillRun | None = None
        self._waited_s = 0.0  # by the store's account, as far as it was noted
        self._pace = Pace(parts.half.device, _LAYERS_AHEAD)
        self._woken = threading.Event()
        self.failure: ChannelError | None = None

    @property
    def in_flight(self) -> int:
        return int(self._run is not None)

    def wake(self) -> None:
        """Ends a `step` that waits. Called from any thread."""
        self._woken.set()

    def submit(self, scheduled: ScheduledBatch) -> None:
        self._scheduled = scheduled
        self._run = self._begin(scheduled.number, map(slice_of, scheduled.chunks))
        self._run.last = _wanted_rows(scheduled.chunks, self._run.inputs)
        if self._run.last is not None:
            self._half.prepare(self._run.last.batch)  # now: it would hold a GPU up between layers

    def step(self, timeout_s: float) -> list[ScheduledBatch]:
        """Runs one layer, or after the last one the head; waits if there is no batch."""
        run, scheduled = self._run, self._scheduled
        if run is None or scheduled is None or self.failure is not None:
            self._woken.wait(timeout_s)
            self._woken.clear()
            return []
        try:
            if run.layer < self._half.spec.num_layers:
                self._layer(run)
                self._pace.step()
                return []
        except ChannelError as error:
            self.failure = error
            return []
        self._finish(run, scheduled.chunks)
        self._run = self._scheduled = None
        return [scheduled]

    def fail_all(self) -> list[ScheduledBatch]:
        """Drops the batch in flight; returns it."""
        dropped = [] if self._scheduled is None else [self._scheduled]
        self._run = self._scheduled = None
        return dropped

    def time_layers(self, slices: Sequence[SequenceSlice]) -> list[float]:
        """Runs a batch that nobody asked for, while no other runs; wall seconds of each layer that
        has experts. Raises ChannelError, and NotFiniteError for what comes out of it."""
        run = self._begin(-1, slices)
        finish(self._half.device)
        times_l = []
        while run.layer < self._half.spec.num_layers:
            start_s, layer = self._clock(), run.layer
            self._layer(run)
            finish(self._half.device)
            if self._half.spec.is_moe(layer):
                times_l.append(self._clock() - start_s)
        if not self._half.logits(run.hidden_TD[-1:]).max().isfinite():
            raise NotFiniteError("the logits of a pass that nobody asked for are not finite")
        return times_l

    def _begin(self, number: int, slices: Iterable[SequenceSlice]) -> PrefillRun:
        inputs = AttentionBatch.build(
            list(slices), block_tokens=self._kv.block_tokens, device=self._kv.device
        )
        self._half.prepare(inputs)
        return PrefillRun(number, inputs, self._half.embed(inputs))

    def _layer(self, run: PrefillRun) -> None:
        start_s = self._clock()
        last = run.last if run.layer == self._half.spec.num_layers - 1 else None
        attended = self._half.attend(run.layer, run.hidden_TD, run.inputs, self._kv, last)
        run.hidden_TD = attended.hidden_TD
        self._span(run, Stage.ATTENTION, start_s)
        if attended.routed is not None:
            self._add_experts(run, attended.routed)
        run.layer += 1

    def _add_experts(self, run: PrefillRun, routed: Routed) -> None:
        start_s = self._clock()
        held = self._store.fetch(run.layer)
        self._note_exposed(run, start_s)
        start_s = self._clock()
        run.hidden_TD.add_(expert_sums(routed, held, self._local_of_E))
        self._store.release()
        self._span(run, Stage.EXPERT, start_s)
        self._add_shared(run, routed)

    def _note_exposed(self, run: PrefillRun, start_s: float) -> None:
        """What has been waited for copies since the last time. A GPU tells some layers later."""
        waited_s = self._store.waited_s
        if waited_s > self._waited_s:
            self._timeline.exposed_s += waited_s - self._waited_s
            self._waited_s = waited_s
            self._span(run, Stage.WAIT, start_s)

    def _add_shared(self, run: PrefillRun, routed: Routed) -> None:
        start_s = self._clock()
        shared_TD = self._half.shared(run.layer, routed.x_TD)
        if shared_TD is not None:
            run.hidden_TD.add_(shared_TD)
            self._span(run, Stage.SHARED, start_s)

    def _finish(self, run: PrefillRun, chunks: list[Chunk]) -> None:
        start_s = self._clock()
        inputs = run.inputs if run.last is None else run.last.batch
        self._sink(chunks, inputs, run.hidden_TD)
        self._span(run, Stage.FINISH, start_s)

    def _span(self, run: PrefillRun, stage: Stage, start_s: float) -> None:
        self._timeline.add(
            TaskSpan(
                self._name,
                stage,
                start_s,
                self._clock(),
                run.number,
                run.layer,
                tokens=run.inputs.num_tokens,
            )
        )


def _wanted_rows(chunks: Sequence[Chunk], inputs: AttentionBatch) -> LastRows | None:
    """Those whose logits are wanted, one at least; None: all rows are."""
    counts = [len(chunk.sequence.wanted_positions(chunk.start, chunk.stop)) for chunk in chunks]
    if sum(counts) == inputs.num_tokens:
        return None
    counts[-1] = max(1, counts[-1])
    return inputs.last(counts)
