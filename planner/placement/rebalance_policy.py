"""Whether and how the experts of a running group should move to where its traffic wants them.

    window ── find_step ──> Step: the layers that gain most per byte, within what a move may bring
    Follower                when to look, what was proposed, what became of it, when to leave it be

A layer is moved if it takes less time afterwards, by `least_gain` on the newer half of the window,
no more on the older, and if within `placement.payback_s` that saves more than the copying costs.
Against thrashing: traffic in turns faster than the window is one mixture; after a whole change a
layer rests until as much traffic has come as it was made by, twice as long each time that it takes
back most of the change before; and each move of a layer doubles the gain that its next one needs,
which is forgotten at the rate of one in pays_after_s. While traffic turns to another kind nothing
moves; once it has turned, no layer rests any more that moved by what was before. Pure: the caller
has clock and thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from contracts.config import PlacementConfig
from contracts.placement import Placement
from planner.placement.objective import Objective, PlacementCosts
from planner.placement.routing import LayerRouting, measure
from planner.placement.routing_window import SETTLED_S, WINDOW_S, WindowRouting
from planner.placement.slots import Line, layer_slots, moved
from planner.placement.solve import solve_layer

LEAST_TOKENS = 1024  # sampled: grouping 16 experts by so many is within 1 % of by all of them
LEAST_GAIN = 0.03  # of a layer's time, of one that has not moved of late
COPY_BYTES_PER_S = 1e9  # what a core brings in if it does nothing else
BUSY_FRACTION = 0.5  # of its time a group computes, where no stage has been measured
LOAD_LIMIT = 1.05  # aimed at on the window, so that the traffic's stays within 1.1
POLL_INTERVAL_S = 2.0
BACK_OFF_S, MAX_REST_S = 10.0, 600.0
_REMEMBERED = 4  # proposals

Holdings = frozenset[tuple[int, int]]  # (rank, expert)
_NO_GAINS: Mapping[int, float] = MappingProxyType({})


class MoveCosts(NamedTuple):
    """pair_ms, copy_ms: as `PlacementCosts`, for a token of a layer; None: nothing is measured yet.
    expert_bytes: of one expert of one layer."""

    expert_bytes: int
    pair_ms: float | None = None
    copy_ms: float | None = None


class RebalanceStep(NamedTuple):
    """is_whole: no layer that would gain is left out. gain_fraction: of all layers' time, as
    predicted. load_bytes: that the rank which loads most brings in."""

    placement: Placement
    is_whole: bool
    gain_fraction: float
    load_bytes: int


class _LayerMove(NamedTuple):
    layer: int
    line: Line
    saved_ms: float  # of a token
    gain: float  # on the newer half of the window, of the layer's time
    loads: tuple[int, ...]  # experts that each rank brings in


def find_rebalance_step(
    routing: WindowRouting,
    current: Placement,
    costs: MoveCosts,
    config: PlacementConfig,
    *,
    generation: int,
    min_gains: Mapping[int, float] = _NO_GAINS,
    should_continue: Callable[[], bool] = lambda: True,
) -> RebalanceStep | None:
    """The next placement, or None where none pays. least_gains: of layers for which it is not
    LEAST_GAIN; those of 1 stay. go_on: asked before each layer is solved, in turns that start with
    another layer for each generation; layers that are not reached stay."""
    layers = [layer for layer, line in enumerate(current.expert_of_slot) if line]
    first = generation % len(layers)
    prices = _prices(routing, current, costs)
    most, found, reached = config.max_move_bytes // costs.expert_bytes, list[_LayerMove](), True
    for position in [*range(first, len(layers)), *range(first)]:
        least_gain = min_gains.get(layers[position], LEAST_GAIN)
        if least_gain >= 1:
            continue
        if not should_continue():
            reached = False
            break
        solved = _solve_layer(routing, position, current, layers[position], prices, most)
        if solved is None or solved.gain < least_gain:
            continue
        if _pays(solved, routing, costs, config):
            found.append(solved)
    chosen = _within(found, most)
    if not chosen:
        return None
    whole_ms = sum(prices.of_line(routing.layer(p), current, n) for p, n in enumerate(layers))
    gain_fraction = sum(each.saved_ms for each in chosen) / whole_ms
    is_whole = reached and len(chosen) == len(found) and all(sum(c.loads) < most for c in chosen)
    return _step(current, chosen, generation, is_whole, gain_fraction, costs.expert_bytes)


def _step(
    current: Placement,
    chosen: Sequence[_LayerMove],
    generation: int,
    is_whole: bool,
    gain_fraction: float,
    expert_bytes: int,
) -> RebalanceStep:
    lines = list(current.expert_of_slot)
    for each in chosen:
        lines[each.layer] = each.line
    loads = [sum(counts) for counts in zip(*(each.loads for each in chosen), strict=True)]
    return RebalanceStep(
        Placement(
            num_experts=current.num_experts,
            generation=generation,
            slots_per_rank=current.slots_per_rank,
            expert_of_slot=tuple(lines),
        ),
        is_whole,
        gain_fraction,
        max(loads) * expert_bytes,
    )


class _LayerPricer(NamedTuple):
    """ms of a token of a layer."""

    costs: PlacementCosts
    top_k: int
    ranks: int

    def of_line(self, routing: LayerRouting, placement: Placement, layer: int) -> float:
        return self.of(routing, placement.expert_of_slot[layer], placement.slots_per_rank)

    def of(self, routing: LayerRouting, line: Line, slots_per_rank: Sequence[int]) -> float:
        measured = measure(routing, layer_slots(line, slots_per_rank))
        objective = Objective(self.costs, 1.0, float(self.top_k), self.ranks)
        return float(objective.price(measured.copies, measured.load * self.top_k / self.ranks))


def _prices(routing: WindowRouting, current: Placement, costs: MoveCosts) -> _LayerPricer:
    """Where no stage is measured: links and experts take as long, and both together as much of the
    time as a group is busy."""
    layers, top_k = routing.paths_PLK.shape[1:]
    if costs.pair_ms is not None and costs.copy_ms is not None:
        prices = PlacementCosts(costs.pair_ms, costs.copy_ms, LOAD_LIMIT)
        return _LayerPricer(prices, top_k, current.ranks)
    busy_ms = 1e3 * BUSY_FRACTION / max(routing.tokens_per_s, 1.0) / layers
    pair_ms = busy_ms * current.ranks / top_k
    return _LayerPricer(PlacementCosts(pair_ms, busy_ms, LOAD_LIMIT), top_k, current.ranks)


def _solve_layer(
    routing: WindowRouting,
    position: int,
    current: Placement,
    layer: int,
    prices: _LayerPricer,
    max_moves: int,
) -> _LayerMove | None:
    """None where the layer would lose in one half of the window."""
    slots, before = current.slots_per_rank, current.expert_of_slot[layer]
    placed = solve_layer(
        routing.layer(position), slots, costs=prices.costs, start=before, max_moves=max_moves
    )
    line = placed.expert_of_slot
    if line == before:
        return None
    saved = []
    for newer in (False, True):
        half = routing.half(newer=newer).layer(position)
        was_ms, now_ms = prices.of(half, before, slots), prices.of(half, line, slots)
        saved.append(was_ms - now_ms)
    if min(saved) < 0:
        return None
    return _LayerMove(layer, line, sum(saved) / 2, saved[1] / was_ms, moved(before, line, slots))


def _pays(
    layer: _LayerMove, routing: WindowRouting, costs: MoveCosts, config: PlacementConfig
) -> bool:
    """Saved time per second, for as long as the new placement has to pay, against the part of its
    time that the busiest rank copies."""
    copying_s = max(layer.loads) * costs.expert_bytes / config.bytes_per_s
    saved_per_s = layer.saved_ms * routing.tokens_per_s / 1e3
    busy = min(1.0, config.bytes_per_s / COPY_BYTES_PER_S)
    return saved_per_s * max(0.0, config.payback_s - copying_s) > busy * copying_s


def _within(layers: Sequence[_LayerMove], most: int) -> list[_LayerMove]:
    """Those that save most for what they load, of which no rank loads more than `most` experts."""
    chosen: list[_LayerMove] = []
    for each in sorted(layers, key=lambda one: (-one.saved_ms / sum(one.loads), one.layer)):
        loads = [sum(counts) for counts in zip(*(e.loads for e in [*chosen, each]), strict=True)]
        if max(loads) <= most:
            chosen.append(each)
    return chosen


class _MoveHistory(NamedTuple):
    """Of a layer: when it moved last, and by what was seen until when; how long it rests, how often
    it moved of late (which fades), and what its ranks dropped."""

    at_s: float
    seen_s: float
    rest_s: float = 0.0
    times: float = 0.0
    dropped: Holdings = frozenset()

    def times_of_late(self, now_s: float, fades_s: float) -> float:
        return max(0.0, self.times - (now_s - self.at_s) / fades_s)


class _Proposal(NamedTuple):
    """since_s: of the traffic that it was made by. retired: ranks that have nothing older left."""

    placement: Placement
    at_s: float
    since_s: float
    retired: set[str]


class RebalancePolicy:
    """`current`: the placement in use. `newest`: the largest generation that anyone knows; numbers
    are never used twice. `pending`: what is proposed, until its outcome."""

    def __init__(self, current: Placement, config: PlacementConfig) -> None:
        self.current, self.newest = current, current.generation
        self.pending: Placement | None = None
        self._config = config
        self._outcome_due_s = 0.0  # by when an outcome is due
        self._shifted_s = -math.inf
        self._proposed: deque[_Proposal] = deque(maxlen=_REMEMBERED)
        self._moved: dict[int, _MoveHistory] = {}
        self._not_before_s = -math.inf
        self._failures = 0
        self._is_whole = False
        self._is_over = config.rebalance == "off"

    def is_due(self, now_s: float, routing: WindowRouting) -> bool:
        """Whether to look for a step now."""
        if self.pending is not None and now_s > self._outcome_due_s:
            self._fail(now_s)
        self._shifted_s = routing.shifted_s
        waits = self.pending is not None or now_s < self._not_before_s or routing.is_shifting
        return not self._is_over and not waits and routing.sampled >= LEAST_TOKENS

    def min_gains(self, now_s: float) -> dict[int, float]:
        """For `find_rebalance_step`."""
        return {layer: self._least_gain(moved, now_s) for layer, moved in self._moved.items()}

    def _least_gain(self, moved: _MoveHistory, now_s: float) -> float:
        is_of_before = moved.seen_s < self._shifted_s + SETTLED_S
        if now_s < moved.at_s + moved.rest_s and not is_of_before:
            return 1.0
        return LEAST_GAIN * math.exp2(moved.times_of_late(now_s, self._config.payback_s))

    def proposed(self, step: RebalanceStep, now_s: float) -> None:
        """Takes a step that is sent out, of a generation above `newest`."""
        self.pending, self._is_whole = step.placement, step.is_whole
        since_s = max(self._shifted_s, now_s - WINDOW_S)
        self._proposed.append(_Proposal(step.placement, now_s, since_s, set()))
        self.newest = step.placement.generation
        self._outcome_due_s = now_s + 2 * self._config.move_timeout_s

    def record_no_step(self, now_s: float) -> None:
        """With "once": enough was seen, and experts stand well."""
        self._not_before_s = now_s + POLL_INTERVAL_S
        self._is_over = self._is_over or self._config.rebalance == "once"

    def held(self, placement: Placement, newest: int) -> None:
        """What an expert rank said when it connected, or went over to what nobody here proposed."""
        self.newest = max(self.newest, newest, placement.generation)
        if self.pending is not None and placement.generation > self.pending.generation:
            self.pending = None  # whatever becomes of it, that is newer
        if placement.generation > self.current.generation and self.pending is None:
            self.current = placement

    def retired(self, rank: str, generation: int, now_s: float) -> None:
        """That rank has nothing older than `generation` left, which may come after its time."""
        for proposed in self._proposed:
            if proposed.placement.generation == generation:
                proposed.retired.add(rank)
                is_everywhere = len(proposed.retired) == proposed.placement.ranks
                if is_everywhere and generation > self.current.generation:
                    self._record_moved(proposed, now_s)
                return

    def record_failure(self, generation: int, now_s: float) -> None:
        if self.pending is not None and generation == self.pending.generation:
            self._fail(now_s)

    def _record_moved(self, proposed: _Proposal, now_s: float) -> None:
        placement = proposed.placement
        for layer, line in enumerate(placement.expert_of_slot):
            if self._is_whole and line != self.current.expert_of_slot[layer]:
                self._moved[layer] = self._move(layer, proposed, now_s)
        self.current, self._failures = placement, 0
        self._not_before_s = now_s + POLL_INTERVAL_S
        if self.pending is placement:
            self.pending = None
            self._is_over = self._config.rebalance == "once" and self._is_whole

    def _move(self, layer: int, proposed: _Proposal, now_s: float) -> _MoveHistory:
        before, after = _held(self.current, layer), _held(proposed.placement, layer)
        loaded, rest_s = after - before, proposed.at_s - proposed.since_s
        last = self._moved.get(layer, _MoveHistory(now_s, now_s))
        if len(loaded & last.dropped) > len(loaded) / 2:
            rest_s = min(2 * last.rest_s, MAX_REST_S)
        times = 1 + last.times_of_late(now_s, self._config.payback_s)
        return _MoveHistory(now_s, proposed.at_s, rest_s, times, before - after)

    def _fail(self, now_s: float) -> None:
        self.pending = None
        self._not_before_s = now_s + min(MAX_REST_S, BACK_OFF_S * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)


def _held(placement: Placement, layer: int) -> Holdings:
    line = placement.expert_of_slot[layer]
    return frozenset(
        (rank, expert)
        for rank, (low, high) in enumerate(placement.slot_bounds)
        for expert in line[low:high]
    )
