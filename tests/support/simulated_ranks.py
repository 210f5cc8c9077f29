"""An attention and an expert rank on a simulated clock, with a `Preemption` each.

Random passes of both classes alternate between them. Times are multiples of 2**-20 s and shares of
2**-10, so that credits are exact.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from contracts.plan import Order
from contracts.requests import Priority
from planner.scheduling.task_order import (
    LatencyPass,
    Preemption,
    QueueHead,
    Task,
    TaskStage,
    by_plan,
    oldest_of_highest_class,
)

TICKS_PER_S = 2**20
ATTENTION, EXPERTS = 0, 1
HOLD_S = 1024 / TICKS_PER_S


class Workload(NamedTuple):
    """Random events. Longest slices in ticks; load: LS load relative to the busier rank."""

    share: float
    layers: int
    be_ticks: int
    ls_ticks: int
    poll_ticks: int
    transfer_ticks: int
    load: float
    live_ls: int
    ls_ttft_s: float
    micro_batches: int  # of a BE pass
    be_passes: int
    steps: int  # choices of both ranks, after which the simulation ends


def workload(chance: random.Random) -> Workload:
    return Workload(
        share=chance.randint(20, 512) / 1024,
        layers=chance.randint(1, 2),
        be_ticks=chance.choice((500, 2000, 6000)),
        ls_ticks=chance.choice((300, 1500, 6000, 20000)),
        poll_ticks=chance.choice((0, 10, 300)),
        transfer_ticks=chance.choice((0, 200, 3000)),
        load=chance.uniform(0, 3),
        live_ls=chance.randint(1, 3),
        ls_ttft_s=chance.choice((0.0, 0.03, 0.5)),
        micro_batches=chance.randint(1, 2),
        be_passes=chance.randint(1, 3),
        steps=160,
    )


class Pass:
    """A batch in flight. ended_s: None until it is complete."""

    def __init__(self, priority: Priority, number: int, arrived_s: float, due_s: float) -> None:
        self.priority, self.number = priority, number
        self.arrived_s, self.due_s = arrived_s, due_s
        self.transit_s = 0.0
        self.ended_s: float | None = None
        self.parts: list[Part] = []


class Part:
    """A micro-batch; stages[n] are the slices of task n: attention if even, experts if odd."""

    def __init__(self, whole: Pass, index: int, stages: list[list[float]]) -> None:
        self.whole, self.index, self.stages = whole, index, stages
        self.stage = self.slice = 0
        self.arrived_s = 0.0
        whole.parts.append(self)

    @property
    def left_s(self) -> float:
        return sum(map(sum, self.stages[self.stage :]))


class Chosen(NamedTuple):
    """live: what the choice saw. part: None to hold. asked: False for a single batch."""

    now_s: float
    ready: list[Part]
    live: list[LatencyPass]
    part: Part | None
    slice_s: float  # predicted, of BE's candidate
    is_contended: bool


class Rank:
    """Calls `look` at a choice and `done` after a slice, and notifies the watcher."""

    def __init__(self, world: World, place: int) -> None:
        self.world, self.place = world, place
        order: Any = by_plan if place == ATTENTION else oldest_of_highest_class
        self.choice: Preemption[Any] = Preemption(order, be_share=world.load.share)
        self.present: list[Part] = []
        self.parked: Part | None = None
        self.idle = True

    @property
    def credit_s(self) -> float:
        return self.choice._floor.credit_s

    def arrive(self, part: Part) -> None:
        part.arrived_s = self.world.now_s
        self.present.append(part)
        if self.idle:
            self.idle = False
            self.world.later(self.world.ticks(self.world.load.poll_ticks), self.poll)

    def poll(self) -> None:
        world, now_s = self.world, self.world.now_s
        world.steps += 1
        ready = list(self.present)
        if not ready:
            self.idle = True
            world.watch.on_choice(self, Chosen(now_s, ready, [], None, 0.0, False))
            return
        passes = world.live if self.place == ATTENTION else []
        live = [
            LatencyPass(each.due_s, each.parts[0].left_s * world.guess())
            for each in passes
            if each.priority is Priority.LS
        ]
        heads: list[Any] = list(map(self._head, ready))
        part: Part | None = None
        alone = self.place == ATTENTION and len(passes) == 1 and self.parked is not None
        head = None if alone else self.choice.pick(heads, live, now_s)
        if alone:
            part = self.parked
        elif head is not None:
            part = ready[heads.index(head)]
        slice_s = self._candidate_s(heads)
        world.watch.on_choice(self, Chosen(now_s, ready, live, part, slice_s, not alone))
        if part is None:
            world.later(HOLD_S, self.poll)
            return
        start_s = now_s + world.ticks(world.load.poll_ticks)
        seconds = part.stages[part.stage][part.slice]
        world.later(start_s - now_s + seconds, lambda: self._done(part, head, start_s))

    def _candidate_s(self, heads: list[Any]) -> float:
        """Return the predicted slice of the next best-effort task."""
        others = [head for head in heads if head.priority == Priority.BE]
        is_started = [head for head in others if head.is_started]
        return self.choice._order(is_started or others).slice_s if others else 0.0

    def _head(self, part: Part) -> Task | QueueHead:
        seconds = part.stages[part.stage][part.slice]
        slice_s, is_started = seconds * self.world.guess(), part.slice > 0
        whole, layer = part.whole, part.stage // 2
        if self.place == EXPERTS:
            return QueueHead(whole.priority, layer, part.arrived_s, 1, 1, is_started, slice_s)
        return Task(
            whole.priority, whole.number, layer, part.index, TaskStage.ATTENTION, Order.ASAS,
            due_s=whole.due_s, is_started=is_started, slice_s=slice_s,
        )  # fmt: skip

    def _done(self, part: Part, head: Task | QueueHead | None, start_s: float) -> None:
        self.choice.ran(head or self._head(part), start_s, self.world.now_s)
        part.slice += 1
        self.parked = part
        if part.slice == len(part.stages[part.stage]):
            self.parked = None
            self.present.remove(part)
            part.stage, part.slice = part.stage + 1, 0
            self.world.moved(part)
        self.world.watch.ran(self, part, start_s)
        self.world.later(self.world.ticks(self.world.load.poll_ticks), self.poll)


class World:
    """Both ranks and pending events. watch: notified of choices, slices and passes."""

    def __init__(self, seed: int, watch: Any) -> None:
        self.chance = random.Random(seed)
        self.load = workload(self.chance)
        self.watch = watch
        self.now_s, self.steps = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.live: list[Pass] = []
        self.waits: dict[Priority, deque[float]] = {each: deque() for each in Priority}  # arrivals
        self.ranks = [Rank(self, ATTENTION), Rank(self, EXPERTS)]

    def run(self) -> None:
        load = self.load
        self.later(0.0, self._ls_comes)
        for _ in range(load.be_passes):
            after_s = self.ticks(self.chance.choice((0, 100_000)))
            self.later(after_s, lambda: self._come(Priority.BE))
        ended = 0
        while self._events and self.steps < load.steps and ended < load.be_passes:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            ended = self.watch.ended_be
        self.watch.over(self)

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._number), event))

    def ticks(self, most: int) -> float:
        """Return 1 to `most` ticks in seconds, or 0."""
        return math.ceil(self.chance.random() * most) / TICKS_PER_S

    def guess(self) -> float:
        """Return a prediction that is off by a factor; 0: unknown."""
        return self.chance.choice((0.0, 0.5, 1.0, 1.0, 2.0))

    def moved(self, part: Part) -> None:
        """Move a completed task to the other rank, or end the pass."""
        whole = part.whole
        if part.stage < len(part.stages):
            transfer_s = self.ticks(self.load.transfer_ticks)
            whole.transit_s += transfer_s
            self.later(transfer_s, lambda: self.ranks[part.stage % 2].arrive(part))
        elif all(each.stage == len(each.stages) for each in whole.parts):
            whole.ended_s = self.now_s
            self.live.remove(whole)
            self._begin()

    def _ls_comes(self) -> None:
        load = self.load
        self._come(Priority.LS)
        work_s = (load.layers + 1) * 1.5 * load.ls_ticks / 2 / TICKS_PER_S
        if load.load > 0.02:
            mean_s = work_s / load.load
            after_s = round(self.chance.expovariate(1 / mean_s) * TICKS_PER_S) / TICKS_PER_S
            self.later(after_s, self._ls_comes)

    def _come(self, priority: Priority) -> None:
        self.waits[priority].append(self.now_s)
        self._begin()

    def _begin(self) -> None:
        """Start one best-effort pass at a time, and several LS passes."""
        for priority, waits in self.waits.items():
            most = self.load.live_ls if priority is Priority.LS else 1
            while waits and sum(each.priority is priority for each in self.live) < most:
                whole = self._pass(priority, waits.popleft())
                self.live.append(whole)
                for part in whole.parts:
                    self.ranks[ATTENTION].arrive(part)

    def _pass(self, priority: Priority, arrived_s: float) -> Pass:
        best_effort = priority is Priority.BE
        due_s = math.inf if best_effort else arrived_s + self.load.ls_ttft_s
        whole = Pass(priority, next(self._number), arrived_s, due_s)
        most = self.load.be_ticks if best_effort else self.load.ls_ticks
        for index in range(self.load.micro_batches if best_effort else 1):
            slices = self.chance.choices((1, 2, 4), k=2 * self.load.layers + 1)
            stages = [[self.ticks(most) for _ in range(count)] for count in slices]
            Part(whole, index, stages)
        return whole
