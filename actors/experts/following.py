"""An attention rank follows the experts: from one generation to the next as they move, be it to
more ranks or to fewer, and to those that stand in when an expert rank is lost.

Owned by the plane's thread. The rules are those of `AttentionGenerations` and `Attendance`; here
are the packets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from actors.channels.base import Endpoint, Kind, Packet, PeerLost
from actors.experts.attendance import Absence, Attendance
from actors.experts.generation_packets import Speaker, attempt_of, placement_of, reason_of
from actors.experts.generations import Tell
from actors.experts.switching import AttentionGenerations
from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.logs import event
from contracts.placement import Placement
from planner.placement.slots import ExpertPlacement
from planner.placement.stand_in import is_stand_in

log = logging.getLogger("tandem.experts")


class Following:
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
        self._attendance = Attendance(placement)
        self._speaker = Speaker(endpoint, clock)
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
        return self._attendance.changes

    @property
    def absent(self) -> dict[str, Absence]:
        """Ranks without the experts of the present generation. A copy, from any thread."""
        return dict(self._attendance.absent)

    @property
    def stands_in(self) -> bool:
        """Whether others do the work of those. From any thread."""
        return is_stand_in(self._used.generation)

    @property
    def waits(self) -> bool:
        """Whether what needs the experts of those can only wait. From any thread."""
        return bool(self._attendance.absent) and not self.stands_in

    def can(self, expert: str) -> bool:
        """Whether it can be sent what `slots` says."""
        return self._attendance.can(expert, self._used.generation)

    def began(self) -> int:
        return self._generations.began()

    def ended(self, generation: int) -> None:
        self._say(self._generations.ended(generation))

    def heard(self, packet: Packet) -> None:
        """PLACED, WITHDRAWN, HELD or LEAVING; anything else is none of its business."""
        kind = packet.header.kind
        if kind is Kind.PLACED:
            self._placed(packet)
        elif kind is Kind.WITHDRAWN:
            self._withdrawn(packet)
        elif kind is Kind.HELD:
            self._held(packet)
        elif kind is Kind.LEAVING:
            self._attend(self._attendance.leaving(packet.peer, self._clock()))

    def joined(self, expert: str) -> None:
        """It says by itself what it has."""
        self._generations.joined(expert)
        self._attendance.joined(expert)

    def lost(self, lost: PeerLost) -> None:
        """Of an expert rank. What is to come is let go of by the others. One that nothing is asked
        of any more may go."""
        now_s, is_used = self._clock(), lost.peer in self._attendance.experts
        name, level = ("peer_lost", logging.ERROR) if is_used else ("peer_left", logging.INFO)
        event(log, name, level, rank=self._name, reason=lost.error.message)
        self._say(self._generations.lost(lost.peer))
        self._attend(self._attendance.lost(lost.peer, lost.error.message, lost.epoch, now_s))

    def look(self) -> None:
        """What is due by now."""
        now_s = self._clock()
        self._say(self._generations.look(now_s))
        if self._attendance.absent:
            self._attend(self._attendance.look(now_s))
        self._speaker.go_on()

    @property
    def leaves(self) -> bool:
        """Whether somebody stands in who need not any more."""
        return self._attendance.is_over

    def leave(self, in_use: Collection[int]) -> None:
        """in_use: generations of what is under way."""
        self._say(self._attendance.leave(in_use))

    def _placed(self, packet: Packet) -> None:
        generation, now_s = packet.header.generation, self._clock()
        if generation <= self.generation:
            return
        try:
            placement = self._placement_of(packet)
        except ValueError as error:
            self._say(self._generations.refuse(generation, str(error), now_s))
            return
        holders = self._generations.holders(generation) | {packet.peer}
        attempt, within_s = packet.header.batch, float(packet.header.token_group)
        self._say(
            self._generations.placed(packet.peer, placement, attempt, now_s, within_s=within_s)
        )
        if self.generation == generation:
            self._go_over(placement, holders)

    def _withdrawn(self, packet: Packet) -> None:
        generation, now_s = packet.header.generation, self._clock()
        reason = f"{packet.peer}: {reason_of(packet)}"
        if generation > self.generation and not is_stand_in(generation):
            self._say(self._generations.withdrawn(generation, reason, now_s))
            return
        event(
            log,
            "experts_refused",
            logging.WARNING,
            rank=self._name,
            generation=generation,
            reason=f"{reason}: requests wait for another rank in the lost one's place",
        )
        self._attend(self._attendance.withdrawn(packet.peer, generation, reason, now_s))

    def _held(self, packet: Packet) -> None:
        """Of one that has just been joined, maybe a generation that all others use by now."""
        generation = packet.header.generation
        try:
            placement = self._placement_of(packet)
            attempt = attempt_of(packet) if is_stand_in(generation) else packet.header.batch
        except ValueError as error:
            event(log, "placement_refused", logging.WARNING, rank=self._name, reason=error)
            return
        if generation > self.generation and not is_stand_in(generation):
            self._say(self._generations.adopt(placement))
            self._go_over(placement, ())
        self._attend(self._attendance.held(packet.peer, generation, self._clock(), attempt))

    def _placement_of(self, packet: Packet) -> Placement:
        """Raises ValueError."""
        placement = placement_of(packet)
        try:
            self._check(placement)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return placement

    def _go_over(self, placement: Placement, holders: Collection[str]) -> None:
        self.switches += 1
        generation, ranks = placement.generation, placement.ranks
        event(log, "placement_used", rank=self._name, generation=generation, ranks=ranks)
        self._attend(self._attendance.went_over(placement, holders, self._clock()))

    def _attend(self, tells: Iterable[Tell]) -> None:
        """Says it, and goes over to what is used now."""
        self._say(tells)
        attendance = self._attendance
        present = frozenset(attendance.experts) - attendance.absent.keys()
        came, self._present = present - self._present, present
        for expert in came:
            if expert in self._generations.lost_ones:
                self.repairs["return"] += 1
                event(log, "expert_rank_back", logging.WARNING, rank=self._name, peer=expert)
            self._say(self._generations.returned(expert))
        if attendance.placement == self._used:
            return
        self._used, self.slots = attendance.placement, ExpertPlacement(attendance.placement)
        if self.stands_in:
            self.repairs["stand_in"] += 1
            absent = ", ".join(attendance.absent)
            event(log, "experts_stand_in", logging.WARNING, rank=self._name, absent=absent)

    def _say(self, tells: Iterable[Tell]) -> None:
        refused = -1
        for tell in tells:
            if tell.kind is Kind.REFUSED and tell.generation != refused:
                refused = tell.generation
                event(
                    log,
                    "placement_refused",
                    logging.WARNING,
                    rank=self._name,
                    generation=refused,
                    reason=tell.reason,
                )
            wanted = None
            if tell.kind is Kind.WANTED:
                wanted = self._attendance.wanted(tell.generation)
            self._speaker.say(tell, wanted)
