"""Event simulation of a serving group, independent of planned makespans.

Sequences arrive, ranks form batches and run them layer by layer, expert ranks merge token groups.
Checks the planner's capacity.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from contracts.hardware import Hardware
from contracts.plan import Plan
from contracts.planner_messages import (
    BatchReport,
    ExpertReport,
    MicroBatchReport,
    RowsTime,
    TrafficReport,
)
from planner.costs.cost_model import Deployment, attention_ms, expert_model, link_model
from planner.costs.model_shape import ModelShape, hit_fraction, layer_mean_batch
from planner.costs.routing_shape import uniform_spread

UNKNOWN_MS = 0.5  # of a batch, which no stage has
BETWEEN_MS, BETWEEN_SEQUENCE_MS = 0.3, 0.05  # from one batch to the next, and of each sequence
MIN_SPLIT_TOKENS = 32
POOL_TOKENS = 1 << 20

Report = BatchReport | ExpertReport | TrafficReport


class Traffic(NamedTuple):
    """per_s: arrivals over all ranks; None: as many as fit."""

    prompt_tokens: int
    output_tokens: int
    per_s: float | None


class Packet(NamedTuple):
    layer: int
    tokens: int
    answer: Callable[[], None]


class SimulatedServing:
    """ended: number of complete sequences. report: called with reports of real ranks."""

    def __init__(
        self,
        shape: ModelShape,
        machine: Hardware,
        ranks: tuple[int, int],
        traffic: Traffic,
        *,
        max_sequences: int,
        most_micro_batches: int = 2,
        report: Callable[[Report, float], None] = lambda report, now_s: None,
    ) -> None:
        self.shape, self.machine, self.traffic = shape, machine, traffic
        self.attention_ranks, self.expert_ranks = ranks
        self.max_sequences, self.report = max_sequences, report
        self.most_micro_batches = most_micro_batches
        self.now_ms, self.ended = 0.0, 0
        self.random = random.Random(0)
        alone = Deployment(attention_ranks=1, expert_ranks=ranks[1], sequence_tokens=1)
        link = machine.links[0]
        self.a2e, self.e2a = (link_model(link, shape, alone, one) for one in ("a2e", "e2a"))
        self.expert = expert_model(machine, shape, uniform_spread(shape, ranks[1]))
        self.rows = hit_fraction(shape, shape.experts_per_rank(ranks[1]))
        self.experts = _Experts(self)
        self.ranks = [_Rank(self, f"attention-{number}") for number in range(ranks[0])]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        if traffic.per_s is not None:
            self._arrive()

    def run(self, seconds: float) -> float:
        """Return completed sequences per second."""
        before, end_ms = self.ended, self.now_ms + 1e3 * seconds
        for rank in self.ranks:
            rank.look()
        while self._events and self._events[0][0] <= end_ms:
            self.now_ms, _, happens = heapq.heappop(self._events)
            happens()
        self.now_ms = end_ms
        return (self.ended - before) / seconds

    def after(self, ms: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ms + ms, next(self._numbers), happens))

    def me(self, tokens: int) -> float:
        return tokens * self.shape.top_k / self.shape.num_experts

    def prompt_tokens(self) -> int:
        """Return half to one and a half times the mean."""
        mean = self.traffic.prompt_tokens
        return self.random.randint(mean // 2, mean + mean // 2)

    def _arrive(self) -> None:
        assert self.traffic.per_s is not None
        rank = min(self.ranks, key=lambda rank: rank.waiting + len(rank.running))
        rank.waiting += 1
        rank.look()
        self.after(1e3 * self.random.expovariate(self.traffic.per_s), self._arrive)


class _Experts:
    """All expert ranks as one queue, because their routing is alike."""

    def __init__(self, world: SimulatedServing) -> None:
        self._world = world
        self._queue: deque[Packet] = deque()
        self._busy = False

    def take(self, packet: Packet) -> None:
        self._queue.append(packet)
        self._serve()

    def _serve(self) -> None:
        """Run one call for all packets of the oldest packet's layer."""
        if self._busy or not self._queue:
            return
        world, layer = self._world, self._queue[0].layer
        merged = [packet for packet in self._queue if packet.layer == layer]
        self._queue = deque(packet for packet in self._queue if packet.layer != layer)
        self._busy = True
        tokens = sum(packet.tokens for packet in merged)
        ms = world.expert.at(world.me(tokens))
        rows = max(1, round(tokens * world.rows))
        sent = [
            RowsTime(max(1, round(p.tokens * world.rows)), world.a2e.at(world.me(p.tokens)))
            for p in merged
        ]
        report = ExpertReport(rank="expert-0", experts=[RowsTime(rows, ms)], a2e=sent)

        def done() -> None:
            self._busy = False
            for packet in merged:
                packet.answer()
            if layer == 0:
                world.report(report, world.now_ms / 1e3)
            self._serve()

        world.after(ms, done)


class _Line:
    """A resource that does one thing at a time: a rank's processor, a link."""

    def __init__(self, world: SimulatedServing) -> None:
        self._world, self._free_ms = world, 0.0

    def run(self, ms: float, then: Callable[[], None]) -> None:
        begin_ms = max(self._world.now_ms, self._free_ms)
        self._free_ms = begin_ms + ms
        self._world.after(self._free_ms - self._world.now_ms, then)


class _Rank:
    """running: (position, tokens left) of decoding sequences."""

    def __init__(self, world: SimulatedServing, name: str) -> None:
        self.waiting = 0
        self.running: list[tuple[int, int]] = []
        self._world, self._name = world, name
        self._processor, self._out, self._back = _Line(world), _Line(world), _Line(world)
        self._is_busy = False
        self._reported_s = 0.0
        self._between_ms = 0.0  # what lay before the batch that runs, of one that went on
        self._counts = [0] * 5

    def look(self) -> None:
        """Form a batch if possible: a token of each running sequence, and prompts."""
        world, traffic = self._world, self._world.traffic
        room = world.max_sequences - len(self.running)
        prompts = room if traffic.per_s is None else min(room, self.waiting)
        if traffic.per_s is None:  # not all at the same place of their answers
            prompts = min(prompts, -(-world.max_sequences // traffic.output_tokens))
        if self._is_busy or not (self.running or prompts):
            return
        self._is_busy = True
        self.waiting -= min(prompts, self.waiting)
        batch = [(at, at + 1) for at, _ in self.running]
        batch += [(0, world.prompt_tokens()) for _ in range(prompts)]
        self._run(batch)

    def _run(self, batch: list[tuple[int, int]]) -> None:
        world, started_ms = self._world, self._world.now_ms
        tokens = sum(stop - start for start, stop in batch)
        count = max(1, min(world.most_micro_batches, len(batch), tokens // MIN_SPLIT_TOKENS))
        parts = [batch[number::count] for number in range(count)]
        left = count

        def done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                world.after(UNKNOWN_MS, lambda: self._completed(batch, parts, started_ms))

        for part in parts:
            self._layer(part, 0, done)

    def _layer(self, part: list[tuple[int, int]], layer: int, done: Callable[[], None]) -> None:
        world = self._world
        if layer == world.shape.moe_layers:
            done()
            return
        tokens = sum(stop - start for start, stop in part)
        me = world.me(tokens)

        def next_layer() -> None:
            self._layer(part, layer + 1, done)

        def answered() -> None:
            self._back.run(world.e2a.at(me), next_layer)

        def attended() -> None:
            self._out.run(world.a2e.at(me), lambda: world.experts.take(packet))

        packet = Packet(layer, tokens, answered)
        self._processor.run(self._attention_ms(part), attended)

    def _attention_ms(self, part: list[tuple[int, int]]) -> float:
        shape = self._world.shape
        return attention_ms(self._world.machine.attention, shape, layer_mean_batch(shape, part))

    def _completed(
        self, batch: list[tuple[int, int]], parts: list[list[tuple[int, int]]], started_ms: float
    ) -> None:
        world, traffic = self._world, self._world.traffic
        stepped = [(at + 1, left - 1) for at, left in self.running]
        new = batch[len(self.running) :]
        stepped += [(stop, traffic.output_tokens - 1) for _, stop in new]
        self.running = [one for one in stepped if one[1] > 0]
        world.ended += len(stepped) - len(self.running)
        self._report(batch, parts, world.now_ms - started_ms)
        between_ms = BETWEEN_MS + BETWEEN_SEQUENCE_MS * len(batch)
        self._between_ms = between_ms if self.running else 0.0
        world.after(between_ms, self._free)

    def _free(self) -> None:
        self._is_busy = False
        self.look()

    def _report(
        self, batch: list[tuple[int, int]], parts: list[list[tuple[int, int]]], measured_ms: float
    ) -> None:
        world, now_s = self._world, self._world.now_ms / 1e3
        tokens = [sum(stop - start for start, stop in part) for part in parts]
        e2a = [RowsTime(max(1, round(t * world.rows)), world.e2a.at(world.me(t))) for t in tokens]
        world.report(
            BatchReport(
                rank=self._name,
                plan=Plan(r1=len(parts)),
                measured_ms=measured_ms,
                micro_batches=[MicroBatchReport(p, self._attention_ms(p)) for p in parts],
                e2a=e2a,
                between_ms=self._between_ms,
            ),
            now_s,
        )
        for start, stop in batch:
            amounts = (1, start, 0, 0, 0) if stop - start == 1 else (0, 0, 1, stop - start, start)
            self._counts = [a + b for a, b in zip(self._counts, amounts, strict=True)]
        if now_s - self._reported_s >= 1.0:
            names = ("decode_tokens", "positions", "prompts", "prompt_tokens", "starts")
            counts = dict(zip(names, self._counts, strict=True))
            seconds = now_s - self._reported_s
            report_due = TrafficReport(
                rank=self._name, seconds=seconds, pool_tokens=POOL_TOKENS, **counts
            )
            world.report(report_due, now_s)
            self._reported_s, self._counts = now_s, [0] * 5
