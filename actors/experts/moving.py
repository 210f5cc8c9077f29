"""An expert rank's experts move: proposals of the planner, or what the launcher wants of more ranks
or fewer, become generations that are there.

    planner's link ──propose──> │ loop: ExpertGenerations ──Load──> thread: Bringing ──┐
    launcher ───────resize───> │                                                       │
    attention ranks ──packets──> │      PLACED, WITHDRAWN            peer, checkpoint    │
                                 │ <─────────────────── what it brought ────────────────┤
                    ──WANTED───> │ loop: Wanted ─────────────Load──> thread, at once ────┘
                                 │      HELD, WITHDRAWN              checkpoint

Owned by the server's thread, but for `propose` and `resize`. The rules are those of
`ExpertGenerations`, and of `Wanted` for what attention ranks need because a rank was lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from actors.channels.base import Endpoint, Kind, Packet
from actors.experts.brought import Bringer, Brought, Store
from actors.experts.generation_packets import Speaker, attempt_of, placement_of, reason_of
from actors.experts.generations import Action, ExpertGenerations, Free, Load, Tell
from actors.experts.move_outcomes import MoveOutcomes
from actors.experts.wanted import Wanted
from contracts.clock import Clock
from contracts.logs import event
from contracts.placement import PlacedExperts, Placement, WantedPlacement
from contracts.planning import PlacementOutcome
from planner.placement.stand_in import is_stand_in

log = logging.getLogger("tandem.experts")

P = TypeVar("P")


class _Proposed(NamedTuple):
    """present: of one that resizes, what is used now."""

    placement: Placement
    present: Placement | None = None
    within_s: float = 0.0


class Moving(Generic[P]):
    """A `Generations` of an expert server. placement: the newest that all attention ranks use.
    stood_in: how often it has stood in for others, so far."""

    def __init__(
        self,
        endpoint: Endpoint,
        placement: Placement,
        store: Store[P],
        bringer: Bringer[P],
        at_once: Bringer[P],
        *,
        deadline_s: float,
        clock: Clock,
        report: Callable[[PlacementOutcome], None] = lambda outcome: None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        """bringer: of what is proposed. at_once: of what is wanted; requests wait for it. settled:
        called when `placement` is another."""
        self.placement = placement
        self._endpoint, self._store = endpoint, store
        self._bringer, self._at_once = bringer, at_once
        self._wanted = Wanted()
        self._came_at_once: deque[Brought[P]] = deque()
        self.stood_in = 0
        self._machine = ExpertGenerations(placement.generation, deadline_s)
        self._speaker = Speaker(endpoint, clock)
        self._clock, self._settled = clock, settled
        self.outcomes = MoveOutcomes(endpoint.name, report)
        self._proposed: deque[_Proposed] = deque()
        self._brought: deque[Brought[P]] = deque()
        self._coming: Placement | None = None
        self._last: Brought[P] | None = None
        self._freed: list[int] = []
        self._is_leaving, self._let_go_by = False, set[str]()

    @property
    def experts(self) -> int:
        """Distinct ones that are there, of all layers. From any thread."""
        return self._store.count

    @property
    def newest(self) -> int:
        """The largest generation that it was ever told of. From any thread."""
        return self._machine.newest

    @property
    def under_way(self) -> int | None:
        """The generation that is to come. From any thread."""
        return self._machine.under_way

    def propose(self, placement: Placement) -> None:
        """From any thread."""
        self._propose(_Proposed(placement))

    def resize(self, wanted: WantedPlacement) -> None:
        """From any thread."""
        self._propose(_Proposed(wanted.placement, wanted.present, wanted.within_s))

    def placed(self) -> PlacedExperts:
        """From any thread."""
        node, free_bytes = self._bringer.room()
        return PlacedExperts(
            placement=self.placement,
            newest=self.newest,
            under_way=self.under_way,
            failures=self.outcomes.failures,
            expert_bytes=self._bringer.expert_bytes,
            free_bytes=free_bytes,
            node=node,
        )

    def _propose(self, proposed: _Proposed) -> None:
        self._proposed.append(proposed)
        self._endpoint.wake()

    def heard(self, packet: Packet) -> None:
        header = packet.header
        if header.kind is Kind.RETIRED:
            generation, priority = header.generation, header.priority
            self._do_wanted(self._wanted.retired(packet.peer, generation, priority))
            self._do(self._machine.retired(packet.peer, generation, priority))
        elif header.kind is Kind.REFUSED:
            reason = reason_of(packet)
            self._do(self._machine.refused(packet.peer, header.generation, header.batch, reason))
        elif header.kind is Kind.WANTED:
            self._want(packet)
        elif header.kind is Kind.LEFT:
            self._left(packet)
        elif header.kind is Kind.LEAVING:
            self._let_go_by.add(packet.peer)

    def say_leaving(self) -> None:
        """To all attention ranks, those too that come yet: they ask others."""
        self._is_leaving = True
        for peer in self._endpoint.peers():
            self._speaker.say(Tell(peer, Kind.LEAVING, self.placement.generation))

    @property
    def may_go(self) -> bool:
        """Whether nobody asks it any more."""
        return self._let_go_by.issuperset(self._endpoint.peers())

    def joined(self, peer: str) -> None:
        self._speaker.say(Tell(peer, Kind.HELD, self.placement.generation), self.placement)
        if self._is_leaving:
            self._let_go_by.discard(peer)
            self._speaker.say(Tell(peer, Kind.LEAVING, self.placement.generation))
        self._do(self._machine.joined(peer))

    def lost(self, peer: str) -> None:
        self._do_wanted(self._wanted.lost(peer))
        self._do(self._machine.lost(peer))

    def look(self) -> Iterable[int]:
        while self._proposed:
            placement, present, within_s = self._proposed.popleft()
            if present is not None and self._machine.under_way is None:
                self._bringer.settled(present)
            misfit = self._bringer.misfit(placement, resizes=present is not None)
            self._do(self._machine.proposed(placement, self._clock(), misfit, within_s))
        while self._brought:
            self._take(self._brought.popleft())
        while self._came_at_once:
            self._take_at_once(self._came_at_once.popleft())
        self._adopt()
        self._do(self._machine.look(self._clock()))
        self._speaker.go_on()
        freed, self._freed = self._freed, []
        return freed

    def close(self) -> None:
        self._bringer.close()
        self._at_once.close()

    # --- what is wanted

    def _want(self, packet: Packet) -> None:
        peer = packet.peer
        try:
            placement, attempt = placement_of(packet), attempt_of(packet)
            there = self._store.holds(placement.generation)
            misfit = "" if there else self._at_once.misfit(placement)
            wanted = self._wanted.wanted(peer, placement, attempt, there=there, misfit=misfit)
        except ValueError as error:
            self._endpoint.drop(peer, str(error))
            return
        self._do_wanted(wanted)

    def _left(self, packet: Packet) -> None:
        header = packet.header
        try:
            left = self._wanted.left(packet.peer, header.generation, header.priority)
        except ValueError as error:
            self._endpoint.drop(packet.peer, str(error))
            return
        self._do_wanted(left)

    def _take_at_once(self, brought: Brought[P]) -> None:
        generation = brought.generation
        if generation != self._wanted.loading:
            return  # nobody wants it any more
        self.outcomes.brought(brought)
        event(
            log,
            "experts_taken_over" if brought.experts is not None else "experts_not_taken_over",
            logging.WARNING,
            rank=self._endpoint.name,
            generation=generation,
            reason=brought.reason,
            loaded_bytes=brought.loaded_bytes,
            seconds=round(brought.seconds, 3),
        )
        if brought.experts is None:
            self._do_wanted(self._wanted.failed(generation, brought.reason))
            return
        self._store.place(generation, brought.experts)
        self.stood_in += is_stand_in(generation)
        self._do_wanted(self._wanted.loaded(generation))

    def _do_wanted(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                is_there = action.kind is Kind.HELD
                placed = self._wanted.placement(action.generation) if is_there else None
                self._speaker.say(action, placed)
            elif isinstance(action, Load):
                self._at_once.begin(action.placement, self._comes_at_once)
            elif isinstance(action, Free):
                self._leave(action.generation)
        self._adopt()

    def _comes_at_once(self, brought: Brought[P]) -> None:
        self._came_at_once.append(brought)
        self._endpoint.wake()

    def _leave(self, generation: int) -> None:
        """Nobody wants it any more. What has been proposed, or is in use, stays."""
        if not self._store.holds(generation):
            self._at_once.stop()
            return
        self._do(self._machine.let_go(generation))
        if generation not in (self._machine.current, self._machine.under_way):
            self._let_go(generation)

    def _adopt(self) -> None:
        """What attention ranks use here is the present generation, once they say so of all before
        it."""
        newest = self._wanted.newest(self._machine.current)
        if newest is None or not self._store.holds(newest.generation):
            return
        if self._machine.under_way is None:
            self._coming = newest
            self._do(self._machine.adopt(newest))

    def _let_go(self, generation: int) -> None:
        if self._store.holds(generation):
            self._store.free(generation)
            self._freed.append(generation)

    # --- what is proposed

    def _take(self, brought: Brought[P]) -> None:
        if brought.generation != self._machine.under_way:
            return  # it was given up meanwhile
        self._last = brought._replace(experts=None)  # the store has them
        self.outcomes.brought(brought)
        if brought.experts is None:
            self._do(self._machine.failed(brought.generation, brought.reason))
            return
        self._store.place(brought.generation, brought.experts)
        self._do(self._machine.loaded(brought.generation))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                placed = self._coming if action.kind is Kind.PLACED else None
                self._speaker.say(action, placed)
            elif isinstance(action, Load):
                self._load(action.placement)
            elif isinstance(action, Free):
                self._free(action.generation)
            else:
                self.outcomes.ended(action, self._last)

    def _load(self, placement: Placement) -> None:
        self._coming, self._last = placement, None
        event(log, "experts_move", rank=self._endpoint.name, generation=placement.generation)
        self._bringer.begin(placement, self._came)

    def _came(self, brought: Brought[P]) -> None:
        self._brought.append(brought)
        self._endpoint.wake()

    def _free(self, generation: int) -> None:
        if not self._wanted.needs(generation):
            self._let_go(generation)
        if generation != self.placement.generation:  # the next one comes to nothing
            self._bringer.stop()
            self._coming = None
        elif self._coming is not None:
            self.placement, self._coming = self._coming, None
            self._bringer.settled(self.placement)
            self._settled()
