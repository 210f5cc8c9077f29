"""Generations that attention ranks need of an expert rank without a planner's proposal: what stands
in for a lost rank, or what is used where this rank has taken the place of a lost one. A small
machine without I/O, threads or a clock.

    WANTED ──> Load, one at a time ──> HELD to all that want it
    LEFT in each class, RETIRED of a later one, or lost, by all that wanted it ──> Free

A LEFT of one class may overtake the WANTED before it, or be overtaken by the next one: what is to
come is counted. Stand-ins are LEFT, a planner's are RETIRED. HELD says the attempt of the WANTED
that it answers: whoever has left and wants it again waits for the answer to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from actors.channels.base import PacketKind
from actors.rebalance.expert_generations import Action, FreeExperts, LoadExperts, PlacementMessage
from contracts.placement import Placement
from contracts.requests import Priority
from planner.placement.failover import is_failover

MOST: Final = 64  # that one attention rank wants at a time, or has left before it wanted it


class PlacementLeases:
    """Methods return what is to be done, in order. They raise ValueError for a rank that wants or
    leaves more than any does: its link is to be cut."""

    def __init__(self) -> None:
        self.loading: int | None = None
        self._placements: dict[int, Placement] = {}
        self._by: dict[int, dict[str, int]] = {}  # who wants it, in which attempt
        self._owed: dict[str, dict[int, Counter[Priority]]] = {}  # LEFT that are to come, by name
        self._committed: dict[str, dict[Priority, int]] = {}  # the newest of each name
        self._waiting: list[int] = []  # to be loaded

    def needs(self, generation: int) -> bool:
        """Whether an attention rank does."""
        return generation in self._by

    def placement(self, generation: int) -> Placement:
        return self._placements[generation]

    def newest(self, above: int) -> Placement | None:
        """The newest one of a planner's that is there or to come, above that."""
        found = [one for one in self._by if not is_failover(one) and one > above]
        return self._placements[max(found)] if found else None

    def acquire(
        self, name: str, placement: Placement, attempt: int, *, resident: bool, misfit: str
    ) -> list[Action]:
        """attempt: which WANTED of that rank it is. there: its experts are. misfit: why they cannot
        be; empty: they can."""
        generation = placement.generation
        if is_failover(generation):
            self._of(name, generation).update(Priority)
        else:
            self._check_count(name, [one for one, by in self._by.items() if name in by], generation)
        if self._placements.get(generation, placement) != placement:
            misfit = f"another placement is wanted as generation {generation}"
        if misfit:
            return [PlacementMessage(name, PacketKind.ABORT_VOTE, generation, reason=misfit)]
        self._placements[generation] = placement
        self._by.setdefault(generation, {})[name] = attempt
        if resident:
            return [PlacementMessage(name, PacketKind.READY, generation, attempt)]
        if generation != self.loading and generation not in self._waiting:
            self._waiting.append(generation)
        return self._next()

    def loaded(self, generation: int) -> list[Action]:
        self.loading = None
        by = sorted(self._by.get(generation, {}).items())
        return [
            *(
                PlacementMessage(name, PacketKind.READY, generation, attempt)
                for name, attempt in by
            ),
            *self._next(),
        ]

    def failed(self, generation: int, reason: str) -> list[Action]:
        self.loading = None
        names = sorted(self._by.pop(generation, ()))
        self._placements.pop(generation, None)
        messages = [
            PlacementMessage(name, PacketKind.ABORT_VOTE, generation, reason=reason)
            for name in names
        ]
        return [*messages, *self._next()]

    def release(self, name: str, generation: int, priority: Priority) -> list[Action]:
        if not is_failover(generation):
            return []
        owed = self._of(name, generation)
        owed[priority] -= 1
        if any(owed.values()):
            return []
        del self._owed[name][generation]
        return self._without(name, [generation])

    def committed(self, name: str, generation: int, priority: Priority) -> list[Action]:
        """It uses none of a planner's before that."""
        newest = self._committed.setdefault(name, dict.fromkeys(Priority, 0))
        newest[priority] = max(newest[priority], generation)
        used_from = min(newest.values())
        before = [one for one in self._by if one < used_from and not is_failover(one)]
        return self._without(name, before)

    def lost(self, name: str) -> list[Action]:
        self._owed.pop(name, None)
        self._committed.pop(name, None)
        return self._without(name, list(self._by))

    def _of(self, name: str, generation: int) -> Counter[Priority]:
        owed = self._owed.setdefault(name, {})
        self._check_count(name, owed, generation)
        return owed.setdefault(generation, Counter())

    @staticmethod
    def _check_count(name: str, known: Collection[int], generation: int) -> None:
        if generation not in known and len(known) >= MOST:
            raise ValueError(
                f"{name} wants {len(known) + 1} generations at a time, or leaves them before it "
                f"wants them: {MOST} at most"
            )

    def _without(self, name: str, generations: Iterable[int]) -> list[Action]:
        actions: list[Action] = []
        for generation in generations:
            if name not in self._by.get(generation, ()):
                continue
            del self._by[generation][name]
            if not self._by[generation]:
                del self._by[generation], self._placements[generation]
                if generation in self._waiting:
                    self._waiting.remove(generation)
                    continue
                actions.append(FreeExperts(generation))
                if generation == self.loading:
                    self.loading = None
        return [*actions, *self._next()]

    def _next(self) -> list[Action]:
        if self.loading is not None or not self._waiting:
            return []
        self.loading = self._waiting.pop(0)
        return [LoadExperts(self._placements[self.loading])]
