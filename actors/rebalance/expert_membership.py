"""Which expert ranks an attention rank can ask for what, and who stands in for those that are lost:
a small machine without I/O, threads or a clock.

    all there            lost: expert-1               another expert-1
    base ──────────────> base, its part waits ─────────────────────────> base
                            │  WANTED stand-in ──> HELD by all others
                            └────────────────────> stand-in ───────────> base, LEFT stand-in

Ranks that the present generation is not on, because they have come for the next one or may go, are
neither there nor absent. One that says LEAVING is stood in for like a lost one, but asked until
that is so; then LEAVING is said back to it.

A rank can be asked for the experts of a generation once it has said HELD of it: by itself when it
is joined, later as an answer to a WANTED, whose attempt it says. A stand-in that was left and is
wanted again is a new attempt, and the late answer to the one before counts for nothing.

Every attention rank decides by itself: what stands in is a pure function of the generation and of
who is lost (planner/placement/failover.py), so that all that see the same loss want the same of the
others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from actors.channels.base import PacketKind
from actors.rebalance.expert_generations import LAUNCH_ATTEMPT, PlacementMessage
from contracts.placement import Placement
from contracts.ranks import Group, rank_names
from planner.placement.failover import failover_placement, is_failover

_SETTLED_S: Final = 0.5  # who is not linked by then counts as lost


class MissingRank(NamedTuple):
    """Of a rank without the present generation's experts. epoch: of the one that was lost."""

    reason: str
    epoch: int
    since_s: float
    is_lost: bool


class ExpertMembership:
    """base: the present generation. placement: what the next layer is dispatched by, `base` or what
    stands in for it. changes: how often any of this has changed. stood_in: how often another
    placement than `base` was taken up. Methods return the packets to send, in order."""

    def __init__(self, base: Placement) -> None:
        self.base = self.placement = base
        self.changes = self.stood_in = 0
        self.absent: dict[str, MissingRank] = {}
        self.abort_reason = ""  # why nothing stands in; empty: nobody said no
        self._ready: dict[str, set[int]] = {}  # of those that are linked: what they have said
        self._requests: dict[str, dict[int, int]] = {}  # generations, and the attempt of each
        self._attempts = LAUNCH_ATTEMPT
        self._draining: dict[str, bool] = {}  # those that are to go: whether they have been let go
        self._unwilling: set[int] = set()
        self._target: Placement | None = None  # a stand-in that is wanted

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the ranks that the present generation is on."""
        return rank_names(Group.EXPERT, self.base.ranks)

    def can_serve(self, expert: str, generation: int) -> bool:
        """Whether it can be asked for that."""
        return generation in self._ready.get(expert, ())

    def requested(self, generation: int) -> Placement | None:
        """That it asks for; None: no more."""
        known = (self.base, self._target)
        return next((one for one in known if one and one.generation == generation), None)

    # --- from expert ranks

    def joined(self, expert: str) -> None:
        self._ready[expert], self._requests[expert] = set(), {}
        self._draining.pop(expert, None)

    def mark_ready(
        self, expert: str, generation: int, now_s: float, attempt: int = LAUNCH_ATTEMPT
    ) -> list[PlacementMessage]:
        """attempt: of the WANTED that this answers; LAUNCH_ATTEMPT: it says so by itself, which
        nobody does of a stand-in."""
        if expert not in self._ready:
            return []
        if attempt == LAUNCH_ATTEMPT and not is_failover(generation):
            known = {self.base.generation, *self._requests[expert]}
            self._ready[expert] = self._ready[expert] & known | {generation}
        elif attempt == self._requests[expert].get(generation):
            self._ready[expert].add(generation)
        else:
            return []
        return self.settle(now_s)

    def add_abort_vote(
        self, expert: str, generation: int, reason: str, now_s: float
    ) -> list[PlacementMessage]:
        """It will not have that."""
        requests = self._requests.get(expert, {})
        if generation not in requests:
            return []
        if not is_failover(generation):
            del requests[generation]
            return []
        self._unwilling.add(generation)
        self.abort_reason = reason
        return self.settle(now_s)

    def lost(self, expert: str, reason: str, epoch: int, now_s: float) -> list[PlacementMessage]:
        self._ready.pop(expert, None)
        self._requests.pop(expert, None)
        self._draining.pop(expert, None)
        before = self.absent.get(expert)
        since_s = before.since_s if before is not None and before.is_lost else now_s
        self.absent[expert] = MissingRank(reason, epoch, since_s, True)
        return self.settle(now_s)

    def start_draining(self, expert: str, now_s: float) -> list[PlacementMessage]:
        """It is to go, and is asked until others stand in."""
        if expert not in self._ready or expert in self._draining:
            return []
        self._draining[expert] = False
        if expert in self.experts:
            self.absent[expert] = MissingRank(f"{expert} leaves", 0, now_s, True)
        return self.settle(now_s)

    # --- from the rank itself

    def switch_to(
        self, base: Placement, holders: Collection[str], now_s: float
    ) -> list[PlacementMessage]:
        """To another generation, which those have."""
        self.base = base
        for expert in self._ready.keys() & set(holders):
            self._ready[expert].add(base.generation)
        if not is_failover(self.placement.generation):
            self.placement = base  # nothing before it may be asked for any more
        return self.settle(now_s)

    def poll(self, now_s: float) -> list[PlacementMessage]:
        """What is due by now."""
        late = [
            (expert, missing_rank)
            for expert, missing_rank in self.absent.items()
            if not missing_rank.is_lost
            and expert not in self._ready
            and now_s - missing_rank.since_s >= _SETTLED_S
        ]
        for expert, missing_rank in late:
            self.absent[expert] = missing_rank._replace(is_lost=True)
        return self.settle(now_s) if late else []

    def settle(self, now_s: float) -> list[PlacementMessage]:
        """Who is there, what is wanted of them, and what is used."""
        self.changes += 1
        base, experts = self.base.generation, self.experts
        for expert in self.absent.keys() - set(experts):
            del self.absent[expert]
        for expert in experts:
            if self.can_serve(expert, base) and expert not in self._draining:
                self.absent.pop(expert, None)
            elif expert not in self.absent:
                reason = f"{expert} has not said what it has"
                self.absent[expert] = MissingRank(reason, 0, now_s, False)
        self._target = self._stand_in()
        present = [expert for expert in experts if expert not in self.absent]
        late = [expert for expert in self.absent if self._ready.get(expert)]
        messages = [message for expert in late for message in self._request(expert, base)]
        if not self.absent:
            self._unwilling.clear()
            self.placement, self.abort_reason = self.base, ""
        elif self._target is not None:
            requested = self._target.generation
            messages += [
                message for expert in present for message in self._request(expert, requested)
            ]
            if self.placement != self._target and all(
                self.can_serve(e, requested) for e in present
            ):
                self.placement = self._target
                self.stood_in += 1
        return messages

    def release_unused(self, in_use: Collection[int]) -> list[PlacementMessage]:
        """Of stand-ins that are not needed any more. in_use: by what is under way."""
        messages = []
        for expert, requests in self._requests.items():
            for generation in [one for one in requests if self._is_unused(one)]:
                if generation not in in_use:
                    del requests[generation]
                    self._ready[expert].discard(generation)
                    messages.append(PlacementMessage(expert, PacketKind.RELEASE, generation))
        if set(in_use) <= {self.placement.generation}:
            for expert in self._drained():
                self._draining[expert] = True
                messages.append(PlacementMessage(expert, PacketKind.DRAINING, self.base.generation))
        return messages

    def _drained(self) -> list[str]:
        """Those that are to go, and that nothing more will be asked of."""
        return [
            expert
            for expert, has_gone in self._draining.items()
            if not has_gone and (expert not in self.experts or self.placement == self._target)
        ]

    @property
    def has_unused(self) -> bool:
        """Whether there are any, or ranks that may go, but for what is under way."""
        return bool(self._drained()) or any(
            self._is_unused(one) for requests in self._requests.values() for one in requests
        )

    def _is_unused(self, generation: int) -> bool:
        kept = {self.placement.generation, self._target.generation if self._target else -1}
        return is_failover(generation) and generation not in kept

    def _request(self, expert: str, generation: int) -> list[PlacementMessage]:
        if generation in self._requests[expert] or self.can_serve(expert, generation):
            return []
        self._attempts += 1
        self._requests[expert][generation] = self._attempts
        return [PlacementMessage(expert, PacketKind.ACQUIRE, generation, self._attempts)]

    def _stand_in(self) -> Placement | None:
        if not any(missing_rank.is_lost for missing_rank in self.absent.values()):
            return None
        lost = [rank for rank, expert in enumerate(self.experts) if expert in self.absent]
        found = failover_placement(self.base, lost)
        return None if found is None or found.generation in self._unwilling else found
