"""Experts on expert ranks: rows leave in A2E packets, answers (E2A) are added to the residual.

Packets are written directly into the channel's memory; rows are not copied in between. After a loss
the slices of the lost rank are cut again for the ranks that hold its experts. Pairs keep their
weights and tokens, and slices with a reply are not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

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
from actors.moe.backend import (
    ExpertBackend,
    ExpertPrefetcher,
    MicroBatchId,
    TaskKey,
    Topology,
    TopologySource,
)
from actors.moe.direct_calls import DirectCalls, RemoteLayerDecoder
from actors.moe.dispatch import DispatchCounts, PacketPlanner, Piece, send_slice
from actors.moe.routing_sample import RoutingSample
from actors.telemetry.telemetry import Timeline
from contracts.config import ChannelConfig, GroupsConfig
from contracts.errors import ChannelError, PeerError, PeerHungError, RecoveryTimeoutError
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.steps import Steps, add_tiled, row_tiles, zero_tiled
from models.decoder.attention import KvPool
from models.decoder.decoder import AttentionHalf
from models.decoder.layer_decoder import LayerDecoder
from models.experts.cache_requests import PredictedExpert
from models.experts.expert_half import RoutedTokens
from models.prediction.expert_predictor import ExpertPredictor
from planner.placement.slots import MAX_TOP_K, LayerSlots
from planner.schedule.batch_plan import token_group_bounds

Reply = tuple[int, int]  # token group, expert rank


@dataclass(slots=True, eq=False)
class RemotePending:
    """Handle of one dispatched layer.

    x_TD: source of rows that are sent again. placed, used: the placement of the slices and its
    generation. present: the base generation, for `end_layer`. sent_s: time of the last send.
    """

    key: TaskKey
    x_TD: Tensor
    slices: Sequence[Piece]
    placed: LayerSlots
    used: int
    present: int
    missing: int = field(init=False)
    sent_s: float = 0.0
    replies: dict[Reply, Packet] = field(default_factory=dict)
    _held: set[Reply] = field(default_factory=set)  # slices that cannot be sent yet
    _resent: dict[Reply, tuple[LayerSlots, int]] = field(default_factory=dict)  # their placement

    def __post_init__(self) -> None:
        self.missing = len(self.slices)

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def waits(self) -> bool:
        """True if a slice cannot be sent yet."""
        return bool(self._held)

    @property
    def in_use(self) -> set[int]:
        """Generations whose replies may still arrive."""
        return {self.used, *(used for _, used in self._resent.values())}

    def under_way(self) -> Iterable[Piece]:
        """Yield the slices that were sent and have no reply."""
        for piece in self.slices:
            reply = piece.token_group, piece.rank
            if reply not in self.replies and reply not in self._held:
                yield piece

    def hold(self, piece: Piece) -> None:
        self._held.add((piece.token_group, piece.rank))

    def lose(self, rank: int) -> None:
        """Hold the slices of a lost rank that have no reply."""
        for piece in list(self.under_way()):
            if piece.rank == rank:
                self.hold(piece)

    def cut(self, placed: LayerSlots, used: int) -> list[Piece]:
        """Cut the held slices by the placement of generation `used`; return those to send."""
        held, self._held = self._held, set()
        slices: list[Piece] = []
        found: list[Piece] = []
        group = 1 + max(piece.token_group for piece in self.slices)
        for piece in self.slices:
            reply = piece.token_group, piece.rank
            if reply not in held:
                slices.append(piece)
                continue
            before, generation = self._resent.pop(reply, (self.placed, self.used))
            same = generation == used
            pieces = [piece] if same else piece.recut(before, placed, group)
            group += len(pieces)
            self._resent.update({(one.token_group, one.rank): (placed, used) for one in pieces})
            slices += pieces
            found += pieces
        self.missing += len(slices) - len(self.slices)
        self.slices = slices
        return found


class RemoteBackend(ExpertBackend[RemotePending]):
    """One attention rank's connection to all expert ranks.

    If the source of the topology `replaces` lost ranks, rows sent to one are sent again to the rank
    that holds its experts then; else a loss makes the backend unusable. counts: of what is sent.
    """

    fatal = PeerError
    stage = None

    def __init__(
        self,
        endpoint: Endpoint,
        source: TopologySource,
        timeline: Timeline,
        *,
        reply_timeout_s: float = ChannelConfig().reply_timeout_s,
        recovery_timeout_s: float = GroupsConfig().recovery_timeout_s,
        predictor: ExpertPredictor | None = None,
        sample: RoutingSample | None = None,
        half: AttentionHalf | None = None,
    ) -> None:
        """Set up a backend. half: enables direct calls.

        A connected rank without any reply for reply_timeout_s is dropped. Requests wait up to
        recovery_timeout_s for a lost rank.
        """
        self._endpoint = endpoint
        self._timeline = timeline
        self._clock = endpoint.clock
        self._reply_timeout_s, self._recovery_timeout_s = reply_timeout_s, recovery_timeout_s
        self._last_reply_s: dict[str, float] = {}  # by expert rank
        self._source = source
        self._half = half
        self._sample = sample
        self.counts = DispatchCounts(len(source.topology.experts))
        self._packets = PacketPlanner(self.counts, sample, endpoint.clock)
        self._decoder: RemoteLayerDecoder | None = None
        self._use(source.topology)
        self._pending: dict[MicroBatchId, RemotePending] = {}
        self._prefetcher = ExpertPrefetcher(predictor, self._hint)

    def _use(self, topology: Topology) -> None:
        self._topology = topology
        self._rank_of = {name: rank for rank, name in enumerate(topology.experts)}
        if self._decoder is not None:
            self._decoder.use(topology)
        self._packets.forget_placements()

    def layer_decoder(self, kv: KvPool) -> LayerDecoder | None:
        half = self._half
        if half is None or self._prefetcher.is_enabled or not RemoteLayerDecoder.supports(half):
            return None
        parts = DirectCalls(
            self._endpoint, half, self.counts, self._timeline, self._sample, self._source
        )
        self._decoder = RemoteLayerDecoder(parts, kv, self._topology)
        return self._decoder

    def wake(self) -> None:
        self._endpoint.wake()

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        self._prefetcher.prepare(key, token_ids_T)

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> RemotePending:
        """Send one A2E packet per token group and expert rank with work in it."""
        routed = self._prefetcher.select_routing(key, routed)
        placed = self._topology.slots.layer(key.layer)
        groups = token_group_bounds(len(routed.topk_ids_TK), plan.r2)
        slices = self._packets.plan(key, routed, groups, placed)
        generation, present = self._topology.generation, self._source.begin_layer()
        pending = self._pending[key.owner] = RemotePending(
            key, routed.x_TD, slices, placed, generation, present
        )
        try:
            self._send(pending, slices)
        except ChannelError:
            self.drop(pending)
            raise
        self._prefetcher.predict_next(key, hidden_TD, routed)  # while the experts run
        return pending

    def _send(self, pending: RemotePending, slices: Sequence[Piece]) -> None:
        key = pending.key
        for piece in slices:
            header = self._header(PacketKind.A2E, key, key.layer, piece.token_group)
            pending.sent_s = header.sent_s
            if piece.rank in self._topology.unreachable:
                pending.hold(piece)
                continue
            try:
                peer = self._topology.experts[piece.rank]
                send_slice(self._endpoint, peer, header, piece, pending.x_TD)
            except PeerError:  # `poll` reports it
                if not self._source.replaces:
                    raise
                pending.hold(piece)

    def _header(self, kind: PacketKind, key: TaskKey, layer: int, token_group: int = 0) -> Header:
        return Header(
            kind,
            self._endpoint.epoch,
            key.batch,
            layer,
            key.micro_batch,
            token_group,
            key.priority,
            self._clock(),
            self._topology.generation,
        )

    def _hint(self, key: TaskKey, layer: int, guesses: Sequence[PredictedExpert]) -> None:
        """Send each rank the predicted experts of `layer`.

        Of replicas, the one that a token which needs all of them would use. A hint that cannot be
        sent is skipped.
        """
        placed, guesses = self._topology.slots.layer(layer), guesses[:MAX_TOP_K]
        slots_n = placed.of_pairs(np.array([[guess.expert for guess in guesses]]))[0]
        confidence_n = np.array([guess.confidence for guess in guesses], np.float32)
        for rank, (low, high) in enumerate(placed.bounds):
            there_n = (slots_n >= low) & (slots_n < high)
            if there_n.any():
                local_n = (slots_n[there_n] - low).astype(np.int32)
                header = self._header(PacketKind.HINT, key, layer)
                hint = [torch.from_numpy(local_n), torch.from_numpy(confidence_n[there_n])]
                with suppress(ChannelError):
                    send_tensors(self._endpoint, self._topology.experts[rank], header, hint)

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if timeout_s <= 0.0 or idle:
            channel_events = self._endpoint.poll(timeout_s)
        else:
            start_s = self._clock()
            channel_events = self._endpoint.poll(timeout_s)
            end_s = self._clock()
            self._timeline.add(TaskSpan(self._endpoint.name, Stage.WAIT, start_s, end_s))
            self._timeline.record_wait(start_s, end_s, transfers(channel_events))
        if channel_events:
            self._take(channel_events)
        elif self._pending:
            self._check_replies()
        self._packets.poll()
        self._refresh_topology()
        return bool(channel_events)

    def _take(self, channel_events: Sequence[ChannelEvent]) -> None:
        """Process channel events. Raise the first loss of a rank that is not replaced."""
        lost: PeerError | None = None
        for channel_event in channel_events:
            if isinstance(channel_event, Packet):
                self._take_packet(channel_event)
            elif isinstance(channel_event, PeerJoined):
                self._last_reply_s[channel_event.peer] = self._clock()
                self._source.add_peer(channel_event.peer)
            elif self._source.replaces:
                self._lose(channel_event)
            elif channel_event.peer in self._rank_of:
                lost = lost or channel_event.error
        if lost is not None:
            raise lost

    def _lose(self, lost: PeerLost) -> None:
        self._source.remove_peer(lost)
        rank = self._rank_of.get(lost.peer)  # None: no generation has used it yet
        if rank is not None:
            for pending in self._pending.values():
                pending.lose(rank)

    def _take_packet(self, packet: Packet) -> None:
        header = packet.header
        pending = self._pending.get((header.batch, header.micro_batch))
        if pending is None or header.kind is not PacketKind.E2A:
            self._source.handle(packet)
            packet.release()  # a control packet, or the answer to a failed batch
            return
        pending.replies[header.token_group, self._rank_of[packet.peer]] = packet
        pending.missing -= 1
        self._last_reply_s[packet.peer] = packet.arrived_s
        self._timeline.add(transfer_span(packet, self._endpoint.name))

    def _refresh_topology(self) -> None:
        """Use the latest topology for new layers; send held slices again."""
        self._source.poll()
        if self._source.topology is not self._topology:
            self._use(self._source.topology)
            for pending in list(self._pending.values()):
                if pending.waits:
                    placed = self._topology.slots.layer(pending.key.layer)
                    self._send(pending, pending.cut(placed, self._topology.generation))
        if self._topology.has_unused:
            self._source.release_unused({used for p in self._pending.values() for used in p.in_use})
        if self._topology.unreachable and any(p.waits for p in self._pending.values()):
            self._check_recovery()

    def _check_recovery(self) -> None:
        """Raise RecoveryTimeoutError if a rank has been missing for longer than allowed."""
        missing = min(self._topology.missing, key=lambda each: each[1].since_s, default=None)
        if missing is None or self._clock() - missing[1].since_s < self._recovery_timeout_s:
            return
        name, missing_rank = missing
        raise RecoveryTimeoutError(
            f"{name} is lost and was not replaced within {self._recovery_timeout_s:g} s "
            f"(groups.recovery_timeout_s): {missing_rank.reason}"
        )

    def _check_replies(self) -> None:
        """Drop connected ranks without replies; raise PeerHungError if they are not replaced."""
        now_s = self._clock()
        for pending in self._pending.values():
            if not pending.missing or now_s - pending.sent_s < self._reply_timeout_s:
                continue
            for piece in pending.under_way():
                peer = self._topology.experts[piece.rank]
                if now_s - self._last_reply_s.get(peer, 0.0) < self._reply_timeout_s:
                    continue
                reason = (
                    f"{peer} is connected but has sent no reply for {self._reply_timeout_s:g} s "
                    f"(channel.reply_timeout_s): batch {pending.key.batch} waits at layer "
                    f"{pending.key.layer}"
                )
                if not self._source.replaces:
                    raise PeerHungError(reason, peer)
                self._endpoint.drop(peer, reason)

    def combine(
        self, hidden_TD: Tensor, pending: RemotePending, shared_TD: Tensor | None
    ) -> Steps[None]:
        """Add the replies rank by rank in fp32, so that equal inputs give equal bits."""
        total_TD = hidden_TD
        if len(pending.placed.bounds) > 1 or shared_TD is not None:
            total_TD = yield from zero_tiled(torch.empty_like(hidden_TD, dtype=torch.float32))
        for piece in pending.slices:
            reply = piece.token_group, piece.rank
            packet = pending.replies[reply]
            yield from piece.add_to(total_TD, packet.tensors[0])
            del pending.replies[reply]  # only now: `drop` releases the remaining ones
            packet.release()
            yield
        if shared_TD is not None:
            yield from add_tiled(total_TD, shared_TD)
        if total_TD is not hidden_TD:
            yield from _rounded(hidden_TD, total_TD)
        self._forget(pending)

    def drop(self, pending: RemotePending) -> None:
        self._forget(pending)
        self._prefetcher.drop(pending.key.owner)
        for packet in pending.replies.values():
            packet.release()

    def _forget(self, pending: RemotePending) -> None:
        del self._pending[pending.key.owner]
        self._source.end_layer(pending.present)


def _rounded(hidden_TD: Tensor, total_TD: Tensor) -> Steps[None]:
    """Round the total to the residual's dtype and add it, tile by tile."""
    for tile in row_tiles(hidden_TD):
        hidden_TD[tile] += total_TD[tile].to(hidden_TD.dtype)
        if tile.stop < hidden_TD.shape[0]:
            yield
