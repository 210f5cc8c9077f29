"""The fair queue: no loss, no starvation, bounded shares."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planner.scheduling.fair_queue import FairQueue, fair_level

few = settings(deadline=None, max_examples=100)
tenants = st.integers(0, 2)
requests = st.integers(0, 3)
costs = st.integers(1, 50)


class Waiting(RuleBasedStateMachine):
    """Random pushes, pops, removals and returns against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: FairQueue[int] = FairQueue()
        self.lines: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.pushed = 0

    @rule(tenant=tenants, request=requests, cost=costs, again=st.booleans())
    def push(self, tenant: int, request: int, cost: int, again: bool) -> None:
        item, self.pushed = self.pushed, self.pushed + 1
        self.turns.push(item, tenant, (tenant, request), cost=cost, again=again)
        line = self.lines[tenant, request]
        line.insert(0 if again else len(line), item)

    @precondition(lambda self: len(self.turns) > 0)
    @rule()
    def pop(self) -> None:
        expected = list(self.turns)
        order = [self.turns.peek()]
        item = self.turns.pop()
        assert order == [item]
        assert [item, *self.turns] == expected, "the others go on as foretold"
        (line,) = [line for line in self.lines.values() if item in line]
        assert line[0] == item, "first come, first served within a request"
        line.remove(item)

    @precondition(lambda self: len(self.turns) > 0)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from([line for line in self.lines.values() if line]))
        item = data.draw(st.sampled_from(line))
        assert self.turns.remove(item) == item
        line.remove(item)

    @invariant()
    def no_item_is_lost(self) -> None:
        items = [item for line in self.lines.values() for item in line]
        assert len(self.turns) == len(items)
        assert sorted(self.turns) == sorted(items)
        assert all(item in self.turns for item in items)
        assert (self.turns.peek() is None) == (not items)


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def pop_all(turns: FairQueue[int]) -> list[int]:
    return [turns.pop() for _ in range(len(turns))]


@few
@given(st.lists(st.tuples(tenants, requests, costs), min_size=2, max_size=60))
def test_concurrent_waiters_get_equal_service_within_one_item(
    pushed: list[tuple[int, int, int]],
) -> None:
    """Between tenants and between one tenant's requests, while both wait."""
    turns: FairQueue[int] = FairQueue()
    for item, (tenant, request, cost) in enumerate(pushed):
        turns.push(item, tenant, (tenant, request), cost=cost)
    order = pop_all(turns)
    for level in (1, 2):  # by tenant; by tenant and request
        given_: Counter[Sequence[int]] = Counter()
        largest: Counter[Sequence[int]] = Counter()
        left = Counter(each[:level] for each in pushed)
        for each in pushed:
            largest[each[:level]] = max(largest[each[:level]], each[2])
        for item in order:
            key = pushed[item][:level]
            beside = [k for k in left if left[k] and (level == 1 or k[0] == key[0])]
            given_[key] += pushed[item][2]
            left[key] -= 1
            for other in beside:
                if left[other]:
                    assert given_[key] - given_[other] <= largest[key] + largest[other]


@few
@given(st.integers(1, 200), st.integers(0, 3), costs, st.integers(1, 20))
def test_new_tenant_waits_one_turn_of_each_other_tenant(
    lined_up: int, others: int, cost: int, popped: int
) -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(lined_up):
        for other in range(others + 1):
            turns.push(f"{other}: {number}", other, 0, cost=cost)
    for _ in range(min(popped, lined_up)):
        turns.pop()
    turns.push("new", "new", 0, cost=cost)
    assert list(turns).index("new") <= 2 * (others + 1)
    turns.push("of an old tenant", 0, "new", cost=cost)
    assert list(turns).index("of an old tenant") <= 4 * (others + 2)


def test_new_arrivals_never_starve_a_waiting_item() -> None:
    """A new request arrives before every turn."""
    for same_tenant in (True, False):
        turns: FairQueue[str] = FairQueue()
        for number in range(8):
            turns.push(f"old {number}", 0, "old")
        served = []
        for number in range(60):
            turns.push(f"new {number}", 0 if same_tenant else f"t{number}", f"new {number}")
            served.append(turns.pop())
        assert sum(item.startswith("old") for item in served) >= 6


@few
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_fair_level_is_the_highest_feasible_limit(counts: list[int], places: int) -> None:
    level = fair_level(counts, places)

    def taken(each: int) -> int:
        return sum(min(count, each) for count in counts)

    assert level >= 1
    assert level == 1 or taken(level) <= places
    assert taken(level) == sum(counts) or taken(level + 1) > places
