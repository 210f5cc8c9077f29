"""Prefill workers that compute a batch together when the others are idle, and gather experts else.

The worker that has the batch leads. It calls the others if it expects to gain time and none is
known to be busy, waits for their answers for at most an eighth of that, and computes alone if one
declines. It calls again before a later layer, if they are idle then. A worker that receives
requests of its own leaves a pass at once. The leader computes that layer and later ones of a pass
that was left, or that lost a worker, alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from actors.gather.all_to_all import PEER_TIMEOUT_S
from actors.gather.group_exchange import (
    Aborted,
    Accepted,
    Busy,
    Declined,
    GroupCall,
    GroupExchange,
    GroupMessage,
    Left,
    Started,
)
from actors.gather.shared_cache import GroupHalf, OuterPool, numbered_slices
from actors.gather.shared_pass import SharedPass
from actors.gather.stored_backend import StoredBackend, StoredPending
from actors.moe.backend import SharedLayers, WholeBatch
from actors.telemetry.telemetry import Timeline
from contracts.clock import monotonic_s
from contracts.errors import PeerError, PeerHungError
from contracts.logs import event
from kernels.steps import Steps
from models.decoder.batch import SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from planner.arrays import Floats
from planner.placement.shuffling import shuffled_order
from planner.routing.open_requests import RequestWork
from planner.schedule.batch_choice import (
    BatchChoice,
    BatchWork,
    BusyWorkers,
    ExchangeScheme,
    finishes_layer,
    served_scheme,
)

log = logging.getLogger(f"tandem.{__name__}")


class BatchFacts(NamedTuple):
    """Functions of batches that are known outside of the backend.

    work: FLOPs of new tokens [start, stop). first_shares: of tokens' experts on each worker, in the
    first layer with experts, from token ids; None: unknown.
    """

    work: RequestWork
    first_shares: Callable[[Sequence[int]], Floats] | None = None


class GroupParts(NamedTuple):
    """Parts of a `ShuffledBackend`. keeps_kv: K and V are read by later batches.

    counts: batches that this worker led to their end ("led"), that lost a worker ("lost"), and that
    one has left ("left"). scheme: None: that of `served_scheme`.
    """

    exchange: GroupExchange
    half: GroupHalf
    facts: BatchFacts
    counts: dict[str, float]
    keeps_kv: bool
    scheme: ExchangeScheme | None = None


@dataclass(slots=True, eq=False)
class _Following:
    """A call that was accepted. layer: the next one. steps: its rest, if it has begun.

    layer_s, began_s: time of the last layer, and begin of this one.
    """

    leader: str
    call: GroupCall
    accepted_s: float
    layer: int
    shared: SharedPass | None = None
    steps: Steps[Tensor] | None = None
    layer_s: float = 0.0
    began_s: float = 0.0


class ShuffledBackend(StoredBackend):
    """Expert backend of shuffled mode."""

    def __init__(
        self,
        name: str,
        half: AttentionHalf,
        store: CopyingStore,
        timeline: Timeline,
        group: GroupParts,
    ) -> None:
        super().__init__(name, half, store, timeline)
        self._group, self._exchange = group, group.exchange
        self._following: _Following | None = None
        self._leading: _LedPass | None = None
        self._count = 0
        self._choice = BatchChoice(group.exchange.workers)
        self._alone: tuple[BatchWork, float] | None = None  # a batch that runs here, since when
        self._busy = BusyWorkers()
        self._announces_idle = False  # to the others, which take it for busy
        self._has_lost = False  # the batch that it led last has lost a worker
        self._begin_s = 0.0  # of the last pass, until its first layer

    @property
    def is_engaged(self) -> bool:
        return self._following is not None

    def wake(self) -> None:
        super().wake()
        self._exchange.wake()

    # --- leading

    def share(self, whole: WholeBatch, layer: int) -> SharedLayers | None:
        if not layer:
            self._alone, self._has_lost = None, False
        may_call = self._may_call()
        if layer and not may_call:
            return None
        work = self._work_of(whole.slices, layer)
        leaves_per_s = self._busy.leaves_per_s(monotonic_s())
        mean_row = self._exchange.levels.mean_row
        gain_s = self._choice.gain_s(work, self.copy_s, mean_row, leaves_per_s)
        least_s = self._begin_s if layer else 0.0
        led = self._lead(whole, layer, work, gain_s) if may_call and gain_s > least_s else None
        if led is not None:
            self._leading, self._alone = led, None
        elif not layer:
            self._alone = work, monotonic_s()
            self._announce(self._choice.alone_s(work, self.copy_s))
        return led

    def _lead(
        self, whole: WholeBatch, layer: int, work: BatchWork, gain_s: float
    ) -> _LedPass | None:
        """Call the others, and begin a pass if all accept."""
        start_s, levels, group = monotonic_s(), self._exchange.levels, self._group
        numbered, numbering = numbered_slices(whole.slices)
        scheme, first_order = group.scheme or served_scheme(levels.nodes), b""
        shares_of = None if layer else group.facts.first_shares
        if shares_of is not None and scheme is ExchangeScheme.SHUFFLED:
            ids = [token_id for each in numbered for token_id in each.token_ids]
            values_TW = levels.landing_values(shares_of(ids))
            first_order = shuffled_order(values_TW).astype(np.int32).tobytes()
        call = GroupCall(
            slices=numbered,
            layer=layer,
            counts=whole.counts,
            first_order=first_order,
            scheme=scheme,
            keeps_kv=group.keeps_kv,
            nodes=list(levels.nodes),
        )
        if not self._call(call, min(gain_s / 8, PEER_TIMEOUT_S)):
            return None
        outer = OuterPool(whole.kv, whole.batch, numbering) if group.keeps_kv else None
        shared = SharedPass(self._exchange, group.half, call, self._exchange.rank, outer)
        self._begin_s = monotonic_s() - start_s
        return _LedPass(self, shared, work, start_s)

    def _may_call(self) -> bool:
        """Return whether no worker is known to be busy or lost."""
        if self._leading is not None or self._has_lost or not self._exchange.is_linked:
            return False
        self._answer(0.0, idle=False)
        return monotonic_s() >= self._busy.until_s

    def _announce(self, seconds: float) -> None:
        """Notify the others, which might call, that a batch runs here."""
        if self._leading is None and self._exchange.is_linked:
            self._announces_idle = True
            self._exchange.send(Busy(seconds), 0)

    def _work_of(self, slices: Sequence[SequenceSlice], first_layer: int) -> BatchWork:
        """Return the work of a batch from a layer on."""
        spec, work = self._half.spec, self._group.facts.work
        tokens = sum(len(each.token_ids) for each in slices)
        flops = sum(work(each.start, each.start + len(each.token_ids)) for each in slices)
        row_bytes, layers = spec.hidden_size * self._half.dtype.itemsize, spec.num_layers
        rest = layers - first_layer
        return BatchWork(tokens, flops * rest // layers, rest, row_bytes)

    def _alone_s(self, call: GroupCall, layer: int) -> float:
        """Return the expected seconds of a batch from a layer on, on one worker."""
        return self._choice.alone_s(self._work_of(call.slices, layer), self.copy_s)

    def _call(self, call: GroupCall, timeout_s: float) -> bool:
        """Call the others; return whether all have accepted, and start the pass."""
        exchange, end_s = self._exchange, monotonic_s() + timeout_s
        self._count += 1
        number = self._count * exchange.workers + exchange.rank
        exchange.begin(number)
        missing = set(exchange.names) - {exchange.names[exchange.rank]}
        try:
            exchange.send(call, number)
            while missing:
                left_s = end_s - monotonic_s()
                if left_s <= 0.0:
                    break
                for peer, about, message in exchange.receive(left_s):
                    self._note_busy(peer, message)
                    if isinstance(message, GroupCall):
                        exchange.send(Declined(), about, [peer])
                    elif about == number and isinstance(message, Accepted):
                        missing.discard(peer)
                    elif about == number and isinstance(message, Declined | Left | Aborted):
                        missing.add(peer)
                        end_s = 0.0
        except PeerError as error:
            self._end(Aborted(error.message))
            return False
        if missing:
            for peer in missing:  # not called again before their next `Busy`
                self._busy.note(peer, self._alone_s(call, call.layer), monotonic_s())
            self._end(Aborted("not all workers are idle"))
            return False
        exchange.send(Started(), number)
        return True

    def led(self, seconds: float, work: BatchWork) -> None:
        """Note that a pass which this worker led has ended."""
        self._group.counts["led"] += 1
        self._announces_idle = True
        self._choice.shared(work, seconds)
        self._leading = None
        self._exchange.end()

    def abandon(self, error: Exception | None, rest: BatchWork) -> None:
        """End the pass that this worker leads before its end, and compute the rest here."""
        is_left = isinstance(self._exchange.ended, Left)
        self._group.counts["left" if is_left else "lost"] += 1
        self._leading, self._has_lost = None, not is_left
        self._end(Aborted("the batch was dropped" if error is None else str(error)))
        rest_s = self._choice.alone_s(rest, self.copy_s)
        if isinstance(error, PeerError):
            self._busy.note(error.peer, rest_s, monotonic_s())
        self._announce(rest_s)

    def _end(self, message: Aborted) -> None:
        self._exchange.send(message, self._exchange.number)
        self._exchange.end()

    # --- following

    def disengage(self, waiting_tokens: int) -> None:
        following = self._following
        if following is None:
            return
        if following.steps is not None and self._finishes_layer(following, waiting_tokens):
            self._woken.set()  # to decide again after a step
            return
        self._following, self._announces_idle = None, True
        self._exchange.send(Left(following.layer), self._exchange.number)
        if following.steps is not None:
            following.steps.close()
        self._exchange.end()
        rest_s = self._alone_s(following.call, following.layer)
        self._busy.note(following.leader, rest_s, monotonic_s())

    def _finishes_layer(self, following: _Following, waiting_tokens: int) -> bool:
        batch, copy_s = self._work_of(following.call.slices, 0), self.copy_s
        flops = self._group.facts.work(0, waiting_tokens)
        own = batch._replace(tokens=waiting_tokens, flops=flops)
        own_s, batch_s = (self._choice.alone_s(each, copy_s) for each in (own, batch))
        layer_s = batch_s / batch.layers
        expected_s = following.layer_s or layer_s / self._exchange.workers
        # A late layer is expected to take as long again as it is late.
        rest_s = abs(following.began_s + expected_s - monotonic_s())
        return finishes_layer(rest_s, own_s, layer_s, batch_s)

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if self._leading is not None:
            return super().poll(timeout_s, idle=idle)
        try:
            if self._following is not None and self._following.shared is not None:
                self._follow(self._following, self._following.shared)
                return False
            self._answer(timeout_s if idle else 0.0, idle=idle)
        except Exception as error:  # noqa: BLE001 - ends the pass only
            self._leave(error)
        return False if idle else super().poll(timeout_s, idle=idle)

    def _answer(self, timeout_s: float, *, idle: bool) -> None:
        """Accept or decline calls, and start an accepted one."""
        if idle and self._announces_idle:
            self._announces_idle = False
            self._exchange.send(Busy(0.0), 0)
        for peer, number, message in self._exchange.receive(timeout_s):
            self._note_busy(peer, message)
            if isinstance(message, GroupCall):
                if idle and self._following is None and self._exchange.is_linked:
                    self._exchange.begin(number)
                    self._following = _Following(peer, message, monotonic_s(), message.layer)
                    self._exchange.send(Accepted(), number, [peer])
                    self._busy.note(peer, self._alone_s(message, message.layer), monotonic_s())
                else:
                    self._exchange.send(Declined(), number, [peer])
            elif self._following is not None and number == self._exchange.number:
                if isinstance(message, Aborted | Left):
                    self._following = None
                    self._exchange.end()
                elif isinstance(message, Started):
                    started = self._following
                    leader = self._exchange.names.index(started.leader)
                    half = self._group.half
                    started.shared = SharedPass(self._exchange, half, started.call, leader)
        waiting = self._following
        if waiting is not None and waiting.shared is None:
            waited_s = monotonic_s() - waiting.accepted_s
            if waited_s > PEER_TIMEOUT_S:
                raise PeerHungError(f"{waiting.leader} has not started its batch", waiting.leader)

    def _note_busy(self, peer: str, message: GroupMessage) -> None:
        if isinstance(message, Busy):
            self._busy.note(peer, message.seconds, monotonic_s())

    def _follow(self, following: _Following, shared: SharedPass) -> None:
        """Compute a layer, or a part of it if this worker is woken."""
        if following.steps is None:
            following.steps, following.began_s = shared.steps(following.layer), monotonic_s()
        for _ in following.steps:
            if self._woken.is_set():
                self._woken.clear()
                return
        following.layer_s = monotonic_s() - following.began_s
        following.layer, following.steps = following.layer + 1, None
        if following.layer == shared.layers:
            self._following = None
            self._exchange.end()

    def _leave(self, error: Exception) -> None:
        following, self._following = self._following, None
        if self._exchange.ended is not None and following is not None:
            self._exchange.end()  # by the other worker, which logs an error of its own
            return
        leader = "" if following is None else following.leader
        event(
            log, "shared_batch_left", logging.WARNING, rank=self._name, leader=leader, reason=error
        )
        if following is not None:
            self._end(Aborted(f"{self._name}: {error}"))

    # --- batches that run here

    def combine(
        self, hidden_TD: Tensor, pending: StoredPending, shared_TD: Tensor | None
    ) -> Steps[None]:
        yield from super().combine(hidden_TD, pending, shared_TD)
        if self._alone is not None and pending.key.layer == self._half.spec.moe_layers[-1]:
            (work, start_s), self._alone = self._alone, None
            self._choice.alone(work, monotonic_s() - start_s)


class _LedPass:
    """A pass that this worker leads, for the executor."""

    def __init__(
        self, backend: ShuffledBackend, shared: SharedPass, work: BatchWork, start_s: float
    ) -> None:
        self._backend, self._shared, self._work, self._start_s = backend, shared, work, start_s
        self._is_open = True

    def steps(self, layer: int, hidden_TD: Tensor | None) -> Steps[Tensor]:
        layers = self._shared.layers
        try:
            hidden_TD = yield from self._shared.steps(layer, hidden_TD)
        except Exception as error:
            if not isinstance(self._backend._exchange.ended, Left):
                event(log, "shared_batch_lost", logging.WARNING, layer=layer, reason=error)
            if isinstance(error, PeerError):
                self._shared.finish(layer)
            self._close(error, layers - layer)
            raise
        if layer == layers - 1:
            self._shared.finish(layer + 1)
            self._is_open = False
            self._backend.led(monotonic_s() - self._start_s, self._work)
        return hidden_TD

    def close(self) -> None:
        self._close(None, 0)

    def _close(self, error: Exception | None, layers: int) -> None:
        """End the pass. layers: those that follow."""
        if self._is_open:
            self._is_open = False
            flops = self._work.flops * layers // self._work.layers
            self._backend.abandon(error, self._work._replace(flops=flops, layers=layers))
