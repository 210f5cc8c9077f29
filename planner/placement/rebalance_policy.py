"""Rebalancing of a running group's experts according to its recent routing.

    window ── find_rebalance_step ──> RebalanceStep: the layers that gain most per byte
    RebalancePolicy                   when to solve, what was proposed, and its outcome

A layer moves if it takes `MIN_GAIN` less time on both halves of the window, so that alternating
traffic counts as one mixture, and if the saving exceeds the copying cost within
`placement.payback_s`. After a complete change the policy waits for a window of new traffic. Pure:
the caller has clock and thread.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from contracts.config import PlacementConfig
from contracts.placement import Placement
from planner.placement.layout import PlacementCosts
from planner.placement.routing import WINDOW_S, WindowRouting, line_price
from planner.placement.slots import Line, moved
from planner.placement.solve import solve_layer

LEAST_TOKENS = 1024  # sampled tokens: placing 16 experts is then within 1 % of the whole sample
MIN_GAIN = 0.03  # of a layer's time
COPY_BYTES_PER_S = 1e9  # that one core copies
BUSY_FRACTION = 0.5  # busy time of a group without measured stages
LOAD_LIMIT = 1.05  # on the window, so that traffic stays within 1.1
POLL_INTERVAL_S = 2.0
RETRY_S = 10.0  # after a failed move
_REMEMBERED = 4  # proposals


class MoveCosts(NamedTuple):
    """Costs of a token in a layer, as in `PlacementCosts`; None: not measured yet.

    expert_bytes: of one expert of one layer."""

    expert_bytes: int
    pair_ms: float | None = None
    copy_ms: float | None = None


class RebalanceStep(NamedTuple):
    """Next placement of a group.

    is_whole: includes every layer that would gain. gain_fraction: predicted, of all layers' time.
    load_bytes: bytes that the rank with most new experts loads."""

    placement: Placement
    is_whole: bool
    gain_fraction: float
    load_bytes: int


class _LayerMove(NamedTuple):
    layer: int
    line: Line
    saved_ms: float  # per token
    gain: float  # of the layer's time, the smaller of both halves of the window
    loads: tuple[int, ...]  # experts that each rank loads


def find_rebalance_step(
    routing: WindowRouting,
    current: Placement,
    costs: MoveCosts,
    config: PlacementConfig,
    *,
    generation: int,
    should_continue: Callable[[], bool] = lambda: True,
) -> RebalanceStep | None:
    """Return the next placement, or None if no move pays.

    should_continue: polled before each layer; the first layer depends on the generation, and layers
    that are not reached stay unchanged."""
    layers = [layer for layer, line in enumerate(current.expert_of_slot) if line]
    first = generation % len(layers)
    prices = _prices(routing, current, costs)
    most, found, reached = config.max_move_bytes // costs.expert_bytes, list[_LayerMove](), True
    for position in [*range(first, len(layers)), *range(first)]:
        if not should_continue():
            reached = False
            break
        solved = _solve_layer(routing, position, current, layers[position], prices, most)
        if solved is None or solved.gain < MIN_GAIN:
            continue
        if _pays(solved, routing, costs, config):
            found.append(solved)
    chosen = _within(found, most)
    if not chosen:
        return None
    lines, slots = current.expert_of_slot, current.slots_per_rank
    whole_ms = sum(
        line_price(routing.layer(p), lines[n], slots, prices) for p, n in enumerate(layers)
    )
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


def _prices(routing: WindowRouting, current: Placement, costs: MoveCosts) -> PlacementCosts:
    """Return costs in ms. Without measurements, links and experts share the busy time equally."""
    layers, top_k = routing.paths_PLK.shape[1:]
    if costs.pair_ms is not None and costs.copy_ms is not None:
        return PlacementCosts(costs.pair_ms, costs.copy_ms, LOAD_LIMIT)
    busy_ms = 1e3 * BUSY_FRACTION / max(routing.tokens_per_s, 1.0) / layers
    return PlacementCosts(busy_ms * current.ranks / top_k, busy_ms, LOAD_LIMIT)


def _solve_layer(
    routing: WindowRouting,
    position: int,
    current: Placement,
    layer: int,
    prices: PlacementCosts,
    max_moves: int,
) -> _LayerMove | None:
    """Return the move of one layer, or None if it stays unchanged."""
    slots, before = current.slots_per_rank, current.expert_of_slot[layer]
    line = solve_layer(
        routing.layer(position), slots, costs=prices, start=before, max_moves=max_moves
    )
    if line == before:
        return None
    saved, gains = list[float](), list[float]()
    for newer in (False, True):
        half = routing.half(newer=newer).layer(position)
        before_ms, after_ms = (line_price(half, each, slots, prices) for each in (before, line))
        saved.append(before_ms - after_ms)
        gains.append(saved[-1] / before_ms)
    return _LayerMove(layer, line, sum(saved) / 2, min(gains), moved(before, line, slots))


def _pays(
    layer: _LayerMove, routing: WindowRouting, costs: MoveCosts, config: PlacementConfig
) -> bool:
    """Return True if the time saved within the payback period exceeds the time spent copying."""
    copying_s = max(layer.loads) * costs.expert_bytes / config.bytes_per_s
    saved_per_s = layer.saved_ms * routing.tokens_per_s / 1e3
    busy = min(1.0, config.bytes_per_s / COPY_BYTES_PER_S)
    return saved_per_s * max(0.0, config.payback_s - copying_s) > busy * copying_s


def _within(layers: Sequence[_LayerMove], most: int) -> list[_LayerMove]:
    """Return the moves that save most per load, with at most `most` loaded experts per rank."""
    chosen: list[_LayerMove] = []
    for each in sorted(layers, key=lambda one: (-one.saved_ms / sum(one.loads), one.layer)):
        loads = [sum(counts) for counts in zip(*(e.loads for e in [*chosen, each]), strict=True)]
        if max(loads) <= most:
            chosen.append(each)
    return chosen


class _Proposal(NamedTuple):
    """A proposed placement. retired: ranks that hold nothing older."""

    placement: Placement
    retired: set[str]


class RebalancePolicy:
    """Schedule and outcome of rebalancing.

    `current`: the placement in use. `newest`: the largest generation known; numbers are never
    reused. `pending`: the proposal without an outcome."""

    def __init__(self, current: Placement, config: PlacementConfig) -> None:
        self.current, self.newest = current, current.generation
        self.pending: Placement | None = None
        self._config = config
        self._outcome_due_s = 0.0
        self._proposed: deque[_Proposal] = deque(maxlen=_REMEMBERED)
        self._not_before_s = -math.inf
        self._is_whole = False
        self._is_over = config.rebalance == "off"

    def is_due(self, now_s: float, routing: WindowRouting) -> bool:
        """Return True if the next step is to be solved now."""
        if self.pending is not None and now_s > self._outcome_due_s:
            self._fail(now_s)
        waits = self.pending is not None or now_s < self._not_before_s
        return not self._is_over and not waits and routing.sampled >= LEAST_TOKENS

    def record_proposal(self, step: RebalanceStep, now_s: float) -> None:
        """Record a published step, of a generation above `newest`."""
        self.pending, self._is_whole = step.placement, step.is_whole
        self._proposed.append(_Proposal(step.placement, set()))
        self.newest = step.placement.generation
        self._outcome_due_s = now_s + 2 * self._config.move_timeout_s

    def record_no_step(self, now_s: float) -> None:
        """Record that no move pays. With "once" that ends the policy."""
        self._not_before_s = now_s + POLL_INTERVAL_S
        self._is_over = self._is_over or self._config.rebalance == "once"

    def record_held(self, placement: Placement, newest: int) -> None:
        """Record what an expert rank reports when it connects or switches."""
        self.newest = max(self.newest, newest, placement.generation)
        if self.pending is not None and placement.generation > self.pending.generation:
            self.pending = None  # superseded
        if placement.generation > self.current.generation and self.pending is None:
            self.current = placement

    def record_retired(self, rank: str, generation: int, now_s: float) -> None:
        """Record that a rank holds nothing older than `generation`, possibly after the timeout."""
        for proposed in self._proposed:
            if proposed.placement.generation == generation:
                proposed.retired.add(rank)
                is_everywhere = len(proposed.retired) == proposed.placement.ranks
                if is_everywhere and generation > self.current.generation:
                    self._record_moved(proposed.placement, now_s)
                return

    def record_failure(self, generation: int, now_s: float) -> None:
        if self.pending is not None and generation == self.pending.generation:
            self._fail(now_s)

    def _record_moved(self, placement: Placement, now_s: float) -> None:
        self.current = placement
        if self.pending is placement:
            self.pending = None
            self._is_over = self._config.rebalance == "once" and self._is_whole
        self._not_before_s = now_s + (WINDOW_S if self._is_whole else POLL_INTERVAL_S)

    def _fail(self, now_s: float) -> None:
        self.pending = None
        self._not_before_s = now_s + RETRY_S
