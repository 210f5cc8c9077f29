"""An attention rank follows the experts as they move: from one generation to the next.

Owned by the plane's thread. The rules are `AttentionGenerations`'s; here are the packets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from actors.channels.base import Endpoint, Kind, Packet
from actors.experts.generation_packets import Speaker, placement_of, reason_of
from actors.experts.generations import Tell
from actors.experts.switching import AttentionGenerations
from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.logs import event
from contracts.placement import Placement
from planner.placement.slots import ExpertPlacement

log = logging.getLogger("tandem.experts")


class Following:
    """slots: of the present generation. switches: how often that has changed."""

    def __init__(
        self,
        endpoint: Endpoint,
        experts: Sequence[str],
        placement: Placement,
        *,
        deadline_s: float,
        check: Callable[[Placement], None],
        clock: Clock,
    ) -> None:
        """experts: names of all expert ranks. check: raises ConfigError where a placement is of
        another model or group."""
        self.slots = ExpertPlacement(placement)
        self.switches = 0
        self._generations = AttentionGenerations(experts, placement, deadline_s)
        self._speaker = Speaker(endpoint, clock)
        self._name, self._check, self._clock = endpoint.name, check, clock

    @property
    def generation(self) -> int:
        return self._generations.generation

    def began(self) -> int:
        return self._generations.began()

    def ended(self, generation: int) -> None:
        self._say(self._generations.ended(generation))

    def heard(self, packet: Packet) -> None:
        """PLACED or WITHDRAWN; anything else is none of its business."""
        header, now_s = packet.header, self._clock()
        if header.kind is Kind.PLACED:
            self._placed(packet, now_s)
        elif header.kind is Kind.WITHDRAWN:
            reason = f"{packet.peer}: {reason_of(packet)}"
            self._say(self._generations.withdrawn(header.generation, reason, now_s))

    def lost(self, expert: str) -> None:
        """The rank serves no more, but may stay linked to the others: they let go of what is to
        come."""
        self._say(self._generations.lost(expert))

    def look(self) -> None:
        """What is due by now."""
        self._say(self._generations.look(self._clock()))
        self._speaker.go_on()

    def _placed(self, packet: Packet, now_s: float) -> None:
        generation = packet.header.generation
        if generation <= self.generation:
            return
        try:
            placement = placement_of(packet)
            self._check(placement)
        except (ValueError, ConfigError) as error:
            self._say(self._generations.refuse(generation, str(error), now_s))
            return
        telling = self._generations.placed(packet.peer, placement, packet.header.batch, now_s)
        if self.generation == generation:
            self.slots = ExpertPlacement(placement)
            self.switches += 1
            event(log, "placement_used", rank=self._name, generation=generation)
        self._say(telling)

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
            self._speaker.say(tell)
