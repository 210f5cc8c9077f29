"""Expert ranks that an attention rank can use, and the failover placement after losses.

A state machine without I/O, threads or a clock.

    all ready            expert-1 is lost             new expert-1 is ready
    base ──────────────> base, requests wait ──────────────────────────> base
                            │  ACQUIRE failover ──> READY from all others
                            └────────────────────> failover ──────────> base, RELEASE failover

Ranks outside the current generation are neither ready nor absent. A rank that sends DRAINING is
replaced like a lost one, but stays in use until then; DRAINING is then returned to it.

A rank can serve a generation after READY: sent when it joins, or as the answer to an ACQUIRE, whose
attempt it carries. Acquiring a released failover placement again is a new attempt; a late answer to
the previous attempt is ignored.

Every attention rank decides on its own. The failover placement is a pure function of the generation
and the lost ranks (planner/placement/resize.py), so that ranks which see the same loss acquire the
same placement.
"""

from collections.abc import Collection
from typing import Final

from actors.channels.base import PacketKind
from actors.moe.backend import MissingRank
from actors.rebalance.expert_generations import LAUNCH_ATTEMPT, PlacementMessage
from contracts.placement import Placement
from contracts.ranks import Group, rank_names
from planner.placement.resize import failover_placement, is_failover

_SETTLED_S: Final = 0.5  # a rank not linked by then is lost


class ExpertMembership:
    """base: the current generation. placement: it, or its failover placement, for new layers.

    changes: number of state changes. Methods return packets to send.
    """

    def __init__(self, base: Placement) -> None:
        self.base = self.placement = base
        self.changes = 0
        self.absent: dict[str, MissingRank] = {}
        self._ready: dict[str, set[int]] = {}  # generations, by linked rank
        self._requests: dict[str, dict[int, int]] = {}  # attempt by rank and generation
        self._attempts = LAUNCH_ATTEMPT
        self._draining: dict[str, bool] = {}  # True once DRAINING was returned
        self._unwilling: set[int] = set()
        self._target: Placement | None = None  # failover placement to acquire

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the ranks of the current generation."""
        return rank_names(Group.EXPERT, self.base.ranks)

    def can_serve(self, expert: str, generation: int) -> bool:
        """Return True if the rank is ready for that generation."""
        return generation in self._ready.get(expert, ())

    def requested(self, generation: int) -> Placement | None:
        """Return the placement of a generation that is being acquired."""
        known = (self.base, self._target)
        return next((one for one in known if one and one.generation == generation), None)

    # --- from expert ranks

    def add_peer(self, expert: str) -> None:
        self._ready[expert], self._requests[expert] = set(), {}
        self._draining.pop(expert, None)

    def mark_ready(
        self, expert: str, generation: int, now_s: float, attempt: int = LAUNCH_ATTEMPT
    ) -> list[PlacementMessage]:
        """Handle READY. attempt: of its ACQUIRE; LAUNCH_ATTEMPT: unsolicited."""
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

    def add_abort_vote(self, expert: str, generation: int, now_s: float) -> list[PlacementMessage]:
        """Handle a refused ACQUIRE."""
        requests = self._requests.get(expert, {})
        if generation not in requests:
            return []
        if not is_failover(generation):
            del requests[generation]
            return []
        self._unwilling.add(generation)
        return self.settle(now_s)

    def remove_peer(
        self, expert: str, reason: str, epoch: int, now_s: float
    ) -> list[PlacementMessage]:
        self._ready.pop(expert, None)
        self._requests.pop(expert, None)
        self._draining.pop(expert, None)
        before = self.absent.get(expert)
        since_s = before.since_s if before is not None and before.is_lost else now_s
        self.absent[expert] = MissingRank(reason, epoch, since_s, True)
        return self.settle(now_s)

    def start_draining(self, expert: str, now_s: float) -> list[PlacementMessage]:
        """Handle DRAINING: use the rank until others have its experts."""
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
        """Switch to another generation, which `holders` have."""
        self.base = base
        for expert in self._ready.keys() & set(holders):
            self._ready[expert].add(base.generation)
        if not is_failover(self.placement.generation):
            self.placement = base  # no earlier generation may be used
        return self.settle(now_s)

    def poll(self, now_s: float) -> list[PlacementMessage]:
        """Declare ranks lost that did not link in time."""
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
        """Update the missing ranks, the failover placement and what is in use."""
        self.changes += 1
        base, experts = self.base.generation, self.experts
        for expert in self.absent.keys() - set(experts):
            del self.absent[expert]
        for expert in experts:
            if self.can_serve(expert, base) and expert not in self._draining:
                self.absent.pop(expert, None)
            elif expert not in self.absent:
                reason = f"{expert} has not reported its experts"
                self.absent[expert] = MissingRank(reason, 0, now_s, False)
        self._target = self._stand_in()
        present = [expert for expert in experts if expert not in self.absent]
        late = [expert for expert in self.absent if self._ready.get(expert)]
        messages = [message for expert in late for message in self._request(expert, base)]
        if not self.absent:
            self._unwilling.clear()
            self.placement = self.base
        elif self._target is not None:
            requested = self._target.generation
            messages += [
                message for expert in present for message in self._request(expert, requested)
            ]
            if self.placement != self._target and all(
                self.can_serve(e, requested) for e in present
            ):
                self.placement = self._target
        return messages

    def release_unused(self, in_use: Collection[int]) -> list[PlacementMessage]:
        """Release failover placements that are neither needed nor in_use."""
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
        """Return the draining ranks that will receive nothing more."""
        return [
            expert
            for expert, has_gone in self._draining.items()
            if not has_gone and (expert not in self.experts or self.placement == self._target)
        ]

    @property
    def has_unused(self) -> bool:
        """True if leases or draining ranks can be released."""
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
