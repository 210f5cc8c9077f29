"""Placement generations: the rules of both sides, without I/O, threads or a clock.

An expert rank:

    proposed ──> loading ──> PREPARED ────────────────────> current     (the previous one is freed)
                    │           │   all attention ranks: COMMITTED
                    └─ fails    └─ all attention ranks: ABORTED
                       ABORT_VOTE  freed

Before PREPARED an expert rank can abort by itself: no attention rank has switched, because each
waits for all expert ranks. After PREPARED the attention ranks decide, each on its own: one that
uses the generation sends COMMITTED, one that does not sends ABORTED. A generation is therefore
never freed while tokens for it may still be sent.

An attention rank switches to a generation once all expert ranks, of the current generation and of
the next, have sent PREPARED with the same placement. It never switches back. Each layer of a
micro-batch uses one generation to its end; the next layer may use the next generation. COMMITTED
is sent once no layer uses an older one.

An attention rank aborts when its deadline passes, though another may have switched by then. Expert
ranks that know of the switch send PREPARED to the first one again. An *attempt* is the time between
two aborts, counted by the attention rank. It switches once all expert ranks have sent PREPARED in
its current attempt; a PREPARED that crossed its abort does not count.

Links keep the order within a priority class only, so COMMITTED is sent in both classes.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from actors.channels.base import PacketKind
from contracts.placement import Placement
from contracts.planner_messages import MoveOutcome
from contracts.ranks import Group, rank_names
from contracts.requests import Priority

LAUNCH_ATTEMPT: Final = 0
_TAKEN: Final = ("proposed before it", "is under way", "has refused generation", "than the rest")


def is_taken(reason: str) -> bool:
    """Return True if a concurrent proposal caused the failure, so that it can be retried."""
    return any(words in reason for words in _TAKEN)


class PlacementMessage(NamedTuple):
    """A packet to `peer`. within_s: time limit of a PREPARED generation; 0: the default.

    placement: body of PREPARED, READY and ACQUIRE.
    """

    peer: str
    kind: PacketKind
    generation: int
    attempt: int = LAUNCH_ATTEMPT
    reason: str = ""
    within_s: float = 0.0
    placement: Placement | None = None


class TransitionReport(NamedTuple):
    """Outcome of a proposal, for the planner."""

    generation: int
    outcome: MoveOutcome
    reason: str = ""


Action = PlacementMessage | TransitionReport


@dataclass(slots=True)
class _PendingPlacement:
    """The generation in transition. is_adopted: attention ranks use it; it was not proposed."""

    placement: Placement
    until_s: float  # the deadline of loading
    within_s: float = 0.0
    is_prepared: bool = False
    is_adopted: bool = False

    def message(self, peer: str, attempt: int = LAUNCH_ATTEMPT) -> PlacementMessage:
        return PlacementMessage(
            peer,
            PacketKind.PREPARED,
            self.placement.generation,
            attempt,
            within_s=self.within_s,
            placement=self.placement,
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
    """current: the placement in use. Methods return what to send and to report, in order.

    `loading` and `needed` name what to load and to keep after each of them.
    """

    def __init__(self, current: Placement, deadline_s: float) -> None:
        """deadline_s: time limit for loading a proposal."""
        self.current = current
        self._deadline_s = deadline_s
        self._newest = current.generation  # proposed so far
        self._next: _PendingPlacement | None = None
        self._peers: dict[str, _Peer] = {}

    @property
    def under_way(self) -> int | None:
        pending = self._next
        return None if pending is None else pending.placement.generation

    @property
    def loading(self) -> Placement | None:
        """The placement whose experts are to be loaded."""
        return None if self._next is None or self._next.is_prepared else self._next.placement

    @property
    def needed(self) -> set[int]:
        """Generations whose experts are in use, or may be."""
        pending = () if self.under_way is None else (self.under_way,)
        return {self.current.generation, *pending}

    @property
    def newest(self) -> int:
        return max([self._newest, *(peer.aborted_early for peer in list(self._peers.values()))])

    @property
    def links(self) -> int:
        return len(self._peers)

    # --- from the planner

    def proposed(
        self, placement: Placement, now_s: float, misfit: str = "", within_s: float = 0.0
    ) -> list[Action]:
        """Handle a proposal. misfit: why it is impossible. within_s: 0: the default."""
        generation = placement.generation
        if generation == self.under_way:
            return []  # repeated
        reason = misfit or self._objection(generation)
        self._newest = max(self._newest, generation)
        if reason:
            return self._abort_votes(generation, reason)
        until_s = now_s + (within_s or self._deadline_s)
        self._begin(_PendingPlacement(placement, until_s, within_s))
        return []

    def adopt(self, placement: Placement) -> list[Action]:
        """Make a generation that attention ranks use on this replacement rank the next one.

        The current one is freed once no rank uses it.
        """
        if self._next is not None or placement.generation <= self.current.generation:
            return []
        self._newest = max(self._newest, placement.generation)
        self._begin(_PendingPlacement(placement, math.inf, is_prepared=True, is_adopted=True))
        return self._settle()

    def abandon(self, leased: Collection[int]) -> None:
        """Drop an adopted generation that no attention rank uses any more."""
        if self._next is not None and self._next.is_adopted and self.under_way not in leased:
            self._next = None

    def _begin(self, pending: _PendingPlacement) -> None:
        self._next = pending
        for peer in self._peers.values():
            peer.aborted, peer.attempt = False, LAUNCH_ATTEMPT

    def _objection(self, generation: int) -> str:
        if generation <= self._newest:
            return f"generation {generation} is not newer than {self._newest}, proposed before it"
        if self._next is not None:
            return f"generation {self.under_way} is under way"
        if not self._peers:
            return "no attention rank is linked"
        for name, peer in self._peers.items():
            if generation <= peer.aborted_early:
                return f"{name} has refused generation {peer.aborted_early}"
        return ""

    # --- from the loader

    def loaded(self, generation: int) -> list[Action]:
        """Handle the end of the load of `loading`."""
        assert self._next is not None
        self._next.is_prepared = True
        messages = map(self._next.message, self._peers)
        return [*messages, TransitionReport(generation, MoveOutcome.READY), *self._settle()]

    def failed(self, generation: int, reason: str) -> list[Action]:
        """Handle the failure to load `loading`."""
        return self._vote_abort(generation, reason)

    def poll(self, now_s: float) -> list[Action]:
        pending = self._next
        if pending is None or pending.is_prepared or now_s < pending.until_s:
            return []
        return self._vote_abort(
            pending.placement.generation,
            f"not there within {pending.within_s or self._deadline_s:g} s "
            "(placement.move_timeout_s): raise it, or placement.bytes_per_s",
        )

    # --- from attention ranks

    def add_peer(self, name: str) -> list[Action]:
        self._peers[name] = _Peer()
        pending = self._next
        return [] if pending is None or not pending.is_prepared else [pending.message(name)]

    def remove_peer(self, name: str) -> list[Action]:
        """Forget a lost attention rank. Loading continues without any: one may be linking."""
        return [] if self._peers.pop(name, None) is None else self._settle()

    def aborted(self, name: str, generation: int, attempt: int, reason: str) -> list[Action]:
        peer = self._peers.get(name)
        if peer is None:
            return []
        if generation > self._newest:
            peer.aborted_early = max(peer.aborted_early, generation)
        if self._next is None or generation != self.under_way:
            return []
        refusal = f"{name} refused it: {reason}"
        if not self._next.is_prepared:
            return self._vote_abort(generation, refusal)
        peer.aborted, peer.attempt, peer.reason = True, attempt, refusal
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
        pending, peers = self._next, self._peers.values()
        if pending is None:
            return []
        generation = pending.placement.generation
        if not pending.is_adopted and peers and all(p.has_drained(generation) for p in peers):
            reason = "attention ranks use a newer one, which needs nothing of here"
            return self._vote_abort(generation, reason)
        if not pending.is_prepared:
            return []
        outcome = None
        if all(peer.aborted for peer in peers):
            reasons = [peer.reason for peer in peers] or ["no attention rank is linked any more"]
            outcome = TransitionReport(generation, MoveOutcome.FAILED, reasons[0])
        elif all(peer.has_drained_before(generation) for peer in peers):
            self.current = pending.placement
            outcome = TransitionReport(generation, MoveOutcome.RETIRED)
        if outcome is not None:
            self._next = None
            return [] if pending.is_adopted else [outcome]
        if not any(peer.uses(generation) for peer in peers):
            return []
        again = [(name, peer) for name, peer in self._peers.items() if peer.aborted]
        for _, peer in again:
            peer.aborted = False
        return [pending.message(name, peer.attempt) for name, peer in again]

    def _vote_abort(self, generation: int, reason: str) -> list[Action]:
        """Abort the pending generation, which is not prepared yet."""
        self._next = None
        return self._abort_votes(generation, reason)

    def _abort_votes(self, generation: int, reason: str) -> list[Action]:
        messages = [
            PlacementMessage(peer, PacketKind.ABORT_VOTE, generation, reason=reason)
            for peer in self._peers
            if generation > self.current.generation
        ]
        return [*messages, TransitionReport(generation, MoveOutcome.FAILED, reason)]


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
