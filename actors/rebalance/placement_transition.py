"""Generations of placement on an attention rank: a small machine without I/O or a clock.

It goes over to a generation once all expert ranks have said PLACED with the same placement, and
never back: those that the present one is on, and those of the next one, which may be more or fewer.
A layer of a micro-batch is computed with one generation, the next layer may be with the next one:
what is under way ends on what it began with. Once nothing of the old ones is, RETIRED is said.
The other half, and why attempts are counted: actors/rebalance/expert_generations.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from actors.channels.base import PacketKind
from actors.rebalance.expert_generations import LAUNCH_ATTEMPT, PlacementMessage
from contracts.placement import Placement
from contracts.ranks import Group, rank_names

_REMEMBERED: Final = 64  # refused ones: what arrives late for them is known to be late


class _Candidate:
    """since_s: when the first word of it came, in this attempt. within_s: so long it may take."""

    def __init__(self, since_s: float, within_s: float) -> None:
        self.since_s, self.within_s = since_s, within_s
        self.attempt = LAUNCH_ATTEMPT
        self.aborted, self.reason = False, ""
        self.placement: Placement | None = None
        self.prepared: set[str] = set()
        self.excused: set[str] = set()  # have been lost since
        self.notified: set[str] = set()  # that it is refused, on the links that there are


class AttentionGenerations:
    """current: what the next layer of any micro-batch is computed with. Every method but
    `begin_layer`
    returns the packets to send, in order; those of kind RETIRED once in each class."""

    def __init__(self, current: Placement, deadline_s: float) -> None:
        """deadline_s: from the first word of a generation until all must have said PLACED, unless
        it says of itself that it takes longer."""
        self.current = current
        self._deadline_s = deadline_s
        self._max_ranks = current.ranks  # of all generations that it has heard of
        self._candidates: dict[int, _Candidate] = {}
        self._live: Counter[int] = Counter()
        self._owes_commit = False
        self._linked: set[str] = set()
        self._lost: set[str] = set()

    @property
    def generation(self) -> int:
        return self.current.generation

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of all expert ranks that a generation was on, or was to be. Never fewer."""
        return _experts(self._max_ranks)

    @property
    def lost_experts(self) -> frozenset[str]:
        """Expert ranks, until others with their experts are in their places."""
        return frozenset(self._lost)

    def holders(self, generation: int) -> frozenset[str]:
        """Who has said PLACED of one that is to come, in the present attempt."""
        candidate = self._candidates.get(generation)
        return frozenset() if candidate is None else frozenset(candidate.prepared)

    # --- from expert ranks

    def prepared(
        self,
        expert: str,
        placement: Placement,
        attempt: int,
        now_s: float,
        within_s: float = 0.0,
    ) -> list[PlacementMessage]:
        """within_s: how long the whole of it may take, if that is longer than others may."""
        generation = placement.generation
        if generation <= self.generation:
            return []
        self._max_ranks = max(self._max_ranks, placement.ranks)
        candidate = self._candidate(generation, now_s)
        if (
            expert not in candidate.notified
        ):  # its link came later than the refusal, if there was one
            if candidate.aborted:
                return [self._abort_message(generation, expert)]
        elif attempt != candidate.attempt:
            return []  # it crossed our refusal
        candidate.within_s = max(candidate.within_s, within_s)
        if candidate.aborted:  # somebody uses it: from the start
            candidate.aborted, candidate.since_s = False, now_s
        if candidate.placement not in (None, placement):
            return self._abort(generation, f"{expert} has another placement than the rest")
        needed = self._needed(placement)
        lost = needed & self._lost
        if lost and not candidate.attempt:
            return self._abort(generation, f"{min(lost)} is lost")
        candidate.placement = placement
        candidate.prepared.add(expert)
        if not needed <= candidate.prepared | candidate.excused:
            return []
        return self.adopt(placement)

    def _needed(self, placement: Placement | None) -> set[str]:
        """Who must have said PLACED of it: whoever has experts before it, or by it."""
        ranks = 0 if placement is None else placement.ranks
        return set(_experts(max(self.current.ranks, ranks)))

    def adopt(self, placement: Placement) -> list[PlacementMessage]:
        """It is used from now on: by all others too, or they are about to."""
        self.current, self._owes_commit = placement, True
        self._max_ranks = max(self._max_ranks, placement.ranks)
        self._candidates = {g: c for g, c in self._candidates.items() if g > placement.generation}
        return self._settle()

    def add_abort_vote(self, generation: int, reason: str, now_s: float) -> list[PlacementMessage]:
        """reason: of the expert rank, by name."""
        if generation <= self.generation:
            return []
        if self._candidate(generation, now_s).aborted:
            return []
        return self._abort(generation, reason)

    def joined(self, expert: str) -> None:
        """It has a link, or another in its place has. Where it has experts of the present
        generation, it is lost until it `returned`."""
        self._linked.add(expert)
        for candidate in self._candidates.values():
            candidate.notified.discard(expert)
        if expert not in _experts(self.current.ranks):
            self._lost.discard(expert)

    def lost(self, expert: str) -> list[PlacementMessage]:
        """It says PLACED to nobody any more. What somebody uses all the same is gone over to
        without its word."""
        self._lost.add(expert)
        self._linked.discard(expert)
        for candidate in self._candidates.values():
            candidate.excused.add(expert)
        return [
            message
            for generation, candidate in list(self._candidates.items())
            if not candidate.aborted and expert in self._needed(candidate.placement)
            for message in self._abort(generation, f"{expert} is lost")
        ]

    def returned(self, expert: str) -> list[PlacementMessage]:
        """It is there, or another in its place, with the experts of the present generation: it is
        told that nothing before that is used."""
        self._lost.discard(expert)
        return (
            [PlacementMessage(expert, PacketKind.COMMITTED, self.generation)]
            if self.generation
            else []
        )

    def poll(self, now_s: float) -> list[PlacementMessage]:
        """What is due by now."""
        return [
            message
            for generation, candidate in list(self._candidates.items())
            if not candidate.aborted and now_s >= candidate.since_s + candidate.within_s
            for message in self._abort(generation, self._late(candidate))
        ]

    def abort(self, generation: int, reason: str, now_s: float) -> list[PlacementMessage]:
        """It is not to be had: as if that were said of all."""
        return self.add_abort_vote(generation, reason, now_s)

    # --- from the rank's own batches

    def begin_layer(self) -> int:
        """A layer of a micro-batch is computed: with this generation, until it `end_layer`."""
        self._live[self.generation] += 1
        return self.generation

    def end_layer(self, generation: int) -> list[PlacementMessage]:
        self._live[generation] -= 1
        return self._settle()

    # --- what follows

    def _settle(self) -> list[PlacementMessage]:
        """RETIRED, once nothing older is under way."""
        self._live = +self._live
        if not self._owes_commit or any(older < self.generation for older in self._live):
            return []
        self._owes_commit = False
        return [
            PlacementMessage(expert, PacketKind.COMMITTED, self.generation)
            for expert in sorted(self._linked)
        ]

    def _candidate(self, generation: int, now_s: float) -> _Candidate:
        if generation not in self._candidates:
            aborted = sorted(g for g, each in self._candidates.items() if each.aborted)
            for oldest in aborted[: len(aborted) - _REMEMBERED + 1]:
                del self._candidates[oldest]
            self._candidates[generation] = _Candidate(now_s, self._deadline_s)
            self._candidates[generation].excused |= self._lost
        return self._candidates[generation]

    def _abort(self, generation: int, reason: str) -> list[PlacementMessage]:
        candidate = self._candidates[generation]
        candidate.aborted, candidate.placement, candidate.reason = True, None, reason
        candidate.prepared.clear()
        candidate.attempt += 1
        return [self._abort_message(generation, expert) for expert in sorted(self._linked)]

    def _abort_message(self, generation: int, expert: str) -> PlacementMessage:
        candidate = self._candidates[generation]
        candidate.notified.add(expert)
        return PlacementMessage(
            expert, PacketKind.ABORTED, generation, candidate.attempt, candidate.reason
        )

    def _late(self, candidate: _Candidate) -> str:
        missing = sorted(self._needed(candidate.placement) - candidate.prepared)
        return (
            f"no word of {', '.join(missing)} within {candidate.within_s:g} s "
            "(placement.move_timeout_s)"
        )


def _experts(ranks: int) -> tuple[str, ...]:
    return rank_names(Group.EXPERT, ranks)
