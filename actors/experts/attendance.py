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
who is lost (planner/placement/stand_in.py), so that all that see the same loss want the same of the
others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from actors.channels.base import Kind
from actors.experts.generations import LAUNCH_ATTEMPT, Tell
from contracts.placement import Placement
from contracts.worker import Group, rank_names
from planner.placement.stand_in import is_stand_in, stand_in

_SETTLED_S: Final = 0.5  # who is not linked by then counts as lost


class Absence(NamedTuple):
    """Of a rank without the present generation's experts. epoch: of the one that was lost."""

    reason: str
    epoch: int
    since_s: float
    is_lost: bool


class Attendance:
    """base: the present generation. placement: what the next layer is dispatched by, `base` or what
    stands in for it. changes: how often any of this has changed. stood_in: how often another
    placement than `base` was taken up. Methods return the packets to send, in order."""

    def __init__(self, base: Placement) -> None:
        self.base = self.placement = base
        self.changes = self.stood_in = 0
        self.absent: dict[str, Absence] = {}
        self.refused = ""  # why nothing stands in; empty: nobody said no
        self._held: dict[str, set[int]] = {}  # of those that are linked: what they have said
        self._asked: dict[str, dict[int, int]] = {}  # generations, and the attempt of each
        self._attempts = LAUNCH_ATTEMPT
        self._leaving: dict[str, bool] = {}  # those that are to go: whether they have been let go
        self._unwilling: set[int] = set()
        self._target: Placement | None = None  # a stand-in that is wanted

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the ranks that the present generation is on."""
        return rank_names(Group.EXPERT, self.base.ranks)

    def can(self, expert: str, generation: int) -> bool:
        """Whether it can be asked for that."""
        return generation in self._held.get(expert, ())

    def wanted(self, generation: int) -> Placement | None:
        """That it asks for; None: no more."""
        known = (self.base, self._target)
        return next((one for one in known if one and one.generation == generation), None)

    # --- from expert ranks

    def joined(self, expert: str) -> None:
        self._held[expert], self._asked[expert] = set(), {}
        self._leaving.pop(expert, None)

    def held(
        self, expert: str, generation: int, now_s: float, attempt: int = LAUNCH_ATTEMPT
    ) -> list[Tell]:
        """attempt: of the WANTED that this answers; LAUNCH_ATTEMPT: it says so by itself, which
        nobody does of a stand-in."""
        if expert not in self._held:
            return []
        if attempt == LAUNCH_ATTEMPT and not is_stand_in(generation):
            known = {self.base.generation, *self._asked[expert]}
            self._held[expert] = self._held[expert] & known | {generation}
        elif attempt == self._asked[expert].get(generation):
            self._held[expert].add(generation)
        else:
            return []
        return self.settle(now_s)

    def withdrawn(self, expert: str, generation: int, reason: str, now_s: float) -> list[Tell]:
        """It will not have that."""
        asked = self._asked.get(expert, {})
        if generation not in asked:
            return []
        if not is_stand_in(generation):
            del asked[generation]
            return []
        self._unwilling.add(generation)
        self.refused = reason
        return self.settle(now_s)

    def lost(self, expert: str, reason: str, epoch: int, now_s: float) -> list[Tell]:
        self._held.pop(expert, None)
        self._asked.pop(expert, None)
        self._leaving.pop(expert, None)
        before = self.absent.get(expert)
        since_s = before.since_s if before is not None and before.is_lost else now_s
        self.absent[expert] = Absence(reason, epoch, since_s, True)
        return self.settle(now_s)

    def leaving(self, expert: str, now_s: float) -> list[Tell]:
        """It is to go, and is asked until others stand in."""
        if expert not in self._held or expert in self._leaving:
            return []
        self._leaving[expert] = False
        if expert in self.experts:
            self.absent[expert] = Absence(f"{expert} leaves", 0, now_s, True)
        return self.settle(now_s)

    # --- from the rank itself

    def went_over(self, base: Placement, holders: Collection[str], now_s: float) -> list[Tell]:
        """To another generation, which those have."""
        self.base = base
        for expert in self._held.keys() & set(holders):
            self._held[expert].add(base.generation)
        if not is_stand_in(self.placement.generation):
            self.placement = base  # nothing before it may be asked for any more
        return self.settle(now_s)

    def look(self, now_s: float) -> list[Tell]:
        """What is due by now."""
        late = [
            (expert, absence)
            for expert, absence in self.absent.items()
            if not absence.is_lost
            and expert not in self._held
            and now_s - absence.since_s >= _SETTLED_S
        ]
        for expert, absence in late:
            self.absent[expert] = absence._replace(is_lost=True)
        return self.settle(now_s) if late else []

    def settle(self, now_s: float) -> list[Tell]:
        """Who is there, what is wanted of them, and what is used."""
        self.changes += 1
        base, experts = self.base.generation, self.experts
        for expert in self.absent.keys() - set(experts):
            del self.absent[expert]
        for expert in experts:
            if self.can(expert, base) and expert not in self._leaving:
                self.absent.pop(expert, None)
            elif expert not in self.absent:
                reason = f"{expert} has not said what it has"
                self.absent[expert] = Absence(reason, 0, now_s, False)
        self._target = self._stand_in()
        present = [expert for expert in experts if expert not in self.absent]
        late = [expert for expert in self.absent if self._held.get(expert)]
        telling = [tell for expert in late for tell in self._ask(expert, base)]
        if not self.absent:
            self._unwilling.clear()
            self.placement, self.refused = self.base, ""
        elif self._target is not None:
            wanted = self._target.generation
            telling += [tell for expert in present for tell in self._ask(expert, wanted)]
            if self.placement != self._target and all(self.can(e, wanted) for e in present):
                self.placement = self._target
                self.stood_in += 1
        return telling

    def leave(self, in_use: Collection[int]) -> list[Tell]:
        """Of stand-ins that are not needed any more. in_use: by what is under way."""
        telling = []
        for expert, asked in self._asked.items():
            for generation in [one for one in asked if self._is_over(one)]:
                if generation not in in_use:
                    del asked[generation]
                    self._held[expert].discard(generation)
                    telling.append(Tell(expert, Kind.LEFT, generation))
        if set(in_use) <= {self.placement.generation}:
            for expert in self._needless():
                self._leaving[expert] = True
                telling.append(Tell(expert, Kind.LEAVING, self.base.generation))
        return telling

    def _needless(self) -> list[str]:
        """Those that are to go, and that nothing more will be asked of."""
        return [
            expert
            for expert, has_gone in self._leaving.items()
            if not has_gone and (expert not in self.experts or self.placement == self._target)
        ]

    @property
    def is_over(self) -> bool:
        """Whether there are any, or ranks that may go, but for what is under way."""
        return bool(self._needless()) or any(
            self._is_over(one) for asked in self._asked.values() for one in asked
        )

    def _is_over(self, generation: int) -> bool:
        kept = {self.placement.generation, self._target.generation if self._target else -1}
        return is_stand_in(generation) and generation not in kept

    def _ask(self, expert: str, generation: int) -> list[Tell]:
        if generation in self._asked[expert] or self.can(expert, generation):
            return []
        self._attempts += 1
        self._asked[expert][generation] = self._attempts
        return [Tell(expert, Kind.WANTED, generation, self._attempts)]

    def _stand_in(self) -> Placement | None:
        if not any(absence.is_lost for absence in self.absent.values()):
            return None
        lost = [rank for rank, expert in enumerate(self.experts) if expert in self.absent]
        found = stand_in(self.base, lost)
        return None if found is None or found.generation in self._unwilling else found
