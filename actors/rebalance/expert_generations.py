"""Placement generations on an expert rank: a state machine without I/O, threads or a clock.

    proposed ──> LOADING ──> PREPARED ────────────────────> current     (the previous one is freed)
                    │           │   all attention ranks: COMMITTED
                    └─ fails    └─ all attention ranks: ABORTED
                       ABORT_VOTE  freed

Before PREPARED an expert rank can abort by itself: no attention rank has switched, because each
waits for all expert ranks. After PREPARED the attention ranks decide, each on its own: one that
uses the generation sends COMMITTED, one that does not sends ABORTED. A generation is therefore
never freed while tokens for it may still be sent.

An attention rank aborts when its deadline passes, though another may have switched by then. Expert
ranks that know of the switch send PREPARED to the first one again. An *attempt* is the time between
two aborts, counted by the attention rank. It switches once all expert ranks have sent PREPARED in
its current attempt; a PREPARED that crossed its abort does not count.

Links keep the order within a priority class only, so COMMITTED is sent in both classes.
The attention ranks' side is in actors/rebalance/placement_transition.py.
"""

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
    """Return True if a concurrent proposal caused the failure, so that it can be retried."""
    return any(words in reason for words in _TAKEN)


class PlacementMessage(NamedTuple):
    """A packet to `peer`. within_s: time limit of a PREPARED generation; 0: the default."""

    peer: str
    kind: PacketKind
    generation: int
    attempt: int = LAUNCH_ATTEMPT
    reason: str = ""
    within_s: float = 0.0


class LoadExperts(NamedTuple):
    """Load the experts of `placement`, then call `loaded` or `failed`."""

    placement: Placement


class FreeExperts(NamedTuple):
    """Free the experts that only this generation uses, loading or loaded."""

    generation: int


class TransitionReport(NamedTuple):
    """Outcome of a proposal, for the planner."""

    generation: int
    outcome: MoveOutcome
    reason: str = ""


Action = PlacementMessage | LoadExperts | FreeExperts | TransitionReport


class TransitionStage(enum.Enum):
    LOADING = enum.auto()
    PREPARED = enum.auto()


class _PendingPlacement:
    """The generation in transition."""

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
        self.is_adopted = stage is TransitionStage.PREPARED  # not proposed to this rank

    @property
    def generation(self) -> int:
        return self.placement.generation

    def message(self, peer: str, attempt: int = LAUNCH_ATTEMPT) -> PlacementMessage:
        return PlacementMessage(
            peer, PacketKind.PREPARED, self.generation, attempt, within_s=self.within_s
        )


class _Peer:
    """State of an attention rank. aborted: the pending generation, in its current attempt."""

    def __init__(self) -> None:
        self.aborted = False
        self.reason = ""
        self.attempt = LAUNCH_ATTEMPT
        self.aborted_early = -1  # newest generation aborted before it was proposed here
        self.committed = dict.fromkeys(Priority, -1)  # oldest generation in use, by class

    def uses(self, generation: int) -> bool:
        """Return True if it sends no tokens for earlier generations."""
        return max(self.committed.values()) >= generation

    def has_drained_before(self, generation: int) -> bool:
        """Return True if all tokens it sent for earlier generations have arrived."""
        return min(self.committed.values()) >= generation

    def has_drained(self, generation: int) -> bool:
        """Return True if the same holds for `generation`, which used other ranks only."""
        return min(self.committed.values()) > generation


class ExpertGenerations:
    """current: the generation in use. Methods return the actions to take, in order."""

    def __init__(self, current: int, deadline_s: float) -> None:
        """deadline_s: time limit for loading a proposal."""
        self.current = current
        self._deadline_s = deadline_s
        self._newest = current  # proposed so far
        self._next: _PendingPlacement | None = None
        self._peers: dict[str, _Peer] = {}

    @property
    def under_way(self) -> int | None:
        return None if self._next is None else self._next.generation

    @property
    def newest(self) -> int:
        return max([self._newest, *(peer.aborted_early for peer in list(self._peers.values()))])

    @property
    def links(self) -> int:
        return len(self._peers)

    @property
    def due_s(self) -> float | None:
        """Time at which `poll` is due."""
        loading = self._next is not None and self._next.stage is TransitionStage.LOADING
        return self._next.until_s if self._next is not None and loading else None

    # --- from the planner

    def proposed(
        self, placement: Placement, now_s: float, misfit: str = "", within_s: float = 0.0
    ) -> list[Action]:
        """Handle a proposal. misfit: why it is impossible. within_s: 0: the default."""
        generation = placement.generation
        if self._next is not None and generation == self._next.generation:
            return []  # repeated
        reason = misfit or self._objection(generation)
        self._newest = max(self._newest, generation)
        if reason:
            return self._abort_votes(generation, reason)
        self._next = _PendingPlacement(placement, now_s + (within_s or self._deadline_s), within_s)
        self._reset_votes()
        return [LoadExperts(placement)]

    def adopt(self, placement: Placement) -> list[Action]:
        """Make a generation that attention ranks use on this replacement rank the next one.

        The current one is freed once no rank uses it.
        """
        if self._next is not None or placement.generation <= self.current:
            return []
        self._newest = max(self._newest, placement.generation)
        self._next = _PendingPlacement(placement, math.inf, stage=TransitionStage.PREPARED)
        self._reset_votes()
        return self._settle()

    def abandon(self, generation: int) -> list[Action]:
        """Drop an adopted generation that no attention rank uses any more."""
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

    # --- from the loader

    def loaded(self, generation: int) -> list[Action]:
        if self._next is None or self._next.generation != generation:
            return []  # dropped meanwhile
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

    def add_peer(self, name: str) -> list[Action]:
        self._peers[name] = _Peer()
        if self._next is None or self._next.stage is TransitionStage.LOADING:
            return []
        return [self._next.message(name)]

    def remove_peer(self, name: str) -> list[Action]:
        """Forget a lost attention rank. Loading continues without any: one may be linking."""
        return [] if self._peers.pop(name, None) is None else self._settle()

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
        """Handle COMMITTED: the rank sends no more for earlier generations in this class."""
        peer = self._peers.get(name)
        if peer is None:
            return []
        peer.committed[priority] = max(peer.committed[priority], generation)
        return self._settle()

    # --- transitions

    def _settle(self) -> list[Action]:
        """Return the actions due after a message from an attention rank, or its loss."""
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
        """Abort the pending generation, which is not prepared yet."""
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
