"""An attention rank's view of the experts: follows placement generations and lost expert ranks.

Owned by the backend's thread. `AttentionGenerations` and `ExpertMembership` hold the rules; this
module sends and receives the packets.
"""

import logging
from collections.abc import Callable, Collection, Iterable

from actors.channels.base import Packet, PacketKind, PeerLost
from actors.channels.endpoint import Endpoint
from actors.moe.backend import MissingRank, Topology, TopologySource
from actors.rebalance.expert_generations import PlacementMessage
from actors.rebalance.expert_membership import ExpertMembership
from actors.rebalance.placement_messages import PlacementSender, attempt_of, placement_of, reason_of
from actors.rebalance.placement_transition import AttentionGenerations
from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.logs import event
from contracts.placement import Placement
from planner.placement.resize import is_failover
from planner.placement.slots import ExpertPlacement

log = logging.getLogger("tandem.experts")


class PlacementClient(TopologySource):
    """switches: of generation. repairs: failovers ("stand_in"), returns."""

    replaces = True

    def __init__(
        self,
        endpoint: Endpoint,
        placement: Placement,
        *,
        deadline_s: float,
        check: Callable[[Placement], None],
        clock: Clock,
    ) -> None:
        """check: raises ConfigError for a placement of another model."""
        self.slots, self._used = ExpertPlacement(placement), placement
        self.switches = 0
        self.repairs = {"stand_in": 0, "return": 0}
        self._generations = AttentionGenerations(placement, deadline_s)
        self._membership = ExpertMembership(placement)
        self._sender = PlacementSender(endpoint, clock)
        self._present = frozenset[str]()
        self._changes = -1  # of the membership, in `topology`
        super().__init__(Topology(placement.generation, self.slots, self.experts))
        self._name, self._check, self._clock = endpoint.name, check, clock

    @property
    def generation(self) -> int:
        return self._generations.generation

    @property
    def ranks(self) -> int:
        return self._generations.current.ranks

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of expert ranks by number, including unused ones; never shrinks."""
        return self._generations.experts

    @property
    def absent(self) -> dict[str, MissingRank]:
        """Ranks without the current generation's experts. A copy; thread-safe."""
        return dict(self._membership.absent)

    @property
    def uses_stand_in(self) -> bool:
        """True if a failover placement is in use. Thread-safe."""
        return is_failover(self._used.generation)

    @property
    def waits(self) -> bool:
        """True if requests wait for missing experts. Thread-safe."""
        return bool(self._membership.absent) and not self.uses_stand_in

    def _update_topology(self) -> None:
        membership, used = self._membership, self._used.generation
        has_unused = membership.has_unused
        if self._changes == membership.changes and has_unused == self.topology.has_unused:
            return
        self._changes = membership.changes
        names = enumerate(self.experts[: self._used.ranks])
        lost = frozenset(rank for rank, name in names if not membership.can_serve(name, used))
        missing = tuple(membership.absent.items())
        self.topology = Topology(used, self.slots, self.experts, lost, has_unused, missing)

    def begin_layer(self) -> int:
        return self._generations.begin_layer()

    def end_layer(self, generation: int) -> None:
        self._send(self._generations.end_layer(generation))

    def handle(self, packet: Packet) -> None:
        """Handle PREPARED, ABORT_VOTE, READY or DRAINING; ignore other packets."""
        kind = packet.header.kind
        if kind is PacketKind.PREPARED:
            self._on_prepared(packet)
        elif kind is PacketKind.ABORT_VOTE:
            self._on_abort_vote(packet)
        elif kind is PacketKind.READY:
            self._on_ready(packet)
        elif kind is PacketKind.DRAINING:
            self._apply(self._membership.start_draining(packet.peer, self._clock()))

    def add_peer(self, expert: str) -> None:
        self._generations.add_peer(expert)
        self._membership.add_peer(expert)

    def remove_peer(self, lost: PeerLost) -> None:
        """Handle the loss of an expert rank; one that is not in use may leave."""
        now_s, is_used = self._clock(), lost.peer in self._membership.experts
        name, level = (
            ("peer_lost", logging.ERROR) if is_used else ("peer_disconnected", logging.INFO)
        )
        event(log, name, level, rank=self._name, reason=lost.error.message)
        self._send(self._generations.remove_peer(lost.peer))
        self._apply(self._membership.remove_peer(lost.peer, lost.error.message, lost.epoch, now_s))

    def poll(self) -> None:
        now_s = self._clock()
        self._send(self._generations.poll(now_s))
        if self._membership.absent:
            self._apply(self._membership.poll(now_s))
        self._sender.flush()
        self._update_topology()

    def release_unused(self, in_use: Collection[int]) -> None:
        self._send(self._membership.release_unused(in_use))
        self._update_topology()

    def _on_prepared(self, packet: Packet) -> None:
        generation, now_s = packet.header.generation, self._clock()
        if generation <= self.generation:
            return
        try:
            placement = self._placement_of(packet)
        except ValueError as error:
            self._send(self._generations.add_abort_vote(generation, str(error), now_s))
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
        self._apply(self._membership.add_abort_vote(packet.peer, generation, now_s))

    def _on_ready(self, packet: Packet) -> None:
        """Handle READY; a rank that has just joined may have a generation that others use."""
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
        """Return the placement of a packet. Raises ValueError."""
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
        """Send the packets and switch to the placement in use."""
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
