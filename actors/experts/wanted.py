"""Generations that attention ranks need of an expert rank without a planner's proposal: what stands
in for a lost rank, or what is used where this rank has taken the place of a lost one. A small
machine without I/O, threads or a clock.

    WANTED ──> Load, one at a time ──> HELD to all that want it
    LEFT in each class, RETIRED of a later one, or lost, by all that wanted it ──> Free

A LEFT of one class may overtake the WANTED before it, or be overtaken by the next one: what is to
come is counted. Stand-ins are LEFT, a planner's are RETIRED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from actors.channels.base import Kind
from actors.experts.generations import Action, Free, Load, Tell
from contracts.placement import Placement
from contracts.requests import Priority
from planner.placement.stand_in import is_stand_in


class Wanted:
    """Methods return what is to be done, in order."""

    def __init__(self) -> None:
        self.loading: int | None = None
        self._placements: dict[int, Placement] = {}
        self._by: dict[int, set[str]] = {}
        self._owed: dict[str, dict[int, Counter[Priority]]] = {}  # LEFT that are to come, by name
        self._retired: dict[str, dict[Priority, int]] = {}  # the newest of each name
        self._waiting: list[int] = []  # to be loaded

    def needs(self, generation: int) -> bool:
        """Whether an attention rank does."""
        return generation in self._by

    def placement(self, generation: int) -> Placement:
        return self._placements[generation]

    def newest(self, above: int) -> Placement | None:
        """The newest one of a planner's that is there or to come, above that."""
        found = [one for one in self._by if not is_stand_in(one) and one > above]
        return self._placements[max(found)] if found else None

    def wanted(self, name: str, placement: Placement, *, there: bool, misfit: str) -> list[Action]:
        """there: its experts are. misfit: why they cannot be; empty: they can."""
        generation = placement.generation
        if is_stand_in(generation):
            self._of(name, generation).update(Priority)
        if self._placements.get(generation, placement) != placement:
            misfit = f"another placement is wanted as generation {generation}"
        if misfit:
            return [Tell(name, Kind.WITHDRAWN, generation, reason=misfit)]
        self._placements[generation] = placement
        self._by.setdefault(generation, set()).add(name)
        if there:
            return [Tell(name, Kind.HELD, generation)]
        if generation != self.loading and generation not in self._waiting:
            self._waiting.append(generation)
        return self._next()

    def loaded(self, generation: int) -> list[Action]:
        self.loading = None
        names = sorted(self._by.get(generation, ()))
        return [*(Tell(name, Kind.HELD, generation) for name in names), *self._next()]

    def failed(self, generation: int, reason: str) -> list[Action]:
        self.loading = None
        names = sorted(self._by.pop(generation, ()))
        self._placements.pop(generation, None)
        telling = [Tell(name, Kind.WITHDRAWN, generation, reason=reason) for name in names]
        return [*telling, *self._next()]

    def left(self, name: str, generation: int, priority: Priority) -> list[Action]:
        if not is_stand_in(generation):
            return []
        owed = self._of(name, generation)
        owed[priority] -= 1
        if any(owed.values()):
            return []
        del self._owed[name][generation]
        return self._without(name, [generation])

    def retired(self, name: str, generation: int, priority: Priority) -> list[Action]:
        """It uses none of a planner's before that."""
        newest = self._retired.setdefault(name, dict.fromkeys(Priority, 0))
        newest[priority] = max(newest[priority], generation)
        used_from = min(newest.values())
        before = [one for one in self._by if one < used_from and not is_stand_in(one)]
        return self._without(name, before)

    def lost(self, name: str) -> list[Action]:
        self._owed.pop(name, None)
        self._retired.pop(name, None)
        return self._without(name, list(self._by))

    def _of(self, name: str, generation: int) -> Counter[Priority]:
        return self._owed.setdefault(name, {}).setdefault(generation, Counter())

    def _without(self, name: str, generations: Iterable[int]) -> list[Action]:
        actions: list[Action] = []
        for generation in generations:
            if name not in self._by.get(generation, ()):
                continue
            self._by[generation].discard(name)
            if not self._by[generation]:
                del self._by[generation], self._placements[generation]
                if generation in self._waiting:
                    self._waiting.remove(generation)
                    continue
                actions.append(Free(generation))
                if generation == self.loading:
                    self.loading = None
        return [*actions, *self._next()]

    def _next(self) -> list[Action]:
        if self.loading is not None or not self._waiting:
            return []
        self.loading = self._waiting.pop(0)
        return [Load(self._placements[self.loading])]
