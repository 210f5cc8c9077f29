"""The loop of an expert rank: queues of token groups per (class, layer), served by merging.

Token groups arrive from any attention rank. The rank picks a queue, merges everything that waits in
it into one grouped GEMM, and answers each token group with one weighted sum per token. There is no
barrier across attention ranks: an idle or dead one costs the others nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import NamedTuple

import torch

from actors.channels.base import (
    Endpoint,
    Happening,
    Header,
    Kind,
    Packet,
    Part,
    PeerLost,
    transfer_span,
    transfers,
)
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError
from contracts.events import Stage, TaskSpan
from contracts.logs import event
from models.experts.moe import ExpertHalf
from planner.findep.expert_queues import QueueHead, QueuePolicy, oldest_of_best_class

log = logging.getLogger("tandem.expert")


class MergedGroups(NamedTuple):
    """Token groups of one layer as one call of `ExpertHalf.run`; group g owns rows
    first_row[g] to first_row[g + 1]."""

    x_UD: torch.Tensor
    rows_N: torch.Tensor
    weights_N: torch.Tensor
    counts_e: torch.Tensor
    first_row: list[int]


def merge(packets: list[Packet]) -> MergedGroups:
    """Concatenates token groups; pairs are sorted by local expert, ties in packet order."""
    if len(packets) == 1:
        x_UD, rows_N, weights_N, counts_e = packets[0].tensors
        return MergedGroups(x_UD, rows_N, weights_N, counts_e, [0, x_UD.shape[0]])
    first_row = [0]
    rows, experts = [], []
    for packet in packets:
        x_UD, rows_N, _, counts_e = packet.tensors
        rows.append(rows_N + first_row[-1])
        experts.append(torch.arange(len(counts_e), device=x_UD.device).repeat_interleave(counts_e))
        first_row.append(first_row[-1] + x_UD.shape[0])
    order_N = torch.cat(experts).argsort(stable=True)
    return MergedGroups(
        torch.cat([packet.tensors[0] for packet in packets]),
        torch.cat(rows)[order_N],
        torch.cat([packet.tensors[2] for packet in packets])[order_N],
        torch.stack([packet.tensors[3] for packet in packets]).sum(0),
        first_row,
    )


class ExpertServer:
    """Owned by one thread. `max_merge_tokens` bounds one merged call, and with it the time for
    which a latency-sensitive token group can be blocked."""

    def __init__(
        self,
        endpoint: Endpoint,
        half: ExpertHalf,
        *,
        timeline: Timeline,
        clock: Clock,
        policy: QueuePolicy = oldest_of_best_class,
        max_merge_tokens: int = 8192,
    ) -> None:
        self._endpoint = endpoint
        self._half = half
        self._timeline = timeline
        self._clock = clock
        self._policy = policy
        self._max_merge_tokens = max_merge_tokens
        self._queues: defaultdict[tuple[int, int], list[Packet]] = defaultdict(list)

    def step(self, timeout_s: float) -> None:
        """Takes what has arrived and runs one merged call, or waits for messages."""
        for happening in self._poll(timeout_s):
            if isinstance(happening, Packet):
                self._enqueue(happening)
            elif isinstance(happening, PeerLost):
                self._forget(happening)
        if self._queues:
            self._serve(self._next())

    def _poll(self, timeout_s: float) -> list[Happening]:
        if self._queues:
            return self._endpoint.poll(0.0)
        start_s = self._clock()
        happenings = self._endpoint.poll(timeout_s)
        end_s = self._clock()
        if happenings:  # else nobody has asked for anything: idle, not waiting
            self._timeline.add(TaskSpan(self._endpoint.name, Stage.WAIT, start_s, end_s))
        self._timeline.waited(start_s, end_s, transfers(happenings))
        return happenings

    def _enqueue(self, packet: Packet) -> None:
        header = packet.header
        self._queues[int(header.priority), header.layer].append(packet)
        self._timeline.add(transfer_span(packet, self._endpoint.name))

    def _forget(self, lost: PeerLost) -> None:
        """Drops what a lost attention rank still waits for."""
        peer = lost.peer
        event(
            log, "peer_lost", logging.WARNING, rank=self._endpoint.name, reason=lost.error.message
        )
        for key, packets in list(self._queues.items()):
            kept = [packet for packet in packets if packet.peer != peer]
            for packet in packets:
                if packet.peer == peer:
                    packet.release()
            if kept:
                self._queues[key] = kept
            else:
                del self._queues[key]

    def _next(self) -> list[Packet]:
        """The token groups of the chosen queue, as many as fit one merged call."""
        heads = [
            QueueHead(priority, layer, packets[0].arrived_s, len(packets))
            for (priority, layer), packets in self._queues.items()
        ]
        head = self._policy(heads)
        key = (head.priority, head.layer)
        waiting = self._queues.pop(key)
        tokens, count = 0, 0
        for packet in waiting:
            tokens += packet.tensors[0].shape[0]
            if count and tokens > self._max_merge_tokens:
                break
            count += 1
        if count < len(waiting):
            self._queues[key] = waiting[count:]
        return waiting[:count]

    def _serve(self, packets: list[Packet]) -> None:
        start_s = self._clock()
        groups = merge(packets)
        layer = packets[0].header.layer
        y_UD = self._half.run(layer, groups.x_UD, groups.rows_N, groups.weights_N, groups.counts_e)
        done_s = self._clock()
        for number, packet in enumerate(packets):
            self._answer(packet, y_UD[groups.first_row[number] : groups.first_row[number + 1]])
        first, tokens = packets[0].header, y_UD.shape[0]
        for stage, began_s, ended_s in (
            (Stage.EXPERT, start_s, done_s),
            (Stage.SEND, done_s, self._clock()),
        ):
            self._timeline.add(
                TaskSpan(
                    self._endpoint.name,
                    stage,
                    began_s,
                    ended_s,
                    first.batch,
                    layer,
                    first.micro_batch,
                    first.token_group,
                    tokens,
                )
            )
        for packet in packets:
            packet.release()

    def _answer(self, packet: Packet, y_UD: torch.Tensor) -> None:
        sent_s = self._clock()
        dtype = str(packet.tensors[0].dtype)[6:]
        try:
            reservation = self._endpoint.reserve(packet.peer, (Part(dtype, tuple(y_UD.shape)),))
            reservation.tensors[0].copy_(y_UD)
            header = packet.header
            answer = Header(
                Kind.E2A,
                header.epoch,
                header.batch,
                header.layer,
                header.micro_batch,
                header.token_group,
                header.priority,
                sent_s,
            )
            self._endpoint.commit(reservation, answer)
        except PeerError:
            return  # the attention rank is gone; `poll` tells, and nobody waits for this answer
        except ChannelError as error:  # it would wait for ever
            self._endpoint.drop(packet.peer, f"{packet.peer} got no answer: {error}")
