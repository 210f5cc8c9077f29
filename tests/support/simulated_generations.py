"""Both ends of the placement protocol on a simulated wire.

Links keep the order within a class only, with any delay. Faults: lost ranks, a planner that reaches
only some ranks, failing or slow loads, dropped batches.
"""

import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from actors.channels.base import PacketKind
from actors.rebalance.placement_generations import (
    Action,
    AttentionGenerations,
    ExpertGenerations,
    PlacementMessage,
    TransitionReport,
)
from contracts.placement import Placement
from contracts.planner_messages import MoveOutcome
from contracts.ranks import Group, rank_names
from contracts.requests import Priority

DEADLINE_S = 10.0
TRAFFIC_S = 100.0
SPARE = 2  # expert ranks that are joined and that the launch's placement is not on


def proposal(generation: int, ranks: int, variant: int = 0) -> Placement:
    """Return one expert on each rank; each variant has another one."""
    return Placement(
        num_experts=1,
        generation=generation,
        slots_per_rank=(1,) * ranks,
        expert_of_slot=((0,) * ranks,) * (variant + 1),
    )


class Faults(NamedTuple):
    """Probabilities, or times of the whole run."""

    load_fails: float = 0.0
    load_late: float = 0.0
    proposal_lost: float = 0.0  # on its way to one rank
    placement_mismatch: float = 0.0  # one rank is told another than the rest
    deaths: int = 0  # of attention ranks
    expert_dies: bool = False
    impatient: bool = False  # attention ranks have half the patience of expert ranks
    resizes: float = 0.0  # a proposal is of another number of expert ranks


class World:
    """The simulation. broken: violated invariants."""

    def __init__(
        self, seed: int, experts: int, attentions: int, proposals: int, faults: Faults
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.now_s = 0.0
        self.is_lost = False
        self.broken: list[str] = []
        self.switches = self.placed_again = 0
        self.ranks_of = {0: experts}  # by generation
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._last_s: dict[tuple[str, str, Priority], float] = {}
        there = experts + SPARE if faults.resizes else experts
        self.experts = {f"expert-{n}": Expert(self, f"expert-{n}") for n in range(there)}
        names = tuple(self.experts)
        self.attentions = {
            f"attention-{n}": Attention(self, f"attention-{n}") for n in range(attentions)
        }
        for attention in self.attentions:
            for expert in self.experts.values():
                expert.do(expert.machine.add_peer(attention))
                self.attentions[attention].machine.add_peer(expert.name)
            self.after(self.random.random(), self.attentions[attention].turn)
        for generation in range(1, proposals + 1):
            self.after(self.random.uniform(0.0, TRAFFIC_S), self._proposing(generation))
        victims = self.random.sample(list(self.attentions), min(faults.deaths, attentions))
        for victim in victims:
            at_s = self.random.uniform(0.0, TRAFFIC_S)
            self.after(at_s, self.attentions[victim].die)
        if faults.expert_dies:
            dying = self.random.choice(names)
            self.after(self.random.uniform(0.0, TRAFFIC_S), self._killing(dying))

    def run(self) -> None:
        end_s = TRAFFIC_S + 8 * DEADLINE_S
        for second in range(int(2 * end_s)):
            self.after(second / 2, self._poll)
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()

    @property
    def ranks(self) -> int:
        """Ranks of the newest generation in use, as the launcher knows it."""
        current = (expert.machine.current for expert in self.experts.values())
        return self.ranks_of[max((placement.generation for placement in current), default=0)]

    def after(self, delay_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), happens))

    def send(self, sender: str, to: str, priority: Priority, arrives: Callable[[], None]) -> None:
        """Send in order within (sender, receiver, class), sometimes late."""
        link, delay_s = (sender, to, priority), self.random.choice((0.001, 0.1, 3.0))
        due_s = max(self._last_s.get(link, 0.0), self.now_s + self.random.random() * delay_s)
        self._last_s[link] = due_s
        self.after(due_s - self.now_s, arrives)

    def _poll(self) -> None:
        for expert in self.experts.values():
            expert.do(expert.machine.poll(self.now_s))
        for attention in self.attentions.values():
            attention.do(attention.machine.poll(self.now_s))

    def _proposing(self, generation: int) -> Callable[[], None]:
        def propose() -> None:
            ranks = self.ranks
            if self.random.random() < self.faults.resizes:
                ranks = self.random.randint(1, self.ranks_of[0] + SPARE)
            self.ranks_of[generation] = ranks
            for name in rank_names(Group.EXPERT, max(ranks, self.ranks)):
                expert = self.experts.get(name)
                if expert is None or self.random.random() < self.faults.proposal_lost:
                    continue
                other = self.random.random() < self.faults.placement_mismatch
                proposed_placement = proposal(generation, ranks, 1 if other else 0)
                self.after(
                    self.random.random() * 2.0,
                    functools.partial(expert.proposed, proposed_placement),
                )

        return propose

    def _killing(self, name: str) -> Callable[[], None]:
        def kill() -> None:
            """Lose the group; some attention ranks close their links, too."""
            self.experts.pop(name)
            self.is_lost = True
            for attention in self.attentions.values():
                loses = functools.partial(attention.loses, name)
                ends = self.random.choice((attention.die, loses))
                self.after(self.random.random(), ends)

        return kill


class Expert:
    """holds: generations that it can serve. loading: generations that are loading."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.machine = ExpertGenerations(proposal(0, world.ranks_of[0]), DEADLINE_S)
        self.holds = {0}
        self.loading: set[int] = set()
        self.reports: list[TransitionReport] = []

    def proposed(self, proposed_placement: Placement) -> None:
        self.do(self.machine.proposed(proposed_placement, self.world.now_s))

    def do(self, actions: Iterable[Action]) -> None:
        loading = self.machine.loading
        self.holds &= self.machine.needed
        self.loading &= {loading.generation} if loading is not None else set()
        if loading is not None and not self.loading:
            self._load(loading.generation)
        for action in actions:
            if isinstance(action, PlacementMessage):
                self._send_message(action)
            else:
                self.reports.append(action)

    def takes(self, peer: str, generation: int, done: Callable[[], None]) -> None:
        """Queue tokens; those of a freed generation are dropped."""
        if generation not in self.holds:
            self.world.broken.append(f"{self.name} has no {generation}, {peer} wants it")
        waits_s = self.world.random.choice((0.0, 0.01, 5.0))

        def compute() -> None:
            if generation in self.holds:
                self.world.send(self.name, peer, Priority.LS, done)

        self.world.after(waits_s, compute)

    def _load(self, generation: int) -> None:
        world = self.world
        self.loading.add(generation)
        if len(self.loading | self.holds) > 2:
            world.broken.append(f"{self.name} has three at once")
        late = world.random.random() < world.faults.load_late
        takes_s = world.random.random() * DEADLINE_S * (2.0 if late else 0.5)
        fails = world.random.random() < world.faults.load_fails
        world.after(takes_s, functools.partial(self._loaded, generation, fails))

    def _loaded(self, generation: int, fails: bool) -> None:
        if generation not in self.loading:
            return  # given up
        if fails:
            self.do(self.machine.failed(generation, f"{self.name} cannot read"))
            return
        self.loading.discard(generation)
        self.holds.add(generation)
        self.do(self.machine.loaded(generation))

    def _send_message(self, message: PlacementMessage) -> None:
        attention = self.world.attentions.get(message.peer)
        self.world.placed_again += message.kind is PacketKind.PREPARED and message.attempt > 0
        if attention is not None and self.name in self.world.experts:
            receive = functools.partial(attention.receive, self.name, message)
            self.world.send(self.name, message.peer, Priority.LS, receive)


class Attention:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        timeout_s = DEADLINE_S / 2 if world.faults.impatient else DEADLINE_S
        self.machine = AttentionGenerations(proposal(0, world.ranks_of[0]), timeout_s)
        self.open: set[tuple[int, int]] = set()  # calls that wait for answers, generations
        self._calls = itertools.count()
        self.is_dead = self.is_through = False
        self._gone_for: set[str] = set()  # expert ranks that know that it is dead

    def turn(self) -> None:
        """Start another layer of some batch, then wait."""
        if self.is_dead or self.is_through or self.world.now_s > TRAFFIC_S:
            return
        self._call()
        self.world.after(self.world.random.choice((0.01, 0.5, 8.0)), self.turn)

    def _call(self) -> None:
        world, generation = self.world, self.machine.begin_layer()
        call = next(self._calls), generation
        self.open.add(call)
        used = rank_names(Group.EXPERT, self.machine.current.ranks)
        to = world.random.sample(used, world.random.randint(1, len(used)))
        left = set(to)
        priority = world.random.choice(list(Priority))

        def end() -> None:
            if call in self.open and not self.is_dead:
                self.open.discard(call)
                self.do(self.machine.end_layer(generation))

        def answered(expert: str) -> None:
            left.discard(expert)
            if not left:
                end()

        def tokens_for(expert: str) -> Callable[[Expert], None]:
            done = functools.partial(answered, expert)
            return lambda rank: rank.takes(self.name, generation, done)

        for expert in to:
            self._send(expert, priority, tokens_for(expert))
        if world.random.random() < 0.2:  # its batch is dropped, with packets under way
            world.after(world.random.random() * 0.1, end)

    def receive(self, expert: str, message: PlacementMessage) -> None:
        if self.is_dead:
            return
        now_s, before = self.world.now_s, self.machine.generation
        if message.kind is PacketKind.PREPARED:
            assert message.placement is not None
            self.do(self.machine.prepared(expert, message.placement, message.attempt, now_s))
        else:
            self.do(self.machine.add_abort_vote(message.generation, message.reason, now_s))
        self.world.switches += self.machine.generation != before

    def do(self, messages: Iterable[PlacementMessage]) -> None:
        for message in messages:
            classes = Priority if message.kind is PacketKind.COMMITTED else (Priority.LS,)
            for priority in classes:
                self._send(
                    message.peer, priority, functools.partial(self._deliver, message, priority)
                )

    def loses(self, expert: str) -> None:
        """Drop what waits for answers."""
        self.is_through = True
        self.do(self.machine.remove_peer(expert))
        for _, generation in sorted(self.open):
            self.do(self.machine.end_layer(generation))
        self.open.clear()

    def die(self) -> None:
        """Lose the rank; expert ranks notice after its last packets."""
        if self.is_dead:
            return
        self.is_dead = True
        self.world.attentions.pop(self.name)
        for expert in self.world.experts.values():
            at_s = self.world.random.random()
            self.world.after(at_s, functools.partial(self._lost_to, expert))

    def _lost_to(self, expert: Expert) -> None:
        self._gone_for.add(expert.name)
        expert.do(expert.machine.remove_peer(self.name))

    def _deliver(self, message: PlacementMessage, priority: Priority, rank: Expert) -> None:
        machine = rank.machine
        if message.kind is PacketKind.COMMITTED:
            rank.do(machine.committed(self.name, message.generation, priority))
        else:
            rank.do(machine.aborted(self.name, message.generation, message.attempt, message.reason))

    def _send(self, expert: str, priority: Priority, arrives: Callable[[Expert], None]) -> None:
        def arrive() -> None:
            rank = self.world.experts.get(expert)
            if rank is not None and expert not in self._gone_for:
                arrives(rank)

        self.world.send(self.name, expert, priority, arrive)


def settled(world: World) -> list[str]:
    """Return what is wrong in the final state."""
    wrong = list(world.broken)
    for name, expert in world.experts.items():
        if expert.machine.under_way is not None:
            wrong.append(f"{name} waits for {expert.machine.under_way}")
        if expert.holds != {expert.machine.current.generation} or expert.loading:
            wrong.append(f"{name} has {expert.holds} and {expert.loading}")
        outcomes = [r for r in expert.reports if r.outcome is not MoveOutcome.READY]
        if len({r.generation for r in outcomes}) < len(outcomes):
            wrong.append(f"{name} reports an end twice: {outcomes}")
    for name, attention in world.attentions.items():
        waiting = [g for g, c in attention.machine._candidates.items() if not c.aborted]
        if waiting or attention.open:
            wrong.append(f"{name} waits for {waiting}, and answers of {attention.open}")
        used = rank_names(Group.EXPERT, attention.machine.current.ranks)
        for expert in () if world.is_lost else [world.experts[each] for each in used]:
            if expert.machine.current.generation != attention.machine.generation:
                wrong.append(f"{name} uses {attention.machine.generation}, {expert.name} not")
    return wrong
