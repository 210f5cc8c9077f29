"""An attention rank follows the experts: from one generation to the next as they move, be it to
more ranks or to fewer, and to those that stand in when an expert rank is lost.

Owned by the plane's thread. The rules are those of `AttentionGenerations` and `ExpertMembership`;
here are the packets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from actors.channels.base import Endpoint, Packet, PacketKind, PeerLost
from actors.rebalance.expert_generations import PlacementMessage
from actors.rebalance.expert_membership import ExpertMembership, MissingRank
from actors.rebalance.placement_messages import PlacementSender, attempt_of, placement_of, reason_of
from actors.rebalance.placement_transition import AttentionGenerations
from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.logs import event
from contracts.placement import Placement
from planner.placement.failover import is_failover
from planner.placement.slots import ExpertPlacement

log = logging.getLogger("tandem.experts")


class PlacementClient:
    """slots: what the next layer is dispatched by. generation: the present one, which may have a
    stand-in. switches: how often that has changed. repairs: how often lost ranks were stood in for
    ("stand_in"), and came back ("return")."""

    def __init__(
        self,
        endpoint: Endpoint,
        placement: Placement,
        *,
        deadline_s: float,
        check: Callable[[Placement], None],
        clock: Clock,
    ) -> None:
        """check: raises ConfigError where a placement is of another model."""
        self.slots, self._used = ExpertPlacement(placement), placement
        self.switches = 0
        self.repairs = {"stand_in": 0, "return": 0}
        self._generations = AttentionGenerations(placement, deadline_s)
        self._membership = ExpertMembership(placement)
        self._sender = PlacementSender(endpoint, clock)
        self._present = frozenset[str]()
        self._name, self._check, self._clock = endpoint.name, check, clock

    @property
    def generation(self) -> int:
        return self._generations.generation

    @property
    def ranks(self) -> int:
        """Expert ranks that the present generation is on."""
        return self._generations.current.ranks

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of expert ranks by number, those that it is not on any more too. Never fewer."""
        return self._generations.experts

    @property
    def used(self) -> int:
        """The generation of `slots`."""
        return self._used.generation

    @property
    def changes(self) -> int:
        """How often `slots`, or who can be asked for them, has changed."""
        return self._membership.changes

    @property
    def absent(self) -> dict[str, MissingRank]:
        """Ranks without the experts of the present generation. A copy, from any thread."""
        return dict(self._membership.absent)

    @property
    def uses_stand_in(self) -> bool:
        """Whether others do the work of those. From any thread."""
        return is_failover(self._used.generation)

    @property
    def waits(self) -> bool:
        """Whether what needs the experts of those can only wait. From any thread."""
        return bool(self._membership.absent) and not self.uses_stand_in

    def can_serve(self, expert: str) -> bool:
        """Whether it can be sent what `slots` says."""
        return self._membership.can_serve(expert, self._used.generation)

    def begin_layer(self) -> int:
        return self._generations.begin_layer()

    def end_layer(self, generation: int) -> None:
        self._send(self._generations.end_layer(generation))

    def handle(self, packet: Packet) -> None:
        """PLACED, WITHDRAWN, HELD or LEAVING; anything else is none of its business."""
        kind = packet.header.kind
        if kind is PacketKind.PREPARED:
            self._on_prepared(packet)
        elif kind is PacketKind.ABORT_VOTE:
            self._on_abort_vote(packet)
        elif kind is PacketKind.READY:
            self._on_ready(packet)
        elif kind is PacketKind.DRAINING:
            self._apply(self._membership.start_draining(packet.peer, self._clock()))

    def joined(self, expert: str) -> None:
        """It says by itself what it has."""
        self._generations.joined(expert)
        self._membership.joined(expert)

    def lost(self, lost: PeerLost) -> None:
        """Of an expert rank. What is to come is let go of by the others. One that nothing is asked
        of any more may go."""
        now_s, is_used = self._clock(), lost.peer in self._membership.experts
        name, level = (
            ("peer_lost", logging.ERROR) if is_used else ("peer_disconnected", logging.INFO)
        )
        event(log, name, level, rank=self._name, reason=lost.error.message)
        self._send(self._generations.lost(lost.peer))
        self._apply(self._membership.lost(lost.peer, lost.error.message, lost.epoch, now_s))

    def poll(self) -> None:
        """What is due by now."""
        now_s = self._clock()
        self._send(self._generations.poll(now_s))
        if self._membership.absent:
            self._apply(self._membership.poll(now_s))
        self._sender.flush()

    @property
    def has_unused(self) -> bool:
        """Whether somebody stands in who need not any more."""
        return self._membership.has_unused

    def release_unused(self, in_use: Collection[int]) -> None:
        """in_use: generations of what is under way."""
        self._send(self._membership.release_unused(in_use))

    def _on_prepared(self, packet: Packet) -> None:
        generation, now_s = packet.header.generation, self._clock()
        if generation <= self.generation:
            return
        try:
            placement = self._placement_of(packet)
        except ValueError as error:
            self._send(self._generations.abort(generation, str(error), now_s))
            return
        holders = self._generations.holders(generation) | {packet.peer}
        attempt, within_s = packet.header.batch, float(packet.header.token_group)
        self._send(
            self._generations.prepared(packet.peer, placement, attempt, now_s, within_s=within_s)
        )
        if self.generation == generation:
            self._switch_to(placement, holders)

    def _on_abort_vote(self, packet: Packet) -> None:
        generation, now_s = packet.header.generation, self._clock()
        reason = f"{packet.peer}: {reason_of(packet)}"
        if generation > self.generation and not is_failover(generation):
            self._send(self._generations.add_abort_vote(generation, reason, now_s))
            return
        event(
            log,
            "stand_in_rejected",
            logging.WARNING,
            rank=self._name,
            generation=generation,
            reason=f"{reason}: requests wait for another rank in the lost one's place",
        )
        self._apply(self._membership.add_abort_vote(packet.peer, generation, reason, now_s))

    def _on_ready(self, packet: Packet) -> None:
        """Of one that has just been joined, maybe a generation that all others use by now."""
        generation = packet.header.generation
        try:
            placement = self._placement_of(packet)
            attempt = attempt_of(packet) if is_failover(generation) else packet.header.batch
        except ValueError as error:
            event(log, "placement_rejected", logging.WARNING, rank=self._name, reason=error)
            return
        if generation > self.generation and not is_failover(generation):
            self._send(self._generations.adopt(placement))
            self._switch_to(placement, ())
        self._apply(self._membership.mark_ready(packet.peer, generation, self._clock(), attempt))

    def _placement_of(self, packet: Packet) -> Placement:
        """Raises ValueError."""
        placement = placement_of(packet)
        try:
            self._check(placement)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return placement

    def _switch_to(self, placement: Placement, holders: Collection[str]) -> None:
        self.switches += 1
        generation, ranks = placement.generation, placement.ranks
        event(log, "placement_switched", rank=self._name, generation=generation, ranks=ranks)
        self._apply(self._membership.switch_to(placement, holders, self._clock()))

    def _apply(self, messages: Iterable[PlacementMessage]) -> None:
        """Says it, and goes over to what is used now."""
        self._send(messages)
        membership = self._membership
        present = frozenset(membership.experts) - membership.absent.keys()
        back, self._present = present - self._present, present
        for expert in back:
            if expert in self._generations.lost_experts:
                self.repairs["return"] += 1
                event(log, "expert_rank_recovered", logging.WARNING, rank=self._name, peer=expert)
            self._send(self._generations.returned(expert))
        if membership.placement == self._used:
            return
        self._used, self.slots = membership.placement, ExpertPlacement(membership.placement)
        if self.uses_stand_in:
            self.repairs["stand_in"] += 1
            absent = ", ".join(membership.absent)
            event(log, "stand_in_activated", logging.WARNING, rank=self._name, absent=absent)

    def _send(self, messages: Iterable[PlacementMessage]) -> None:
        aborted = -1
        for message in messages:
            if message.kind is PacketKind.ABORTED and message.generation != aborted:
                aborted = message.generation
                event(
                    log,
                    "placement_rejected",
                    logging.WARNING,
                    rank=self._name,
                    generation=aborted,
                    reason=message.reason,
                )
            requested = None
            if message.kind is PacketKind.ACQUIRE:
                requested = self._membership.requested(message.generation)
            self._sender.send(message, requested)
