"""Leases: loaded once, kept while needed, freed afterwards.

Random orders of acquire, use, release, loss, load and failure, on links that keep the order within
a class only and that may delay answers.
"""

import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.channels.base import PacketKind
from actors.rebalance.expert_rebalancer import MOST, PlacementLeases
from actors.rebalance.placement_generations import PlacementMessage
from contracts.placement import Placement
from contracts.requests import Priority
from planner.placement.resize import MAX_FAILOVER_RANKS, is_failover
from tests.support.simulated_generations import proposal

NAMES = ("attention-0", "attention-1", "attention-2")
STAND_INS = tuple(
    (base + 1 << MAX_FAILOVER_RANKS) | 1 << rank for base in (1, 2) for rank in (0, 1)
)
GENERATIONS = (1, 2, *STAND_INS)


class World:
    """An expert rank and packets in flight. there: loaded generations. broken: violations."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = PlacementLeases()
        self.resident: set[int] = set()
        self.loading: int | None = None
        self.reads: list[int] = []
        self.broken: list[str] = []
        self.attentions = {name: Attention(self, name) for name in NAMES}
        self._links: dict[tuple[str, Priority], deque[Callable[[], None]]] = defaultdict(deque)
        self._answers: dict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            acts = [attention.act for attention in self.attentions.values()]
            self.random.choice([self._deliver, self._deliver, self._read, *acts])()

    def settle(self) -> None:
        """Deliver all packets and complete all loads."""
        while any([*self._links.values(), *self._answers.values()]) or self.loading is not None:
            self._deliver()
            self._read()

    def send(self, name: str, priority: Priority, arrives: Callable[[], None]) -> None:
        self._links[name, priority].append(arrives)

    def lose(self, name: str) -> None:
        """Drop the packets in flight."""
        for priority in Priority:
            self._links[name, priority].clear()
        self._answers[name].clear()
        self.machine.remove_peer(name)
        self.do()

    def want(self, name: str, placement: Placement, attempt: int) -> None:
        generation = placement.generation
        resident, refuses = generation in self.resident, self.random.random() < 0.1
        misfit = "" if resident or not refuses else "it does not fit"
        self.do(self.machine.acquire(name, placement, attempt, resident=resident, misfit=misfit))

    def use(self, name: str, generation: int) -> None:
        if generation not in self.resident:
            self.broken.append(f"{name} needs {generation}, which was let go of")

    def do(self, messages: Iterable[PlacementMessage] = ()) -> None:
        self.resident.intersection_update(self.machine.needed)
        loading = self.machine.loading
        if loading is None:
            self.loading = None
        elif loading.generation != self.loading:
            self._begin(loading.generation)
        for message in messages:
            if message.kind is PacketKind.READY and message.generation not in self.resident:
                self.broken.append(f"{message.generation} is said to be there")
            receive = functools.partial(self.attentions[message.peer].receive, message)
            self._answers[message.peer].append(receive)

    def _begin(self, generation: int) -> None:
        if generation in self.resident:
            self.broken.append(f"{generation} is read beside {self.resident}")
        if self.loading in self.machine.needed:
            self.broken.append(f"{generation} is read before {self.loading}")
        self.loading = generation
        self.reads.append(generation)

    def _read(self) -> None:
        """Complete or fail the load."""
        generation, self.loading = self.loading, None
        if generation is None:
            return
        if self.random.random() < 0.2:
            self.do(self.machine.failed(generation, "it cannot be read"))
        else:
            self.resident.add(generation)
            self.do(self.machine.loaded(generation))

    def _deliver(self) -> None:
        under_way = [link for link in (*self._links.values(), *self._answers.values()) if link]
        if under_way:
            self.random.choice(under_way).popleft()()


class Attention:
    """wants: what it has asked for and not left, in which attempt. holds: what of it is there, so
    that it may use it. A planner's generation is never left, but retired by a later one."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self._attempts = 0
        self._begin()

    def _begin(self) -> None:
        self.wants: dict[int, int] = {}
        self.holds: set[int] = set()
        self._retired_before = 0

    def receive(self, message: PlacementMessage) -> None:
        """Ignore a late answer to a released lease."""
        if message.generation not in self.wants:
            return
        if message.kind is PacketKind.READY:
            if message.attempt == self.wants[message.generation]:
                self.holds.add(message.generation)
        elif is_failover(message.generation):
            self.leave(message.generation)
        else:
            del self.wants[message.generation]

    def act(self) -> None:
        generation = self.world.random.choice(GENERATIONS)
        if generation < self._retired_before:
            return
        if generation not in self.wants:
            self._attempts += 1
            self.wants[generation] = self._attempts
            placement = proposal(generation, 1)
            wants = functools.partial(self.world.want, self.name, placement, self._attempts)
            self.world.send(self.name, Priority.LS, wants)
        elif generation in self.holds and self.world.random.random() < 0.6:
            uses = functools.partial(self.world.use, self.name, generation)
            self.world.send(self.name, self.world.random.choice(list(Priority)), uses)
        elif self.world.random.random() < 0.1:
            self.end()
        elif is_failover(generation):
            self.leave(generation)
        else:
            self.retire(generation)

    def leave(self, generation: int) -> None:
        self.wants.pop(generation, None)
        self.holds.discard(generation)
        self._in_each_class(self.world.machine.release, generation)

    def end(self) -> None:
        """Replace the rank by one without leases."""
        self._begin()
        self.world.lose(self.name)

    def retire(self, generation: int) -> None:
        """Switch to a planner's generation."""
        self._retired_before = generation
        before = {one for one in self.wants if one < generation and not is_failover(one)}
        self.wants = {one: attempt for one, attempt in self.wants.items() if one not in before}
        self.holds -= before
        self._in_each_class(self.world.machine.committed, generation)

    def _in_each_class(
        self, operation: Callable[[str, int, Priority], None], generation: int
    ) -> None:
        def arrive(priority: Priority) -> None:
            operation(self.name, generation, priority)
            self.world.do()

        for priority in Priority:
            self.world.send(self.name, priority, functools.partial(arrive, priority))


@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 400))
def test_leased_placements_stay_loaded_and_unleased_ones_are_freed(seed: int, steps: int) -> None:
    world = World(seed)
    world.run(steps)
    world.settle()
    assert not world.broken
    needed = {one for each in world.attentions.values() for one in each.holds}
    waiting = {o for each in world.attentions.values() for o in each.wants.keys() - each.holds}
    assert world.resident == needed
    assert not waiting, "it is there, or they know that it will not be"
    for attention in world.attentions.values():
        for generation in filter(is_failover, list(attention.wants)):
            attention.leave(generation)
        attention.retire(3)
    world.settle()
    assert not world.resident
    assert not world.machine.needed


@given(seed=st.integers(0, 1 << 32), wanted=st.permutations(GENERATIONS))
def test_generations_are_loaded_once_in_order_of_acquisition(seed: int, wanted: list[int]) -> None:
    world = World(seed)
    for generation in wanted:
        for name in world.random.sample(NAMES, 3):
            placement = proposal(generation, 1)
            world.do(world.machine.acquire(name, placement, 1, resident=False, misfit=""))
    assert world.reads == wanted[:1]
    while world.loading is not None:
        generation, world.loading = world.loading, None
        world.resident.add(generation)
        world.do(world.machine.loaded(generation))
    assert world.reads == wanted
    assert not world.broken


def test_ready_carries_acquire_attempt_while_release_is_in_flight() -> None:
    machine, generation = PlacementLeases(), STAND_INS[0]
    placement = proposal(generation, 1)
    machine.acquire("attention-0", placement, 1, resident=False, misfit="")
    machine.release("attention-0", generation, Priority.LS)
    assert not machine.acquire("attention-0", placement, 2, resident=False, misfit="")
    assert machine.loaded(generation) == [
        PlacementMessage("attention-0", PacketKind.READY, generation, 2, placement=placement)
    ]
    machine.release("attention-0", generation, Priority.BE)
    assert generation in machine.needed, "that was of the first"


@pytest.mark.parametrize("operation", ["left", "refused", "wanted"])
def test_rank_exceeding_lease_limit_is_rejected_and_forgotten(operation: str) -> None:
    """Leases of other ranks stay."""
    machine, good = PlacementLeases(), STAND_INS[0]
    assert not machine.acquire("attention-0", proposal(good, 1), 1, resident=False, misfit="")
    assert machine.loading == proposal(good, 1)

    def send_one(number: int) -> None:
        generation = number if operation == "wanted" else (number << MAX_FAILOVER_RANKS) | 1
        if operation == "left":
            for priority in Priority:
                machine.release("attention-1", generation, priority)
            return
        misfit = "no room" if operation == "refused" else ""
        machine.acquire("attention-1", proposal(generation, 1), 1, resident=False, misfit=misfit)

    for number in range(1, MOST + 1):
        send_one(number)
        send_one(number)
    with pytest.raises(ValueError, match=rf"attention-1 holds {MOST + 1} generations .* {MOST} at"):
        send_one(MOST + 1)
    machine.remove_peer("attention-1")
    assert good in machine.needed
    send_one(1)
    machine.remove_peer("attention-1")
    assert set(machine.needed) == {good}
    for priority in Priority:
        machine.release("attention-0", good, priority)
    assert not any(vars(machine)[name] for name in ("_by", "_placements", "_unloaded"))
    assert vars(machine)["_owed"] == {"attention-0": {}}
