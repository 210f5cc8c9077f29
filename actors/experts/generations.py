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

The attention ranks' side: actors/experts/switching.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from actors.channels.base import Kind
from contracts.placement import Placement
from contracts.planning import Outcome
from contracts.requests import Priority

LAUNCH_ATTEMPT: Final = 0
_TAKEN: Final = ("proposed before it", "is under way", "has refused generation", "than the rest")


def is_taken(reason: str) -> bool:
    """Whether that failed because another was proposed at the same time: it may be tried again."""
    return any(words in reason for words in _TAKEN)


class Tell(NamedTuple):
    """A packet to `peer`. within_s: of PLACED, how long all of it may take; 0: as long as any."""

    peer: str
    kind: Kind
    generation: int
    attempt: int = LAUNCH_ATTEMPT
    reason: str = ""
    within_s: float = 0.0


class Load(NamedTuple):
    """Bring in what this placement has here and no other; then `loaded` or `failed` is called."""

    placement: Placement


class Free(NamedTuple):
    """Let go of what only this generation has: loaded, being loaded, or in use until now."""

    generation: int


class Report(NamedTuple):
    """To the planner."""

    generation: int
    outcome: Outcome
    reason: str = ""


Action = Tell | Load | Free | Report


class Stage(enum.Enum):
    LOADING = enum.auto()
    PLACED = enum.auto()


class _Next:
    """The generation that is to come."""

    def __init__(
        self,
        placement: Placement,
        until_s: float,
        within_s: float = 0.0,
        stage: Stage = Stage.LOADING,
    ) -> None:
        self.placement = placement
        self.until_s, self.within_s = until_s, within_s
        self.stage = stage
        self.is_adopted = stage is Stage.PLACED  # nobody proposed it here

    @property
    def generation(self) -> int:
        return self.placement.generation

    def tell(self, peer: str, attempt: int = LAUNCH_ATTEMPT) -> Tell:
        return Tell(peer, Kind.PLACED, self.generation, attempt, within_s=self.within_s)


class _Peer:
    """What an attention rank has said. refused: the next generation, in its present attempt."""

    def __init__(self) -> None:
        self.refused = False
        self.reason = ""
        self.attempt = LAUNCH_ATTEMPT
        self.unborn = -1  # it has refused one that was not proposed here yet: the newest of these
        self.retired = dict.fromkeys(Priority, -1)  # by class, the oldest generation that it uses

    def uses(self, generation: int) -> bool:
        """Said so: it sends tokens for none before."""
        return max(self.retired.values()) >= generation

    def is_through_with_those_before(self, generation: int) -> bool:
        """And whatever it sent for them has come."""
        return min(self.retired.values()) >= generation

    def is_through_with(self, generation: int) -> bool:
        """That one too: it was on other ranks only."""
        return min(self.retired.values()) > generation


class ExpertGenerations:
    """current: what all may use. Every method returns what is to be done, in order."""

    def __init__(self, current: int, deadline_s: float) -> None:
        """deadline_s: from a proposal until it must be there."""
        self.current = current
        self._deadline_s = deadline_s
        self._newest = current  # that was proposed
        self._next: _Next | None = None
        self._peers: dict[str, _Peer] = {}

    @property
    def under_way(self) -> int | None:
        """The generation that is to come."""
        return None if self._next is None else self._next.generation

    @property
    def newest(self) -> int:
        """That anybody has told of."""
        return max([self._newest, *(peer.unborn for peer in list(self._peers.values()))])

    @property
    def due_s(self) -> float | None:
        """When `look` should be called."""
        loading = self._next is not None and self._next.stage is Stage.LOADING
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
            return self._withdrawn(generation, reason)
        self._next = _Next(placement, now_s + (within_s or self._deadline_s), within_s)
        self._ask_anew()
        return [Load(placement)]

    def adopt(self, placement: Placement) -> list[Action]:
        """It is here because attention ranks use it and said so, not because it was proposed: this
        rank has taken the place of a lost one. What was here before goes once nobody uses it."""
        if self._next is not None or placement.generation <= self.current:
            return []
        self._newest = max(self._newest, placement.generation)
        self._next = _Next(placement, math.inf, stage=Stage.PLACED)
        self._ask_anew()
        return self._settle()

    def let_go(self, generation: int) -> list[Action]:
        """Whoever used what was adopted is gone."""
        if self._next is None or not self._next.is_adopted or self.under_way != generation:
            return []
        self._next = None
        return [Free(generation)]

    def _ask_anew(self) -> None:
        for peer in self._peers.values():
            peer.refused, peer.attempt = False, LAUNCH_ATTEMPT

    def _objection(self, generation: int) -> str:
        if generation <= self._newest:
            return f"generation {generation} is not newer than {self._newest}, proposed before it"
        if self._next is not None:
            return f"generation {self._next.generation} is under way"
        if not self._peers:
            return "no attention rank is linked"
        for name, peer in self._peers.items():
            if generation <= peer.unborn:
                return f"{name} has refused generation {peer.unborn}"
        return ""

    # --- from the loading of what it lacks

    def loaded(self, generation: int) -> list[Action]:
        if self._next is None or self._next.generation != generation:
            return []  # it was given up meanwhile
        self._next.stage = Stage.PLACED
        telling = [self._next.tell(peer) for peer in self._peers]
        return [*telling, Report(generation, Outcome.READY), *self._settle()]

    def failed(self, generation: int, reason: str) -> list[Action]:
        if self._next is None or self._next.generation != generation:
            return []
        return self._withdraw(reason)

    def look(self, now_s: float) -> list[Action]:
        due_s = self.due_s
        if self._next is None or due_s is None or now_s < due_s:
            return []
        return self._withdraw(
            f"not there within {self._next.within_s or self._deadline_s:g} s "
            "(placement.deadline_s): raise it, or placement.bytes_per_s"
        )

    # --- from attention ranks

    def joined(self, name: str) -> list[Action]:
        self._peers[name] = _Peer()
        if self._next is None or self._next.stage is Stage.LOADING:
            return []
        return [self._next.tell(name)]

    def lost(self, name: str) -> list[Action]:
        if self._peers.pop(name, None) is None or self._next is None:
            return []
        if not self._peers and self._next.stage is Stage.LOADING:
            return self._withdraw("no attention rank is linked any more")
        return self._settle()

    def refused(self, name: str, generation: int, attempt: int, reason: str) -> list[Action]:
        peer = self._peers.get(name)
        if peer is None:
            return []
        if generation > self._newest:
            peer.unborn = max(peer.unborn, generation)
        if self._next is None or generation != self._next.generation:
            return []
        if self._next.stage is Stage.LOADING:
            return self._withdraw(f"{name} refused it: {reason}")
        peer.refused, peer.attempt, peer.reason = True, attempt, f"{name} refused it: {reason}"
        return self._settle()

    def retired(self, name: str, generation: int, priority: Priority) -> list[Action]:
        """It uses none before `generation`, and has sent nothing for them after this, of that
        class."""
        peer = self._peers.get(name)
        if peer is None:
            return []
        peer.retired[priority] = max(peer.retired[priority], generation)
        return self._settle()

    # --- what follows

    def _settle(self) -> list[Action]:
        """What is to be done once an attention rank has said something, or is gone."""
        if self._next is None:
            return []
        generation, peers = self._next.generation, self._peers.values()
        proposed = not self._next.is_adopted
        if proposed and peers and all(peer.is_through_with(generation) for peer in peers):
            return self._withdraw("attention ranks use a newer one, which needs nothing of here")
        if self._next.stage is Stage.LOADING:
            return []
        if all(peer.refused for peer in peers):
            reasons = [peer.reason for peer in peers] or ["no attention rank is linked any more"]
            self._next = None
            failed = Report(generation, Outcome.FAILED, reasons[0])
            return [Free(generation), *[failed][:proposed]]
        if all(peer.is_through_with_those_before(generation) for peer in peers):
            before, self.current, self._next = self.current, generation, None
            return [Free(before), *[Report(generation, Outcome.RETIRED)][:proposed]]
        if not any(peer.uses(generation) for peer in peers):
            return []
        return list(self._placed_again(self._next))

    def _placed_again(self, coming: _Next) -> Iterable[Tell]:
        for name, peer in self._peers.items():
            if peer.refused:
                peer.refused = False
                yield coming.tell(name, peer.attempt)

    def _withdraw(self, reason: str) -> list[Action]:
        """Of the next one, which is not placed yet."""
        assert self._next is not None
        generation, self._next = self._next.generation, None
        return [Free(generation), *self._withdrawn(generation, reason)]

    def _withdrawn(self, generation: int, reason: str) -> list[Action]:
        telling = [
            Tell(peer, Kind.WITHDRAWN, generation, reason=reason)
            for peer in self._peers
            if generation > self.current
        ]
        return [*telling, Report(generation, Outcome.FAILED, reason)]
