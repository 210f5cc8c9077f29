"""Generations of placement on an attention rank: a small machine without I/O or a clock.

It goes over to a generation once all expert ranks have said PLACED with the same placement, and
never back. A layer of a micro-batch is computed with one generation, the next layer may be with the
next one: what is under way ends on what it began with. Once nothing of the old ones is, RETIRED is
said. The other half, and why attempts are counted: actors/experts/generations.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from actors.channels.base import Kind
from actors.experts.generations import LAUNCH_ATTEMPT, Tell
from contracts.placement import Placement

_REMEMBERED: Final = 64  # refused ones: what arrives late for them is known to be late


class _Candidate:
    """since_s: when the first word of it came, in this attempt."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.attempt = LAUNCH_ATTEMPT
        self.refused = False
        self.placement: Placement | None = None
        self.placed: set[str] = set()
        self.excused: set[str] = set()  # have been lost since


class AttentionGenerations:
    """current: what the next layer of any micro-batch is computed with. Every method but `began`
    returns the packets to send, in order; those of kind RETIRED once in each class."""

    def __init__(self, experts: Sequence[str], current: Placement, deadline_s: float) -> None:
        """experts: names of all expert ranks. deadline_s: from the first word of a generation until
        all must have said PLACED."""
        self.current = current
        self._experts, self._deadline_s = tuple(experts), deadline_s
        self._candidates: dict[int, _Candidate] = {}
        self._live: Counter[int] = Counter()
        self._owes_retired = False
        self._lost: set[str] = set()

    @property
    def generation(self) -> int:
        return self.current.generation

    @property
    def lost_ones(self) -> frozenset[str]:
        """Expert ranks, until others with their experts are in their places."""
        return frozenset(self._lost)

    def holders(self, generation: int) -> frozenset[str]:
        """Who has said PLACED of one that is to come, in the present attempt."""
        candidate = self._candidates.get(generation)
        return frozenset() if candidate is None else frozenset(candidate.placed)

    # --- from expert ranks

    def placed(self, expert: str, placement: Placement, attempt: int, now_s: float) -> list[Tell]:
        generation = placement.generation
        if generation <= self.generation:
            return []
        candidate = self._candidate(generation, now_s)
        if attempt != candidate.attempt:
            return []  # it crossed our refusal
        if candidate.refused:  # somebody uses it: from the start
            candidate.refused, candidate.since_s = False, now_s
        if candidate.placement not in (None, placement):
            return self._refuse(generation, f"{expert} has another placement than the rest")
        if self._lost and not candidate.attempt:
            return self._refuse(generation, f"{min(self._lost)} is lost")
        candidate.placement = placement
        candidate.placed.add(expert)
        if candidate.placed | candidate.excused < set(self._experts):
            return []
        return self.adopt(placement)

    def adopt(self, placement: Placement) -> list[Tell]:
        """It is used from now on: by all others too, or they are about to."""
        self.current, self._owes_retired = placement, True
        self._candidates = {g: c for g, c in self._candidates.items() if g > placement.generation}
        return self._settle()

    def withdrawn(self, generation: int, reason: str, now_s: float) -> list[Tell]:
        """reason: of the expert rank, by name."""
        if generation <= self.generation:
            return []
        if self._candidate(generation, now_s).refused:
            return []
        return self._refuse(generation, reason)

    def lost(self, expert: str) -> list[Tell]:
        """It says PLACED to nobody any more. What somebody uses all the same is gone over to
        without its word."""
        self._lost.add(expert)
        for candidate in self._candidates.values():
            candidate.excused.add(expert)
        return [
            tell
            for generation, candidate in list(self._candidates.items())
            if not candidate.refused
            for tell in self._refuse(generation, f"{expert} is lost")
        ]

    def returned(self, expert: str) -> list[Tell]:
        """It is there, or another in its place, with the experts of the present generation: it is
        told that nothing before that is used."""
        self._lost.discard(expert)
        return [Tell(expert, Kind.RETIRED, self.generation)] if self.generation else []

    def look(self, now_s: float) -> list[Tell]:
        """What is due by now."""
        return [
            tell
            for generation, candidate in list(self._candidates.items())
            if not candidate.refused and now_s >= candidate.since_s + self._deadline_s
            for tell in self._refuse(generation, self._late(candidate))
        ]

    def refuse(self, generation: int, reason: str, now_s: float) -> list[Tell]:
        """It is not to be had: as if that were said of all."""
        return self.withdrawn(generation, reason, now_s)

    # --- from the rank's own batches

    def began(self) -> int:
        """A layer of a micro-batch is computed: with this generation, until it `ended`."""
        self._live[self.generation] += 1
        return self.generation

    def ended(self, generation: int) -> list[Tell]:
        self._live[generation] -= 1
        return self._settle()

    # --- what follows

    def _settle(self) -> list[Tell]:
        """RETIRED, once nothing older is under way."""
        self._live = +self._live
        if not self._owes_retired or any(older < self.generation for older in self._live):
            return []
        self._owes_retired = False
        return [Tell(expert, Kind.RETIRED, self.generation) for expert in self._experts]

    def _candidate(self, generation: int, now_s: float) -> _Candidate:
        if generation not in self._candidates:
            refused = sorted(g for g, each in self._candidates.items() if each.refused)
            for oldest in refused[: len(refused) - _REMEMBERED + 1]:
                del self._candidates[oldest]
            self._candidates[generation] = _Candidate(now_s)
            self._candidates[generation].excused |= self._lost
        return self._candidates[generation]

    def _refuse(self, generation: int, reason: str) -> list[Tell]:
        candidate = self._candidates[generation]
        candidate.refused, candidate.placement = True, None
        candidate.placed.clear()
        candidate.attempt += 1
        return [
            Tell(expert, Kind.REFUSED, generation, candidate.attempt, reason)
            for expert in self._experts
        ]

    def _late(self, candidate: _Candidate) -> str:
        missing = [expert for expert in self._experts if expert not in candidate.placed]
        return (
            f"no word of {', '.join(missing)} within {self._deadline_s:g} s (placement.deadline_s)"
        )
