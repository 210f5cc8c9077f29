"""The loop of an expert rank: queues of token groups, served by merging. A queue is of one class,
layer and generation of placement.

Token groups arrive from any attention rank. The rank picks a queue, merges everything that waits in
it into one grouped GEMM, and answers each token group with one weighted sum per token. A call
yields between runs of experts, where another class may go first; where experts are read as they are
wanted, what misses none goes first in its class, and nothing waits in a read. There is no barrier
across attention ranks: an idle or dead one costs the others nothing.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import torch

from actors.channels.base import (
    ChannelEvent,
    Endpoint,
    Packet,
    PacketKind,
    PeerJoined,
    PeerLost,
    send_tensors,
    transfer_span,
    transfers,
)
from actors.moe.merged_call import MergedCall, QueueKey
from actors.moe.rank_experts import RankExperts
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError
from contracts.logs import event
from contracts.traces import Stage, TaskSpan
from planner.scheduling.expert_queues import ExpertQueuePolicy, QueueHead, oldest_of_highest_class
from planner.scheduling.preemption import POLL_INTERVAL_S, Preemption
from planner.scheduling.task_times import TaskTimes

log = logging.getLogger("tandem.expert")


class PlacementHandler(Protocol):
    """What the rank does about generations of placement. Owned by the server's thread."""

    def handle(self, packet: Packet) -> None:
        """Of an attention rank: REFUSED, RETIRED, WANTED or LEFT."""

    def joined(self, peer: str) -> None: ...

    def lost(self, peer: str) -> None: ...

    def poll(self) -> Iterable[int]:
        """Goes on with what is under way; the generations that nobody uses any more, whose experts
        are gone."""


class StaticPlacement:
    """A `PlacementHandler`: that of the launch, for good."""

    def handle(self, packet: Packet) -> None:
        """Nothing was proposed."""

    def joined(self, peer: str) -> None:
        """It has the same."""

    lost = joined

    def poll(self) -> Iterable[int]:
        return ()


class ExpertServer:
    """Owned by one thread. `max_merge_tokens` bounds one merged call."""

    def __init__(
        self,
        endpoint: Endpoint,
        experts: RankExperts,
        *,
        timeline: Timeline,
        clock: Clock,
        policy: ExpertQueuePolicy = oldest_of_highest_class,
        choice: Preemption[QueueHead] | None = None,
        max_merge_tokens: int = 8192,
        generations: PlacementHandler | None = None,
    ) -> None:
        """policy: the choice among queues; choice: if there is one, it makes it instead, at every
        yield."""
        self._endpoint = endpoint
        self._experts = experts
        self._timeline = timeline
        self._clock = clock
        self._policy = policy
        self._choice = choice
        self._max_merge_tokens = max_merge_tokens
        self._generations = generations or StaticPlacement()
        self._queues: defaultdict[QueueKey, list[Packet]] = defaultdict(list)
        self._running: dict[int, MergedCall] = {}  # stand at a yield, by number
        self._numbers = 0
        self._lacks_experts = False  # all that there is to do, as it was looked at last
        self._times = TaskTimes()
        self._last: MergedCall | None = None  # what ran last, where it stands at a yield
        self._last_s = self._since_s = 0.0

    def step(self, timeout_s: float) -> None:
        """Takes what has arrived and runs a slice of a merged call, or waits for messages."""
        for channel_event in self._poll(timeout_s):
            if isinstance(channel_event, Packet):
                self._take(channel_event)
            elif isinstance(channel_event, PeerJoined):
                self._generations.joined(channel_event.peer)
            else:
                self._forget(channel_event)
                self._generations.lost(channel_event.peer)
        self._experts.poll()
        for generation in self._generations.poll():
            self._discard(generation)
        head = self._next()
        if head is not None:
            key = QueueKey(head.priority, head.layer, head.generation)
            self._run(head, self._running.pop(head.number) if head.is_started else self._call(key))

    def close(self) -> None:
        """Nothing of what it has is answered."""
        for packets in [*(call.packets for call in self._running.values()), *self._queues.values()]:
            for packet in packets:
                packet.release()
        self._running.clear()
        self._queues.clear()

    def _poll(self, timeout_s: float) -> list[ChannelEvent]:
        if (self._queues or self._running) and not self._lacks_experts:
            return self._endpoint.poll(0.0)
        start_s = self._clock()
        channel_events = self._endpoint.poll(timeout_s)
        end_s = self._clock()
        if self._lacks_experts:
            self._experts.record_wait(end_s - start_s)
            self._timeline.exposed_s += end_s - start_s
        if channel_events or self._lacks_experts:  # else nobody has asked for anything: idle
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
        """Nothing of it is computed."""
        kind, generation = packet.header.kind, packet.header.generation
        if kind in (
            PacketKind.ABORTED,
            PacketKind.COMMITTED,
            PacketKind.ACQUIRE,
            PacketKind.RELEASE,
            PacketKind.DRAINING,
        ):
            self._generations.handle(packet)
        elif kind is PacketKind.HINT and self._experts.holds(generation):
            self._experts.prefetch(packet)
        elif kind is PacketKind.A2E:  # other experts than it means are here, or none
            self._endpoint.drop(
                packet.peer,
                f"{packet.peer} sent tokens for generation {generation} of the placement, which "
                f"{self._endpoint.name} does not have: launch it anew with the group",
            )

    def _discard(self, generation: int) -> None:
        """Drops what still waits for a generation that is gone: batches that were given up."""
        for number, call in list(self._running.items()):
            if call.key.generation == generation:
                for packet in self._stop(number).packets:
                    packet.release()
        for key in [key for key in self._queues if key.generation == generation]:
            for packet in self._queues.pop(key):
                self._experts.discard(packet)
                packet.release()

    def _stop(self, number: int) -> MergedCall:
        """A call that stands at a yield is given up; its packets are nobody's."""
        call = self._running.pop(number)
        if call is self._last:
            self._interrupt_last()
        call.computation.close()
        return call

    def _forget(self, lost: PeerLost) -> None:
        """Drops what a lost attention rank still waits for."""
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
                self._queues[call.key][:0] = call.packets  # the others' run again
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
        """What runs now; None: nothing."""
        heads = [*self._running_heads(), *self._waiting_heads()]
        self._lacks_experts = not heads and bool(self._queues or self._running)
        if not heads:
            return None
        if self._choice is None:
            return self._policy(heads)
        return self._choice.pick(heads, (), self._clock())

    def _running_heads(self) -> Iterator[QueueHead]:
        """Calls that can go on."""
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
        """Queues of which a call can be begun."""
        for (priority, layer, generation), packets in self._queues.items():
            missing = self._experts.missing(packets)
            if missing is not None:
                oldest_s, groups = packets[0].arrived_s, len(packets)
                yield QueueHead(
                    priority, layer, oldest_s, groups, missing=missing, generation=generation
                )

    def _call(self, key: QueueKey) -> MergedCall:
        """The token groups of a queue, as many as fit one merged call."""
        waiting = self._queues.pop(key)
        tokens, count = 0, 0
        for packet in waiting:
            tokens += packet.rows
            if count and tokens > self._max_merge_tokens:
                break
            count += 1
        if count < len(waiting):
            self._queues[key] = waiting[count:]
        return MergedCall(waiting[:count], self._experts)

    def _run(self, head: QueueHead, call: MergedCall) -> None:
        start_s = self._clock()
        if call is not self._last:
            self._interrupt_last()
            self._since_s = start_s
        self._last = None
        until_s = math.inf if self._choice is None else start_s + POLL_INTERVAL_S
        call.run(until_s, self._clock)
        end_s = self._clock()
        if self._choice is not None:
            self._choice.ran(head, start_s, end_s)
            self._times.add("slice", call.tokens, end_s - start_s)
        if call.y_UD is None:
            self._numbers += 1
            self._running[self._numbers] = self._last = call
            self._last_s = end_s
        else:
            self._finish(call, call.y_UD, end_s)

    def _interrupt_last(self) -> None:
        """Another call goes first."""
        if self._last is not None:
            self._last.interrupted = True
            self._add_span(Stage.EXPERT, self._since_s, self._last_s, self._last)
            self._last = None

    def _finish(self, call: MergedCall, y_UD: torch.Tensor, done_s: float) -> None:
        self._add_span(Stage.EXPERT, self._since_s, done_s, call)
        for number, packet in enumerate(call.packets):
            first, last = call.groups.first_row[number : number + 2]
            self._answer(packet, y_UD[first:last])
        self._add_span(Stage.SEND, done_s, self._clock(), call)
        for packet in call.packets:
            packet.release()

    def _add_span(self, stage: Stage, start_s: float, end_s: float, call: MergedCall) -> None:
        """Without a number of tokens where that is not how long so many take."""
        first, tokens = call.packets[0].header, 0 if call.interrupted else call.tokens
        name, group = self._endpoint.name, first.token_group
        self._timeline.add(
            TaskSpan(
                name,
                stage,
                start_s,
                end_s,
                first.batch,
                first.layer,
                first.micro_batch,
                group,
                tokens,
                tuple((packet.peer, packet.header.batch) for packet in call.packets),
            )
        )

    def _answer(self, packet: Packet, y_UD: torch.Tensor) -> None:
        answer = msgspec.structs.replace(packet.header, kind=PacketKind.E2A, sent_s=self._clock())
        try:
            send_tensors(self._endpoint, packet.peer, answer, [y_UD], packet.tensors[0].dtype)
        except PeerError:
            return  # the attention rank is gone; `poll` tells, and nobody waits for this answer
        except ChannelError as error:  # it would wait for ever
            self._endpoint.drop(packet.peer, f"{packet.peer} got no answer: {error}")
