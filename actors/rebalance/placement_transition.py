"""Placement generations on an attention rank: a state machine without I/O or a clock.

The rank switches to a generation once all expert ranks, of the current generation and of the next,
have sent PREPARED with the same placement. It never switches back. Each layer of a micro-batch uses
one generation to its end; the next layer may use the next generation. COMMITTED is sent once no
layer uses an older one. See actors/rebalance/expert_generations.py for the expert ranks' side and
for attempts.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from actors.channels.base import PacketKind
from actors.rebalance.expert_generations import LAUNCH_ATTEMPT, PlacementMessage
from contracts.placement import Placement
from contracts.ranks import Group, rank_names

_REMEMBERED: Final = 64  # aborted generations, to recognise late packets


@dataclass(slots=True)
class _Candidate:
    """since_s: first packet about it in this attempt. within_s: time limit."""

    since_s: float
    within_s: float
    excused: set[str]  # ranks lost since
    attempt: int = LAUNCH_ATTEMPT
    aborted: bool = False
    reason: str = ""
    placement: Placement | None = None
    prepared: set[str] = field(default_factory=set)
    notified: set[str] = field(default_factory=set)  # ranks that were sent the abort


class AttentionGenerations:
    """current: the generation of new layers. Methods return the packets to send, in order."""

    def __init__(self, current: Placement, deadline_s: float) -> None:
        """Start at `current`. deadline_s: default time until all ranks must be prepared."""
        self.current = current
        self._deadline_s = deadline_s
        self._max_ranks = current.ranks  # over all generations known
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
        """Names of all expert ranks of any generation known; never shrinks."""
        return _experts(self._max_ranks)

    @property
    def lost_experts(self) -> frozenset[str]:
        """Lost expert ranks that have not been replaced."""
        return frozenset(self._lost)

    def holders(self, generation: int) -> frozenset[str]:
        """Return the ranks that have prepared a generation in the current attempt."""
        candidate = self._candidates.get(generation)
        return frozenset() if candidate is None else frozenset(candidate.prepared)

    # --- from expert ranks

    def prepared(
        self, expert: str, placement: Placement, attempt: int, now_s: float, within_s: float = 0.0
    ) -> list[PlacementMessage]:
        """Handle PREPARED. within_s: its time limit, if longer than the default."""
        generation = placement.generation
        if generation <= self.generation:
            return []
        self._max_ranks = max(self._max_ranks, placement.ranks)
        candidate = self._candidate(generation, now_s)
        if expert not in candidate.notified:  # its link is newer than the abort, if any
            if candidate.aborted:
                return [self._abort_message(generation, expert)]
        elif attempt != candidate.attempt:
            return []  # it crossed the abort
        candidate.within_s = max(candidate.within_s, within_s)
        if candidate.aborted:  # another rank uses it: start again
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
        """Return the ranks that must prepare it: those of the current and of the next placement."""
        ranks = 0 if placement is None else placement.ranks
        return set(_experts(max(self.current.ranks, ranks)))

    def adopt(self, placement: Placement) -> list[PlacementMessage]:
        """Switch to a generation that all other attention ranks use, or will use."""
        self.current, self._owes_commit = placement, True
        self._max_ranks = max(self._max_ranks, placement.ranks)
        self._candidates = {g: c for g, c in self._candidates.items() if g > placement.generation}
        return self._settle()

    def add_abort_vote(self, generation: int, reason: str, now_s: float) -> list[PlacementMessage]:
        """Handle ABORT_VOTE, or a failure here. reason: names the rank."""
        if generation <= self.generation:
            return []
        if self._candidate(generation, now_s).aborted:
            return []
        return self._abort(generation, reason)

    def add_peer(self, expert: str) -> None:
        """Handle a new link. A rank of the current generation is lost until it has `returned`."""
        self._linked.add(expert)
        for candidate in self._candidates.values():
            candidate.notified.discard(expert)
        if expert not in _experts(self.current.ranks):
            self._lost.discard(expert)

    def remove_peer(self, expert: str) -> list[PlacementMessage]:
        """Handle a lost link. Generations in use elsewhere no longer need this rank's PREPARED."""
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
        """Handle a rank that has the current generation's experts; report what is retired."""
        self._lost.discard(expert)
        return (
            [PlacementMessage(expert, PacketKind.COMMITTED, self.generation)]
            if self.generation
            else []
        )

    def poll(self, now_s: float) -> list[PlacementMessage]:
        """Abort overdue generations."""
        return [
            message
            for generation, candidate in list(self._candidates.items())
            if not candidate.aborted and now_s >= candidate.since_s + candidate.within_s
            for message in self._abort(generation, self._late(candidate))
        ]

    # --- from the rank's own batches

    def begin_layer(self) -> int:
        """Return the generation of a new layer, until `end_layer`."""
        self._live[self.generation] += 1
        return self.generation

    def end_layer(self, generation: int) -> list[PlacementMessage]:
        self._live[generation] -= 1
        return self._settle()

    # --- transitions

    def _settle(self) -> list[PlacementMessage]:
        """Return COMMITTED once no layer uses an older generation."""
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
            self._candidates[generation] = _Candidate(now_s, self._deadline_s, set(self._lost))
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
