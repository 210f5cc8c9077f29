"""Bounds of docs/notation.md ("Two classes on one rank") on random schedules."""

from collections import Counter

import pytest

from contracts.requests import Priority
from planner.scheduling.task_order import would_miss_due_time
from tests.support.simulated_ranks import TICKS_PER_S, Chosen, Part, Pass, Rank, World


class Account:
    """Accounts of one rank; longest_be_s, others_s: q and u so far.

    BE is served from its choice to the next choice, or to the end of its last slice there.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank, self.share = rank, rank.world.load.share
        self.longest_be_s = self.others_s = 0.0
        self.chosen_s, self.served_until_s, self.chosen = 0.0, 0.0, ""
        self.visit_s: float | None = None  # since when BE is there, as choices see it
        self.served_s = 0.0  # in this visit, and
        self.in_all_s = 0.0  # ever
        self.ls_visit_s: float | None = None
        self.ls_slices_s = self.ls_gaps_s = 0.0  # of BE, in that visit

    @property
    def room_s(self) -> float:
        """Return f times the latency of a visit."""
        return self.share * self.others_s + (1 - self.share) * self.longest_be_s

    def record_choice(self, seen: Chosen, counts: Counter[str]) -> None:
        now_s = seen.now_s
        if self.chosen == "others":
            self.others_s = max(self.others_s, now_s - self.chosen_s)
        elif self.chosen == "be":
            self._serve(now_s, slice_s=0.0)
        self._open_visits(seen)
        self.check(now_s)
        self.chosen_s = self.served_until_s = now_s
        self.chosen = "idle" if not seen.ready else "others"
        if seen.part is not None and seen.part.whole.priority is Priority.BE:
            self.chosen = "be"
        if seen.is_contended:
            check_choice(seen, self.rank.credit_s, counts)

    def ran(self, part: Part, start_s: float) -> None:
        now_s = self.rank.world.now_s
        if part.whole.priority is Priority.BE:
            self.longest_be_s = max(self.longest_be_s, now_s - start_s)
            self._serve(start_s, slice_s=0.0)
            self._serve(now_s, slice_s=now_s - start_s)
        else:
            self.others_s = max(self.others_s, now_s - self.chosen_s)
        self.check(now_s)
        there = {each.whole.priority for each in self.rank.present}
        if Priority.BE not in there:
            self.visit_s = None
        if Priority.LS not in there:
            self.ls_visit_s = None

    def check(self, now_s: float) -> None:
        credit_s, share = self.rank.credit_s, self.share
        assert -(1 - share) * self.longest_be_s <= credit_s <= share * self.others_s
        if self.visit_s is not None:
            owed_s = share * (now_s - self.visit_s) - self.room_s
            assert self.served_s >= owed_s, "BE has less than its share"
        if self.ls_visit_s is not None:
            most_s = share * (now_s - self.ls_visit_s - self.ls_gaps_s) + self.room_s
            assert self.ls_slices_s <= most_s, "LS has less than what BE's share leaves"

    def _serve(self, until_s: float, *, slice_s: float) -> None:
        seconds, self.served_until_s = until_s - self.served_until_s, until_s
        if self.visit_s is not None:
            self.served_s += seconds
            self.in_all_s += seconds
        self.ls_slices_s += slice_s
        self.ls_gaps_s += seconds - slice_s

    def _open_visits(self, seen: Chosen) -> None:
        now_s = seen.now_s
        there = {each.whole.priority for each in seen.ready}
        if Priority.BE in there and self.visit_s is None:
            waits_s = [now_s - p.arrived_s for p in seen.ready if p.whole.priority is Priority.BE]
            poll_interval_s = self.rank.world.load.poll_ticks / TICKS_PER_S
            assert max(waits_s) <= max(self.others_s, poll_interval_s), "seen at the next choice"
            self.visit_s, self.served_s = now_s, 0.0
        if Priority.LS in there and self.ls_visit_s is None:
            self.ls_visit_s, self.ls_slices_s, self.ls_gaps_s = now_s, 0.0, 0.0


def check_choice(seen: Chosen, credit_s: float, counts: Counter[str]) -> None:
    ready = {each.whole.priority for each in seen.ready}
    started = [e for e in seen.ready if e.whole.priority is Priority.BE and e.slice]
    if seen.part is None:
        assert ready == {Priority.BE}, "LS is never held"
        assert credit_s <= 0, "BE is not held while its share is owed"
        assert is_late(seen), "BE is held for a due time alone"
        counts["held"] += 1
    elif seen.part.whole.priority is Priority.BE:
        assert not started or seen.part in started, "one task of BE has begun at most"
        if credit_s > 0:
            counts["share first"] += Priority.LS in ready
        else:
            assert Priority.LS not in ready, "LS goes first"
            assert not is_late(seen), "a due time is lost"
    else:
        assert credit_s <= 0 or Priority.BE not in ready, "BE's share is owed"
        counts["preempted"] += bool(started)


def is_late(seen: Chosen) -> bool:
    return would_miss_due_time(seen.live, seen.slice_s, seen.now_s)


class Watch:
    """Both accounts and the passes of BE, one at a time in order of arrival."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.accounts: dict[Rank, Account] = {}
        self.passes: list[Pass] = []
        self.ended_be = 0

    def on_choice(self, rank: Rank, seen: Chosen) -> None:
        self._of(rank).record_choice(seen, self.counts)

    def ran(self, rank: Rank, part: Part, start_s: float) -> None:
        self._of(rank).ran(part, start_s)
        whole = part.whole
        if whole.priority is Priority.BE:
            if whole not in self.passes:
                self.passes.append(whole)
            self.ended_be = sum(each.ended_s is not None for each in self.passes)

    def over(self, world: World) -> None:
        """Every pass, and every pass behind others, within its bound."""
        visits = [world.load.layers + 1, world.load.layers]
        latency_s, work_s = 0.0, 0.0
        accounts = [self._of(rank) for rank in world.ranks]
        for place, account in enumerate(accounts):
            late_s = max(account.others_s, world.load.poll_ticks / TICKS_PER_S)
            room_s = world.load.share * late_s + account.room_s
            latency_s += world.load.micro_batches * visits[place] * room_s
            work_s += account.in_all_s
        for ahead, whole in enumerate(self.passes):
            self.counts["ended"] += whole.ended_s is not None
            until_s = world.now_s if whole.ended_s is None else whole.ended_s
            transit_s = sum(each.transit_s for each in self.passes[: ahead + 1])
            elapsed_s = until_s - whole.arrived_s - transit_s
            assert world.load.share * elapsed_s <= work_s + (ahead + 1) * latency_s

    def _of(self, rank: Rank) -> Account:
        if rank not in self.accounts:
            self.accounts[rank] = Account(rank)
        return self.accounts[rank]


def simulate(seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    World(seed, Watch(counts)).run()
    return counts


@pytest.mark.parametrize(
    "schedules",
    [100, pytest.param(950, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.slow)],
)
def test_share_bounds_hold_in_random_schedules(schedules: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(schedules):
        counts += simulate(seed)
    assert min(counts[what] for what in ("held", "share first", "preempted", "ended")) > schedules
