"""Generations of placement on an expert rank: a small machine without I/O, threads or a clock.

    proposed ──> LOADING ──> PLACED ──────────────────────> current     (the one before it is freed)
                    │           │   all attention ranks: RETIRED
                    └─ fails    └─ all attention ranks: REFUSED
                       WITHDRAWN   freed

Before it has said PLACED a rank may withdraw: no attention rank can have gone over, because each
waits for all expert ranks. Afterwards the attention ranks decide, each by itself: one that uses the
generation says RETIRED of those before it, one that will not says REFUSED. So it is never freed
while somebody may still send tokens for it:

    An attention rank refuses by itself when its patience ends; another may have gone over by then.
    Expert ranks that know of that tell the first one PLACED again. An *attempt* is the time from
    one refusal to the next, counted by the attention rank: it goes over once all have said PLACED
    in its present attempt, so that a PLACED that crossed its refusal does not count.

    Links keep order by class only (a BE packet may be overtaken): RETIRED is said in both.

The attention ranks' side: actors/rebalance/placement_transition.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from actors.channels.base import PacketKind
from contracts.placement import Placement
from contracts.planner_messages import MoveOutcome
from contracts.requests import Priority

LAUNCH_ATTEMPT: Final = 0
_TAKEN: Final = ("proposed before it", "is under way", "has refused generation", "than the rest")


def is_taken(reason: str) -> bool:
    """Whether that failed because another was proposed at the same time: it may be tried again."""
    return any(words in reason for words in _TAKEN)


class PlacementMessage(NamedTuple):
    """A packet to `peer`. within_s: of PLACED, how long all of it may take; 0: as long as any."""

    peer: str
    kind: PacketKind
    generation: int
    attempt: int = LAUNCH_ATTEMPT
    reason: str = ""
    within_s: float = 0.0


class LoadExperts(NamedTuple):
    """Bring in what this placement has here and no other; then `loaded` or `failed` is called."""

    placement: Placement


class FreeExperts(NamedTuple):
    """Let go of what only this generation has: loaded, being loaded, or in use until now."""

    generation: int


class TransitionReport(NamedTuple):
    """To the planner."""

    generation: int
    outcome: MoveOutcome
    reason: str = ""


Action = PlacementMessage | LoadExperts | FreeExperts | TransitionReport


class TransitionStage(enum.Enum):
    LOADING = enum.auto()
    PREPARED = enum.auto()


class _PendingPlacement:
    """The generation that is to come."""

    def __init__(
        self,
        placement: Placement,
        until_s: float,
        within_s: float = 0.0,
        stage: TransitionStage = TransitionStage.LOADING,
    ) -> None:
        self.placement = placement
        self.until_s, self.within_s = until_s, within_s
        self.stage = stage
        self.is_adopted = stage is TransitionStage.PREPARED  # nobody proposed it here

    @property
    def generation(self) -> int:
        return self.placement.generation

    def message(self, peer: str, attempt: int = LAUNCH_ATTEMPT) -> PlacementMessage:
        return PlacementMessage(
            peer, PacketKind.PREPARED, self.generation, attempt, within_s=self.within_s
        )


class _Peer:
    """What an attention rank has said. refused: the next generation, in its present attempt."""

    def __init__(self) -> None:
        self.aborted = False
        self.reason = ""
        self.attempt = LAUNCH_ATTEMPT
        self.aborted_early = (
            -1
        )  # it has refused one that was not proposed here yet: the newest of these
        self.committed = dict.fromkeys(Priority, -1)  # by class, the oldest generation that it uses

    def uses(self, generation: int) -> bool:
        """Said so: it sends tokens for none before."""
        return max(self.committed.values()) >= generation

    def has_drained_before(self, generation: int) -> bool:
        """And whatever it sent for them has come."""
        return min(self.committed.values()) >= generation

    def has_drained(self, generation: int) -> bool:
        """That one too: it was on other ranks only."""
        return min(self.committed.values()) > generation


class ExpertGenerations:
    """current: what all may use. Every method returns what is to be done, in order."""

    def __init__(self, current: int, deadline_s: float) -> None:
        """deadline_s: from a proposal until it must be there."""
        self.current = current
        self._deadline_s = deadline_s
        self._newest = current  # that was proposed
        self._next: _PendingPlacement | None = None
        self._peers: dict[str, _Peer] = {}

    @property
    def under_way(self) -> int | None:
        """The generation that is to come."""
        return None if self._next is None else self._next.generation

    @property
    def newest(self) -> int:
        """That anybody has told of."""
        return max([self._newest, *(peer.aborted_early for peer in list(self._peers.values()))])

    @property
    def due_s(self) -> float | None:
        """When `poll` should be called."""
        loading = self._next is not None and self._next.stage is TransitionStage.LOADING
        return self._next.until_s if self._next is not None and loading else None

    # --- from the planner

    def proposed(
        self, placement: Placement, now_s: float, misfit: str = "", within_s: float = 0.0
    ) -> list[Action]:
        """misfit: why it cannot be placed here at all; empty: it can. within_s: how long it may
        take; 0: as long as any."""
        generation = placement.generation
        if self._next is not None and generation == self._next.generation:
            return []  # said twice
        reason = misfit or self._objection(generation)
        self._newest = max(self._newest, generation)
        if reason:
            return self._abort_votes(generation, reason)
        self._next = _PendingPlacement(placement, now_s + (within_s or self._deadline_s), within_s)
        self._reset_votes()
        return [LoadExperts(placement)]

    def adopt(self, placement: Placement) -> list[Action]:
        """It is here because attention ranks use it and said so, not because it was proposed: this
        rank has taken the place of a lost one. What was here before goes once nobody uses it."""
        if self._next is not None or placement.generation <= self.current:
            return []
        self._newest = max(self._newest, placement.generation)
        self._next = _PendingPlacement(placement, math.inf, stage=TransitionStage.PREPARED)
        self._reset_votes()
        return self._settle()

    def abandon(self, generation: int) -> list[Action]:
        """Whoever used what was adopted is gone."""
        if self._next is None or not self._next.is_adopted or self.under_way != generation:
            return []
        self._next = None
        return [FreeExperts(generation)]

    def _reset_votes(self) -> None:
        for peer in self._peers.values():
            peer.aborted, peer.attempt = False, LAUNCH_ATTEMPT

    def _objection(self, generation: int) -> str:
        if generation <= self._newest:
            return f"generation {generation} is not newer than {self._newest}, proposed before it"
        if self._next is not None:
            return f"generation {self._next.generation} is under way"
        if not self._peers:
            return "no attention rank is linked"
        for name, peer in self._peers.items():
            if generation <= peer.aborted_early:
                return f"{name} has refused generation {peer.aborted_early}"
        return ""

    # --- from the loading of what it lacks

    def loaded(self, generation: int) -> list[Action]:
        if self._next is None or self._next.generation != generation:
            return []  # it was given up meanwhile
        self._next.stage = TransitionStage.PREPARED
        messages = [self._next.message(peer) for peer in self._peers]
        return [*messages, TransitionReport(generation, MoveOutcome.READY), *self._settle()]

    def failed(self, generation: int, reason: str) -> list[Action]:
        if self._next is None or self._next.generation != generation:
            return []
        return self._vote_abort(reason)

    def poll(self, now_s: float) -> list[Action]:
        due_s = self.due_s
        if self._next is None or due_s is None or now_s < due_s:
            return []
        return self._vote_abort(
            f"not there within {self._next.within_s or self._deadline_s:g} s "
            "(placement.move_timeout_s): raise it, or placement.bytes_per_s"
        )

    # --- from attention ranks

    def joined(self, name: str) -> list[Action]:
        self._peers[name] = _Peer()
        if self._next is None or self._next.stage is TransitionStage.LOADING:
            return []
        return [self._next.message(name)]

    def lost(self, name: str) -> list[Action]:
        if self._peers.pop(name, None) is None or self._next is None:
            return []
        if not self._peers and self._next.stage is TransitionStage.LOADING:
            return self._vote_abort("no attention rank is linked any more")
        return self._settle()

    def aborted(self, name: str, generation: int, attempt: int, reason: str) -> list[Action]:
        peer = self._peers.get(name)
        if peer is None:
            return []
        if generation > self._newest:
            peer.aborted_early = max(peer.aborted_early, generation)
        if self._next is None or generation != self._next.generation:
            return []
        if self._next.stage is TransitionStage.LOADING:
            return self._vote_abort(f"{name} refused it: {reason}")
        peer.aborted, peer.attempt, peer.reason = True, attempt, f"{name} refused it: {reason}"
        return self._settle()

    def committed(self, name: str, generation: int, priority: Priority) -> list[Action]:
        """It uses none before `generation`, and has sent nothing for them after this, of that
        class."""
        peer = self._peers.get(name)
        if peer is None:
            return []
        peer.committed[priority] = max(peer.committed[priority], generation)
        return self._settle()

    # --- what follows

    def _settle(self) -> list[Action]:
        """What is to be done once an attention rank has said something, or is gone."""
        if self._next is None:
            return []
        generation, peers = self._next.generation, self._peers.values()
        proposed = not self._next.is_adopted
        if proposed and peers and all(peer.has_drained(generation) for peer in peers):
            return self._vote_abort("attention ranks use a newer one, which needs nothing of here")
        if self._next.stage is TransitionStage.LOADING:
            return []
        if all(peer.aborted for peer in peers):
            reasons = [peer.reason for peer in peers] or ["no attention rank is linked any more"]
            self._next = None
            failed = TransitionReport(generation, MoveOutcome.FAILED, reasons[0])
            return [FreeExperts(generation), *[failed][:proposed]]
        if all(peer.has_drained_before(generation) for peer in peers):
            before, self.current, self._next = self.current, generation, None
            return [
                FreeExperts(before),
                *[TransitionReport(generation, MoveOutcome.RETIRED)][:proposed],
            ]
        if not any(peer.uses(generation) for peer in peers):
            return []
        return list(self._placed_again(self._next))

    def _placed_again(self, coming: _PendingPlacement) -> Iterable[PlacementMessage]:
        for name, peer in self._peers.items():
            if peer.aborted:
                peer.aborted = False
                yield coming.message(name, peer.attempt)

    def _vote_abort(self, reason: str) -> list[Action]:
        """Of the next one, which is not placed yet."""
        assert self._next is not None
        generation, self._next = self._next.generation, None
        return [FreeExperts(generation), *self._abort_votes(generation, reason)]

    def _abort_votes(self, generation: int, reason: str) -> list[Action]:
        messages = [
            PlacementMessage(peer, PacketKind.ABORT_VOTE, generation, reason=reason)
            for peer in self._peers
            if generation > self.current
        ]
        return [*messages, TransitionReport(generation, MoveOutcome.FAILED, reason)]
