"""An attention rank's view of the experts: follows placement generations and lost expert ranks.

Owned by the backend's thread. `AttentionGenerations` and `ExpertMembership` hold the rules;
`PlacementClient` sends and receives the packets.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from actors.channels.base import Packet, PacketKind, PeerLost
from actors.channels.endpoint import Endpoint
from actors.moe.backend import MissingRank, Topology, TopologySource
from actors.rebalance.placement_generations import (
    LAUNCH_ATTEMPT,
    AttentionGenerations,
    PlacementMessage,
)
from actors.rebalance.placement_messages import PlacementSender, attempt_of, placement_of, reason_of
from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.logs import event
from contracts.placement import Placement
from contracts.ranks import Group, rank_names
from planner.placement.resize import failover_placement, is_failover
from planner.placement.slots import ExpertPlacement

log = logging.getLogger("tandem.experts")

_SETTLED_S: Final = 0.5  # a rank not linked by then is lost


class ExpertMembership:
    """Expert ranks that can be used, and the failover placement after losses; without I/O.

        all ready            expert-1 is lost             new expert-1 is ready
        base ──────────────> base, requests wait ──────────────────────────> base
                                │  ACQUIRE failover ──> READY from all others
                                └────────────────────> failover ──────────> base, RELEASE failover

    Ranks outside the current generation are neither ready nor absent. A rank that sends DRAINING is
    replaced like a lost one, but stays in use until then; DRAINING is then returned to it.

    A rank can serve a generation after READY: sent when it joins, or as the answer to an ACQUIRE,
    whose attempt it carries. Acquiring a released failover placement again is a new attempt; a late
    answer to the previous attempt is ignored.

    Every attention rank decides on its own. The failover placement is a pure function of the
    generation and the lost ranks (planner/placement/resize.py), so that ranks which see the same
    loss acquire the same placement.

    base: the current generation. placement: it, or its failover placement, for new layers.
    changes: number of state changes. Methods return packets to send.
    """

    def __init__(self, base: Placement) -> None:
        self.base = self.placement = base
        self.changes = 0
        self.absent: dict[str, MissingRank] = {}
        self._ready: dict[str, set[int]] = {}  # generations, by linked rank
        self._requests: dict[str, dict[int, int]] = {}  # attempt by rank and generation
        self._attempts = LAUNCH_ATTEMPT
        self._draining: dict[str, bool] = {}  # True once DRAINING was returned
        self._unwilling: set[int] = set()
        self._target: Placement | None = None  # failover placement to acquire

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the ranks of the current generation."""
        return rank_names(Group.EXPERT, self.base.ranks)

    def can_serve(self, expert: str, generation: int) -> bool:
        """Return True if the rank is ready for that generation."""
        return generation in self._ready.get(expert, ())

    # --- from expert ranks

    def add_peer(self, expert: str) -> None:
        self._ready[expert], self._requests[expert] = set(), {}
        self._draining.pop(expert, None)

    def mark_ready(
        self, expert: str, generation: int, now_s: float, attempt: int = LAUNCH_ATTEMPT
    ) -> list[PlacementMessage]:
        """Handle READY. attempt: of its ACQUIRE; LAUNCH_ATTEMPT: unsolicited."""
        if expert not in self._ready:
            return []
        if attempt == LAUNCH_ATTEMPT and not is_failover(generation):
            known = {self.base.generation, *self._requests[expert]}
            self._ready[expert] = self._ready[expert] & known | {generation}
        elif attempt == self._requests[expert].get(generation):
            self._ready[expert].add(generation)
        else:
            return []
        return self.settle(now_s)

    def add_abort_vote(self, expert: str, generation: int, now_s: float) -> list[PlacementMessage]:
        """Handle a refused ACQUIRE."""
        requests = self._requests.get(expert, {})
        if generation not in requests:
            return []
        if not is_failover(generation):
            del requests[generation]
            return []
        self._unwilling.add(generation)
        return self.settle(now_s)

    def remove_peer(
        self, expert: str, reason: str, epoch: int, now_s: float
    ) -> list[PlacementMessage]:
        self._ready.pop(expert, None)
        self._requests.pop(expert, None)
        self._draining.pop(expert, None)
        before = self.absent.get(expert)
        since_s = before.since_s if before is not None and before.is_lost else now_s
        self.absent[expert] = MissingRank(reason, epoch, since_s, True)
        return self.settle(now_s)

    def start_draining(self, expert: str, now_s: float) -> list[PlacementMessage]:
        """Handle DRAINING: use the rank until others have its experts."""
        if expert not in self._ready or expert in self._draining:
            return []
        self._draining[expert] = False
        if expert in self.experts:
            self.absent[expert] = MissingRank(f"{expert} leaves", 0, now_s, True)
        return self.settle(now_s)

    # --- from the rank itself

    def switch_to(
        self, base: Placement, holders: Collection[str], now_s: float
    ) -> list[PlacementMessage]:
        """Switch to another generation, which `holders` have."""
        self.base = base
        for expert in self._ready.keys() & set(holders):
            self._ready[expert].add(base.generation)
        if not is_failover(self.placement.generation):
            self.placement = base  # no earlier generation may be used
        return self.settle(now_s)

    def poll(self, now_s: float) -> list[PlacementMessage]:
        """Declare ranks lost that did not link in time."""
        late = [
            (expert, missing_rank)
            for expert, missing_rank in self.absent.items()
            if not missing_rank.is_lost
            and expert not in self._ready
            and now_s - missing_rank.since_s >= _SETTLED_S
        ]
        for expert, missing_rank in late:
            self.absent[expert] = missing_rank._replace(is_lost=True)
        return self.settle(now_s) if late else []

    def settle(self, now_s: float) -> list[PlacementMessage]:
        """Update the missing ranks, the failover placement and what is in use."""
        self.changes += 1
        base, experts = self.base.generation, self.experts
        for expert in self.absent.keys() - set(experts):
            del self.absent[expert]
        for expert in experts:
            if self.can_serve(expert, base) and expert not in self._draining:
                self.absent.pop(expert, None)
            elif expert not in self.absent:
                reason = f"{expert} has not reported its experts"
                self.absent[expert] = MissingRank(reason, 0, now_s, False)
        self._target = self._stand_in()
        present = [expert for expert in experts if expert not in self.absent]
        late = [expert for expert in self.absent if self._ready.get(expert)]
        messages = [message for expert in late for message in self._acquire(expert, self.base)]
        if not self.absent:
            self._unwilling.clear()
            self.placement = self.base
        elif self._target is not None:
            target, generation = self._target, self._target.generation
            messages += [message for expert in present for message in self._acquire(expert, target)]
            if all(self.can_serve(expert, generation) for expert in present):
                self.placement = target
        return messages

    def release_unused(self, in_use: Collection[int]) -> list[PlacementMessage]:
        """Release failover placements that are neither needed nor in_use."""
        messages = []
        for expert, requests in self._requests.items():
            for generation in [one for one in requests if self._is_unused(one)]:
                if generation not in in_use:
                    del requests[generation]
                    self._ready[expert].discard(generation)
                    messages.append(PlacementMessage(expert, PacketKind.RELEASE, generation))
        if set(in_use) <= {self.placement.generation}:
            for expert in self._drained():
                self._draining[expert] = True
                messages.append(PlacementMessage(expert, PacketKind.DRAINING, self.base.generation))
        return messages

    def _drained(self) -> list[str]:
        """Return the draining ranks that will receive nothing more."""
        return [
            expert
            for expert, has_gone in self._draining.items()
            if not has_gone and (expert not in self.experts or self.placement == self._target)
        ]

    @property
    def has_unused(self) -> bool:
        """True if leases or draining ranks can be released."""
        return bool(self._drained()) or any(
            self._is_unused(one) for requests in self._requests.values() for one in requests
        )

    def _is_unused(self, generation: int) -> bool:
        kept = {self.placement.generation, self._target.generation if self._target else -1}
        return is_failover(generation) and generation not in kept

    def _acquire(self, expert: str, placement: Placement) -> list[PlacementMessage]:
        generation = placement.generation
        if generation in self._requests[expert] or self.can_serve(expert, generation):
            return []
        self._attempts += 1
        self._requests[expert][generation] = self._attempts
        kind, attempt = PacketKind.ACQUIRE, self._attempts
        return [PlacementMessage(expert, kind, generation, attempt, placement=placement)]

    def _stand_in(self) -> Placement | None:
        if not any(missing_rank.is_lost for missing_rank in self.absent.values()):
            return None
        lost = [rank for rank, expert in enumerate(self.experts) if expert in self.absent]
        found = failover_placement(self.base, lost)
        return None if found is None or found.generation in self._unwilling else found


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
            self._sender.send(message)
