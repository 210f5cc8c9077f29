"""The loop of an expert rank: queues of token groups, one per class, layer and generation.

Token groups arrive from any attention rank. The rank picks a queue, merges its token groups into
one grouped GEMM, and answers each with one weighted sum per token. A call yields between experts,
so that another class can go first; calls whose experts are loaded go first within their class.
There is no barrier across attention ranks: an idle or lost one does not delay the others.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import msgspec
import torch

from actors.channels.base import (
    ChannelEvent,
    Header,
    Packet,
    PacketKind,
    PeerJoined,
    PeerLost,
    transfer_span,
    transfers,
)
from actors.channels.endpoint import Endpoint, send_tensors
from actors.moe.direct_calls import CallServer, ServedCall
from actors.moe.dispatch import PACKET_PARTS
from actors.moe.rank_experts import DevicePairs, MergedPairs, RankExperts
from actors.telemetry.telemetry import SpanGroup, Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError
from contracts.logs import event
from contracts.requests import Priority
from contracts.traces import Stage, TaskSpan
from kernels.device import work_times
from planner.scheduling.task_order import (
    POLL_INTERVAL_S,
    Preemption,
    QueueHead,
    TaskTimes,
    oldest_of_highest_class,
)


class QueueKey(NamedTuple):
    """Common properties of the token groups of one merged call."""

    priority: int
    layer: int
    generation: int

    @staticmethod
    def of(header: Header) -> QueueKey:
        return QueueKey(int(header.priority), header.layer, header.generation)


class MergedGroups(NamedTuple):
    """Token groups of one call; group g owns rows first_row[g] to first_row[g + 1]."""

    pairs: MergedPairs | DevicePairs
    first_row: list[int]


def merge(packets: list[Packet]) -> MergedGroups:
    """Concatenate token groups; pairs are sorted by local expert, ties in packet order.

    Those of a device are sorted later, there.
    """
    first_row = [0, *itertools.accumulate(packet.rows for packet in packets)]
    on_device = len(packets[0].tensors) == PACKET_PARTS
    if len(packets) == 1:
        pairs = (DevicePairs if on_device else MergedPairs)(*packets[0].tensors)
        return MergedGroups(pairs, first_row)
    x_of, *parts_of, counts_of = zip(*(packet.tensors for packet in packets), strict=True)
    x_UD, counts_Pe = torch.cat(x_of), torch.stack(counts_of)
    if on_device:
        counts_e = counts_Pe.sum(0, dtype=torch.int32)
        return MergedGroups(DevicePairs(x_UD, torch.cat(parts_of[0]), counts_e), first_row)
    rows_of, weights_of = parts_of
    local_e = torch.arange(counts_Pe.shape[1], device=x_UD.device)
    local_N = torch.cat([local_e.repeat_interleave(counts_e) for counts_e in counts_of])
    order_N = local_N.argsort(stable=True)
    rows_N = torch.cat([rows_N + first for rows_N, first in zip(rows_of, first_row, strict=False)])
    weights_N = torch.cat(weights_of)[order_N]
    return MergedGroups(MergedPairs(x_UD, rows_N[order_N], weights_N, counts_Pe.sum(0)), first_row)


class MergedCall:
    """A merged call, from its first slice to its answers."""

    __slots__ = ("computation", "groups", "interrupted", "packets", "y_UD")

    def __init__(self, packets: list[Packet], experts: RankExperts) -> None:
        self.packets = packets
        self.groups = merge(packets)
        self.interrupted = False
        self.y_UD: torch.Tensor | None = None  # set when complete
        self.computation = experts.begin(packets, self.groups.pairs)

    @property
    def key(self) -> QueueKey:
        return QueueKey.of(self.packets[0].header)

    @property
    def tokens(self) -> int:
        return self.groups.first_row[-1]

    def run(self, until_s: float, clock: Clock) -> None:
        """Run to the end, to the first yield after until_s, or until experts are missing."""
        steps = self.computation.steps
        try:
            next(steps)
            while clock() < until_s and self.computation.missing is not None:
                next(steps)
        except StopIteration as done:
            self.y_UD = done.value


log = logging.getLogger("tandem.expert")
_CPU = torch.device("cpu")


class PlacementHandler:
    """Handles placement packets on the server's thread; keeps the launch placement by default."""

    def handle(self, packet: Packet) -> None:
        """Handle ABORTED, COMMITTED, ACQUIRE, RELEASE or DRAINING; ignore other kinds."""

    def add_peer(self, peer: str) -> None: ...

    def remove_peer(self, peer: str) -> None: ...

    def poll(self) -> Iterable[int]:
        """Continue pending transitions; return generations whose experts have been freed."""
        return ()


MAX_MERGE_TOKENS = 8192  # of one merged call


def _served_spans(
    name: str, merged: Iterable[list[ServedCall]], end_s: float
) -> Iterator[TaskSpan]:
    """Yield the spans of direct calls, computed together. end_s: start of the first wait."""
    for members in merged:
        first, start_s, done_s = members[0], members[0].start_s, members[0].done_s
        yield TaskSpan(name, Stage.WAIT, end_s, start_s)
        for call in members:
            numbers = call.batch, call.layer, call.micro_batch, 0, call.rows
            yield TaskSpan(f"{call.peer}>{name}", Stage.A2E, call.sent_s, start_s, *numbers)
        end_s, rows = members[-1].done_s, sum(call.rows for call in members)
        numbers = first.batch, first.layer, first.micro_batch, 0, rows
        peers = tuple((call.peer, call.batch) for call in members)
        yield TaskSpan(name, Stage.EXPERT, start_s, done_s, *numbers, peers)
        yield TaskSpan(name, Stage.SEND, done_s, end_s, *numbers, peers)


class ExpertServer:
    """Owned by one thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        experts: RankExperts,
        *,
        timeline: Timeline,
        choice: Preemption[QueueHead] | None = None,
        generations: PlacementHandler | None = None,
        device: torch.device = _CPU,
    ) -> None:
        """choice: selects the queue at every yield; None: the oldest of the highest class."""
        self._endpoint = endpoint
        self._experts = experts
        self._timeline = timeline
        self._clock = endpoint.clock
        self._choice = choice
        self._generations = generations or PlacementHandler()
        self._queues: defaultdict[QueueKey, list[Packet]] = defaultdict(list)
        self._running: dict[int, MergedCall] = {}  # suspended calls, by number
        self._numbers = 0
        self._lacks_experts = False  # all work waits for experts
        self._times = TaskTimes()
        self._work = work_times(device)
        self._last: MergedCall | None = None  # the call suspended last
        self._last_s = self._since_s = 0.0

    def step(self, timeout_s: float) -> None:
        """Serve direct calls, receive messages and run a slice of a merged call, or wait."""
        calls = self._experts.calls
        if calls is not None and calls.has_callers:
            self._serve_calls(calls, timeout_s)
            timeout_s = 0.0
        for channel_event in self._poll(timeout_s):
            if isinstance(channel_event, Packet):
                self._take(channel_event)
            elif isinstance(channel_event, PeerJoined):
                self._generations.add_peer(channel_event.peer)
            else:
                self._forget(channel_event)
                self._generations.remove_peer(channel_event.peer)
        self._experts.poll()
        self._work.settle()
        for generation in self._generations.poll():
            self._discard(generation)
        head = self._next()
        if head is not None:
            key = QueueKey(head.priority, head.layer, head.generation)
            self._run(head, self._running.pop(head.number) if head.is_started else self._call(key))

    def close(self) -> None:
        """Release all packets without an answer."""
        for packets in [*(call.packets for call in self._running.values()), *self._queues.values()]:
            for packet in packets:
                packet.release()
        self._running.clear()
        self._queues.clear()

    def _serve_calls(self, calls: CallServer, timeout_s: float) -> None:
        """Serve direct calls, except those of a lower class than work that waits."""
        keys = [*self._queues, *(call.key for call in self._running.values())]
        priority = min((key.priority for key in keys), default=int(Priority.BE))
        name, since_s = self._endpoint.name, self._clock()
        served = list(calls.serve(priority, 0.0 if keys else timeout_s))
        seconds, end_s = defaultdict[Stage, list[float]](list), since_s
        merged = [list(alike) for _, alike in itertools.groupby(served, attrgetter("start_s"))]
        for members in merged:
            first, last_s = members[0], members[-1].done_s
            sent_s = min(call.sent_s for call in members)
            self._timeline.exposed_s += max(0.0, first.start_s - max(end_s, sent_s))
            seconds[Stage.WAIT].append(first.start_s - end_s)
            seconds[Stage.A2E] += [call.start_s - call.sent_s for call in members]
            seconds[Stage.EXPERT].append(first.done_s - first.start_s)
            seconds[Stage.SEND].append(last_s - first.done_s)
            end_s = last_s
        if served:
            make = partial(_served_spans, name, merged, since_s)
            self._timeline.add(SpanGroup(Stage.SEND, end_s, seconds, make))

    def _poll(self, timeout_s: float) -> list[ChannelEvent]:
        has_work = bool(self._queues or self._running)
        if has_work and (not self._lacks_experts or self._experts.needs_polling):
            return self._endpoint.poll(0.0)
        start_s = self._clock()
        channel_events = self._endpoint.poll(timeout_s)
        end_s = self._clock()
        if self._lacks_experts:
            self._experts.record_wait(end_s - start_s)
            self._timeline.exposed_s += end_s - start_s
        if channel_events or self._lacks_experts:  # otherwise idle
            self._timeline.add(TaskSpan(self._endpoint.name, Stage.WAIT, start_s, end_s))
        self._timeline.record_wait(start_s, end_s, transfers(channel_events))
        return channel_events

    def _take(self, packet: Packet) -> None:
        header = packet.header
        if header.kind is not PacketKind.A2E or not self._experts.holds(header.generation):
            self._handle_control(packet)
            packet.release()
            return
        self._experts.enqueue(packet)
        self._queues[QueueKey.of(header)].append(packet)
        self._timeline.add(transfer_span(packet, self._endpoint.name))

    def _handle_control(self, packet: Packet) -> None:
        kind, generation = packet.header.kind, packet.header.generation
        if kind is PacketKind.HINT:
            if self._experts.holds(generation):
                self._experts.prefetch(packet)
        elif kind is PacketKind.A2E:  # the rank's experts differ from those addressed
            self._endpoint.drop(
                packet.peer,
                f"{packet.peer} sent tokens for generation {generation} of the placement, which "
                f"{self._endpoint.name} does not have: restart it with the group",
            )
        else:
            self._generations.handle(packet)

    def _discard(self, generation: int) -> None:
        """Drop work of a freed generation; its batches were dropped."""
        for number, call in list(self._running.items()):
            if call.key.generation == generation:
                for packet in self._stop(number).packets:
                    packet.release()
        for key in [key for key in self._queues if key.generation == generation]:
            for packet in self._queues.pop(key):
                self._experts.discard(packet)
                packet.release()

    def _stop(self, number: int) -> MergedCall:
        """Cancel a suspended call; the caller owns its packets."""
        call = self._running.pop(number)
        if call is self._last:
            self._interrupt_last()
        call.computation.close()
        return call

    def _forget(self, lost: PeerLost) -> None:
        """Drop the work of a lost attention rank."""
        peer = lost.peer
        self._experts.forget(peer)
        if self._choice is not None:
            self._choice.forget()
        event(
            log, "peer_lost", logging.WARNING, rank=self._endpoint.name, reason=lost.error.message
        )
        for number, call in list(self._running.items()):
            if any(packet.peer == peer for packet in call.packets):
                self._stop(number)
                for packet in call.packets:
                    self._experts.enqueue(packet)
                self._queues[call.key][:0] = call.packets  # requests of other ranks run again
        for key, packets in list(self._queues.items()):
            kept = [packet for packet in packets if packet.peer != peer]
            for packet in packets:
                if packet.peer == peer:
                    self._experts.discard(packet)
                    packet.release()
            if kept:
                self._queues[key] = kept
            else:
                del self._queues[key]

    def _next(self) -> QueueHead | None:
        """Return the work to run now, or None."""
        heads = [*self._running_heads(), *self._waiting_heads()]
        self._lacks_experts = not heads and bool(self._queues or self._running)
        if not heads:
            return None
        if self._choice is None:
            return oldest_of_highest_class(heads)
        return self._choice.pick(heads, (), self._clock())

    def _running_heads(self) -> Iterator[QueueHead]:
        for number, call in self._running.items():
            missing = call.computation.missing
            if missing is None:
                if call is self._last:
                    self._interrupt_last()
                continue
            slice_s = self._times.predict("slice", call.tokens)
            first, groups = call.packets[0].arrived_s, len(call.packets)
            priority, layer, generation = call.key
            yield QueueHead(
                priority,
                layer,
                first,
                groups,
                call.tokens,
                True,
                slice_s,
                missing,
                number,
                generation,
            )

    def _waiting_heads(self) -> Iterator[QueueHead]:
        for (priority, layer, generation), packets in self._queues.items():
            missing = self._experts.missing(packets)
            if missing is not None:
                oldest_s, groups = packets[0].arrived_s, len(packets)
                yield QueueHead(
                    priority, layer, oldest_s, groups, missing=missing, generation=generation
                )

    def _call(self, key: QueueKey) -> MergedCall:
        """Merge token groups of a queue, up to MAX_MERGE_TOKENS."""
        waiting = self._queues.pop(key)
        tokens, count = 0, 0
        for packet in waiting:
            tokens += packet.rows
            if count and tokens > MAX_MERGE_TOKENS:
                break
            count += 1
        if count < len(waiting):
            self._queues[key] = waiting[count:]
        return MergedCall(waiting[:count], self._experts)

    def _run(self, head: QueueHead, call: MergedCall) -> None:
        start_s = self._work.mark(self._clock())
        if call is not self._last:
            self._interrupt_last()
            self._since_s = start_s
        self._last = None
        until_s = math.inf if self._choice is None else start_s + POLL_INTERVAL_S
        call.run(until_s, self._clock)
        end_s = self._work.mark(self._clock())
        if self._choice is not None:
            self._choice.ran(head, start_s, end_s)
            charge = partial(self._choice.charge, head)

            def measured(begin_s: float, finish_s: float) -> None:
                self._times.add("slice", call.tokens, finish_s - begin_s)
                charge(finish_s - begin_s - (end_s - start_s))

            self._work.measure(start_s, end_s, measured)
        if call.y_UD is None:
            self._numbers += 1
            self._running[self._numbers] = self._last = call
            self._last_s = end_s
        else:
            self._finish(call, call.y_UD, end_s)

    def _interrupt_last(self) -> None:
        if self._last is not None:
            self._last.interrupted = True
            self._add_span(Stage.EXPERT, self._since_s, self._last_s, self._last)
            self._last = None

    def _finish(self, call: MergedCall, y_UD: torch.Tensor, done_s: float) -> None:
        self._add_span(Stage.EXPERT, self._since_s, done_s, call)
        for number, packet in enumerate(call.packets):
            first, last = call.groups.first_row[number : number + 2]
            self._answer(packet, y_UD[first:last])
        self._add_span(Stage.SEND, done_s, self._work.mark(self._clock()), call)
        for packet in call.packets:
            packet.release()

    def _add_span(self, stage: Stage, start_s: float, end_s: float, call: MergedCall) -> None:
        """Record a span; without tokens if the call was interrupted, as its time is not theirs."""
        name, first = self._endpoint.name, call.packets[0].header
        tokens = 0 if call.interrupted else call.tokens
        task = first.batch, first.layer, first.micro_batch, first.token_group, tokens
        batches = tuple((packet.peer, packet.header.batch) for packet in call.packets)

        def record(start_s: float, end_s: float) -> None:
            self._timeline.add(TaskSpan(name, stage, start_s, end_s, *task, batches))

        self._work.measure(start_s, end_s, record)

    def _answer(self, packet: Packet, y_UD: torch.Tensor) -> None:
        answer = msgspec.structs.replace(packet.header, kind=PacketKind.E2A, sent_s=self._clock())
        try:
            send_tensors(self._endpoint, packet.peer, answer, [y_UD], packet.tensors[0].dtype)
        except PeerError:
            return  # the attention rank is lost; `poll` reports it
        except ChannelError as error:  # without an answer the peer would wait forever
            self._endpoint.drop(packet.peer, f"{packet.peer} received no answer: {error}")
