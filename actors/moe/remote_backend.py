"""Experts on expert ranks: routed rows go out in A2E packets, the answers (E2A) are added to the
residual.

Packets are written straight into the channel's memory: no copy of a row is made on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.channels.base import (
    ChannelEvent,
    Endpoint,
    Header,
    Packet,
    PacketKind,
    PeerJoined,
    PeerLost,
    send_tensors,
    transfer_span,
    transfers,
)
from actors.moe.backend import TaskKey
from actors.moe.dispatch import DispatchCounts, RankSlice, add_slice, plan_dispatch, send_slice
from actors.moe.prefetcher import ExpertPrefetcher
from actors.moe.remote_pending import RemotePending
from actors.moe.routing_sample import RoutingSample
from actors.rebalance.placement_client import PlacementClient
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.config import ChannelConfig, GroupsConfig
from contracts.errors import ChannelError, PeerError, PeerHungError, RecoveryTimeoutError
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.steps import Steps, add_tiled, row_tiles, zero_tiled
from models.experts.cache_requests import PredictedExpert
from models.experts.router import RoutedTokens
from models.prediction.expert_predictor import ExpertPredictor
from planner.placement.replicas import MAX_TOP_K
from planner.placement.slots import ExpertPlacement
from planner.schedule.batch_split import token_group_bounds

log = logging.getLogger("tandem.experts")


class RemoteBackend:
    """One attention rank's way to all expert ranks. What was sent to one that is lost is sent
    again, to whoever has its experts then; without `following` the loss ends the plane."""

    fatal = PeerError
    stage = None
    yields = interleaves = True
    copy_s = 0.0
    is_engaged = False

    def __init__(
        self,
        endpoint: Endpoint,
        placement: ExpertPlacement,
        expert_ranks: Sequence[str],
        timeline: Timeline,
        clock: Clock,
        *,
        reply_timeout_s: float = ChannelConfig().reply_timeout_s,
        recovery_timeout_s: float = GroupsConfig().recovery_timeout_s,
        predictor: ExpertPredictor | None = None,
        sample: RoutingSample | None = None,
        following: PlacementClient | None = None,
        counts: DispatchCounts | None = None,
    ) -> None:
        """expert_ranks: names, by rank number; with `following` there may be more later. reply_s: a
        rank that lives and answers nothing for so long is given up. repair_s: so long requests wait
        for another in the place of one that is lost. foresight: what it foretells is sent to the
        ranks that have those experts (None: nothing is). sample: told where tokens go. following:
        how it goes over to other placements, and to other ranks in the places of lost ones (None:
        it does not). counts: of what is sent."""
        self._endpoint = endpoint
        self._placement = placement
        self._name_experts(expert_ranks)
        self._timeline = timeline
        self._clock = clock
        self._reply_timeout_s, self._recovery_timeout_s = reply_timeout_s, recovery_timeout_s
        self._last_reply_s: dict[str, float] = {}  # when each expert rank's last answer came
        self._following = following
        self._generation = 0 if following is None else following.used
        self._changes = -1  # of `following`, as it was looked at last
        self._unreachable = frozenset[int]()  # ranks that cannot be sent what the placement says
        self._has_unused = False
        self._pending: dict[tuple[int, int], RemotePending] = {}  # by (batch, micro-batch)
        self._sample = sample
        self._counts = counts or DispatchCounts(len(expert_ranks))
        self._away_s = 0.0  # so far, from the last send of a layer to its sum, guesses aside
        self._ahead: ExpertPrefetcher | None = None
        if predictor is not None:
            self._ahead = ExpertPrefetcher(
                predictor, self._hint, experts_s=lambda: self._away_s, clock=clock
            )

    def _name_experts(self, expert_ranks: Sequence[str]) -> None:
        self._expert_ranks = expert_ranks
        self._rank_of = {name: rank for rank, name in enumerate(expert_ranks)}

    def wake(self) -> None:
        self._endpoint.wake()

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        if self._ahead is not None:
            self._ahead.prepare(key, token_ids_T)

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> RemotePending:
        """A2E: one packet per token group and expert rank that has work in it."""
        if self._ahead is not None:
            routed = self._ahead.select_routing(key, routed)
        topk_ids_TK = routed.topk_ids_TK.cpu().numpy()
        if self._sample is not None:
            self._sample.routed(key.owner, topk_ids_TK)
        tokens, placed = len(topk_ids_TK), self._placement.layer(key.layer)
        slices = plan_dispatch(
            topk_ids_TK,
            routed.topk_weights_TK.cpu().numpy(),
            token_group_bounds(tokens, plan.r2),
            placed,
        )
        self._counts.add(key.layer, tokens, slices, placed)
        present = 0 if self._following is None else self._following.begin_layer()
        pending = self._pending[key.owner] = RemotePending(
            key, routed.x_TD, slices, placed, self._generation, present
        )
        try:
            self._send(pending, slices)
        except ChannelError:
            self.drop(pending)
            raise
        if self._ahead is not None:  # while they are computed
            start_s = self._clock()
            self._ahead.predict_next(key, hidden_TD, routed)
            pending.prefetch_s = self._clock() - start_s
        return pending

    def _send(self, pending: RemotePending, slices: Sequence[RankSlice]) -> None:
        """What cannot be sent, because a rank is lost, is held."""
        for piece in slices:
            pending.sent_s = self._clock()
            if piece.rank in self._unreachable:
                pending.hold(piece)
                continue
            try:
                self._send_slice(pending.key, piece, pending.x_TD, pending.sent_s)
            except PeerError:  # `poll` tells of it
                if self._following is None:
                    raise
                pending.hold(piece)

    def _send_slice(self, key: TaskKey, piece: RankSlice, x_TD: Tensor, sent_s: float) -> None:
        header = Header(
            PacketKind.A2E,
            self._endpoint.epoch,
            key.batch,
            key.layer,
            key.micro_batch,
            piece.token_group,
            key.priority,
            sent_s,
            self._generation,
        )
        send_slice(self._endpoint, self._expert_ranks[piece.rank], header, piece, x_TD)

    def _hint(self, key: TaskKey, layer: int, guesses: Sequence[PredictedExpert]) -> None:
        """Tells each rank what that layer may want of its experts; of replicas the one that would
        be chosen if a token wanted them all. A rank that cannot be told has nothing to read ahead:
        if it is lost, `poll` says so."""
        placed, guesses = self._placement.layer(layer), guesses[:MAX_TOP_K]
        slots_n = placed.of_pairs(np.array([[guess.expert for guess in guesses]]))[0]
        confidence_n = np.array([guess.confidence for guess in guesses], np.float32)
        for rank, (low, high) in enumerate(placed.bounds):
            there_n = (slots_n >= low) & (slots_n < high)
            if there_n.any():
                local_n = (slots_n[there_n] - low).astype(np.int32)
                with suppress(ChannelError):
                    name = self._expert_ranks[rank]
                    self._send_hint(key, layer, name, local_n, confidence_n[there_n])

    def _send_hint(
        self,
        key: TaskKey,
        layer: int,
        rank: str,
        local_n: NDArray[np.int32],
        confidence_n: NDArray[np.float32],
    ) -> None:
        header = Header(
            PacketKind.HINT,
            self._endpoint.epoch,
            key.batch,
            layer,
            key.micro_batch,
            0,
            key.priority,
            self._clock(),
            self._generation,
        )
        hint = [torch.from_numpy(local_n), torch.from_numpy(confidence_n)]
        send_tensors(self._endpoint, rank, header, hint)

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
        if self._following is not None:
            self._refresh_placement(self._following)
        return bool(channel_events)

    def _take(self, channel_events: Sequence[ChannelEvent]) -> None:
        """Without `following` it raises the loss of an expert rank, the first one if there are
        several: the cause."""
        lost: PeerError | None = None
        for channel_event in channel_events:
            if isinstance(channel_event, Packet):
                self._take_packet(channel_event)
            elif self._following is None and channel_event.peer not in self._rank_of:
                continue
            elif isinstance(channel_event, PeerJoined):
                self._last_reply_s[channel_event.peer] = self._clock()
                if self._following is not None:
                    self._following.joined(channel_event.peer)
            elif self._following is None:
                lost = lost or channel_event.error
            else:
                self._lose(self._following, channel_event)
        if lost is not None:
            raise lost

    def _lose(self, following: PlacementClient, lost: PeerLost) -> None:
        following.lost(lost)
        rank = self._rank_of.get(lost.peer)  # None: it came, and no generation has been on it
        if rank is not None:
            for pending in self._pending.values():
                pending.lose(rank)

    def _take_packet(self, packet: Packet) -> None:
        header = packet.header
        pending = self._pending.get((header.batch, header.micro_batch))
        if pending is None or header.kind is not PacketKind.E2A:
            if self._following is not None:
                self._following.handle(packet)
            packet.release()  # an answer to a batch that has failed, or no answer
            return
        pending.replies[header.token_group, self._rank_of[packet.peer]] = packet
        pending.missing -= 1
        self._last_reply_s[packet.peer] = packet.arrived_s
        self._timeline.add(transfer_span(packet, self._endpoint.name))

    def _refresh_placement(self, following: PlacementClient) -> None:
        """What begins from now on may go to other experts. What has begun ends as it is, but for
        what was sent to a rank that is lost."""
        following.poll()
        if following.changes != self._changes:
            self._changes = following.changes
            self._placement, self._generation = following.slots, following.used
            self._name_experts(following.experts)
            names = enumerate(self._expert_ranks[: self._placement.ranks])
            self._unreachable = frozenset(
                rank for rank, name in names if not following.can_serve(name)
            )
            self._has_unused = following.has_unused
            for pending in list(self._pending.values()):
                if pending.waits:
                    placed = self._placement.layer(pending.key.layer)
                    self._send(pending, pending.cut(placed, self._generation))
        if self._has_unused:
            following.release_unused({used for p in self._pending.values() for used in p.in_use})
            self._has_unused = following.has_unused
        if self._unreachable and any(pending.waits for pending in self._pending.values()):
            self._check_repair(following)

    def _check_repair(self, following: PlacementClient) -> None:
        """Raises RecoveryTimeoutError where what is under way has waited for too long."""
        lost = min(following.absent.items(), key=lambda each: each[1].since_s, default=None)
        if lost is None or self._clock() - lost[1].since_s < self._recovery_timeout_s:
            return
        name, missing_rank = lost
        raise RecoveryTimeoutError(
            f"{name} is lost, and nobody was in its place within {self._recovery_timeout_s:g} s "
            f"(groups.recovery_timeout_s): {missing_rank.reason}"
        )

    def _check_replies(self) -> None:
        """Loses an expert rank that lives, but has answered nothing for reply_s. Raises
        PeerHungError for it where that ends the plane."""
        now_s = self._clock()
        for pending in self._pending.values():
            if not pending.missing or now_s - pending.sent_s < self._reply_timeout_s:
                continue
            for piece in pending.under_way():
                peer = self._expert_ranks[piece.rank]
                if now_s - self._last_reply_s.get(peer, 0.0) < self._reply_timeout_s:
                    continue
                reason = (
                    f"{peer} lives, but has answered nothing for {self._reply_timeout_s:g} s "
                    f"(channel.reply_timeout_s): batch {pending.key.batch} waits at layer "
                    f"{pending.key.layer}"
                )
                if self._following is None:
                    raise PeerHungError(reason, peer)
                self._endpoint.drop(peer, reason)

    def combine(
        self, hidden_TD: Tensor, pending: RemotePending, shared_TD: Tensor | None
    ) -> Steps[None]:
        """Sums go rank by rank in fp32, whatever the order of arrival: equal inputs, equal bits."""
        self._away_s += self._clock() - pending.sent_s - pending.prefetch_s
        total_TD = hidden_TD
        if len(pending.placed.bounds) > 1 or shared_TD is not None:
            total_TD = yield from zero_tiled(torch.empty_like(hidden_TD, dtype=torch.float32))
        for piece in pending.slices:
            reply = piece.token_group, piece.rank
            packet = pending.replies[reply]
            yield from add_slice(total_TD, piece, packet.tensors[0])
            del pending.replies[reply]  # not before: what is dropped meanwhile is released
            packet.release()
            yield
        if shared_TD is not None:
            yield from add_tiled(total_TD, shared_TD)
        if total_TD is not hidden_TD:
            yield from _rounded(hidden_TD, total_TD)
        self._forget(pending)
        if self._ahead is not None:
            self._ahead.end_layer(pending.key, hidden_TD)

    def drop(self, pending: RemotePending) -> None:
        self._forget(pending)
        if self._ahead is not None:
            self._ahead.drop(pending.key.owner)
        for packet in pending.replies.values():
            packet.release()

    def _forget(self, pending: RemotePending) -> None:
        del self._pending[pending.key.owner]
        if self._following is not None:
            self._following.end_layer(pending.present)


def _rounded(hidden_TD: Tensor, total_TD: Tensor) -> Steps[None]:
    """hidden += total, of which the sum is rounded first."""
    for tile in row_tiles(hidden_TD):
        hidden_TD[tile] += total_TD[tile].to(hidden_TD.dtype)
        if tile.stop < hidden_TD.shape[0]:
            yield
