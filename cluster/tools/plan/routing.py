"""`tandem plan` with a routing profile: copies and load in place of uniform routing, with experts
in order and as the solver places them, and what the placement brings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.planning.planner_inputs import layer_routing
from contracts.errors import ConfigError
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import ModelSpec
from planner.costs.routing_shape import RoutingByRanks, RoutingShape, Spread, uniform
from planner.placement.objective import PlacementCosts
from planner.placement.routing import LayerRouting
from planner.placement.slots import Line, contiguous, contiguous_line, layer_slots
from planner.placement.solve import WORK, solve_layer
from planner.placement.solve import split as split_sample
from planner.schedule.alternatives import Workload, any_split
from planner.schedule.deployment_search import Split, busy_fractions
from planner.schedule.placed_routing import routing_shape

MIN_GAIN = 0.005  # of throughput: no gain
LAYERS = 8  # that are placed, evenly spaced; each stands for those nearest to it
SKETCH, THOROUGH = WORK // 100, WORK // 5
"""Work for a layer: of every number of ranks that is looked at, and of those of the answer. On the
bundled model's profile (2, 4 and 8 ranks, up to two spare slots) copies are at most 6.5 and 3.5 %
over what all of WORK finds, both at 8 ranks, where the busiest rank has up to 5 and 3 % less."""


class RoutingAnswer(msgspec.Struct, kw_only=True):
    """Of the best split. In order: each expert once, none in spare slots. gain_fraction: of its
    throughput, over the best split's with experts in order."""

    spare_slots: int
    copies: float
    load: float
    in_order_copies: float
    in_order_load: float
    in_order_samples_per_s: float
    gain_fraction: float
    advice: str


class ProfiledRouting(NamedTuple):
    """A profile's layers, ascending. Placements are made of four fifths of the sample; copies and
    load are those of the fifth that was held out."""

    layers: list[LayerRouting]
    spare_slots: int


def read_routing(
    given: str,
    spare_slots: int,
    split: tuple[int, int] | None,
    folder: Path | None,
    spec: ModelSpec,
    where: str,
) -> ProfiledRouting:
    """split: ranks of both groups, if they are known. Raises ConfigError or CheckpointError."""
    if folder is None:
        raise ConfigError(
            f"{where}: routing: a profile is of one checkpoint: give model as its folder, not as "
            "the fields of its config.json"
        )
    share = 1 if split is None else spec.num_experts // split[1]
    if spare_slots > max(0, spec.num_experts - share):
        raise ConfigError(
            f"{where}: spare_slots: {spare_slots} beside a rank's share of {share} or more of "
            f"{spec.num_experts} experts: give at most {max(0, spec.num_experts - share)}"
        )
    counts = RoutingCounts.read(Path(given).expanduser(), folder, spec)
    layers = [layer_routing(counts, layer) for layer in spec.moe_layers]
    return ProfiledRouting(layers, spare_slots)


def in_order(profiled: ProfiledRouting, workload: Workload) -> RoutingByRanks:
    """With experts in order, each once."""

    @functools.cache
    def of_ranks(ranks: int) -> RoutingShape:
        def line(routing: LayerRouting, slots: tuple[int, ...]) -> Line:
            return contiguous_line(routing.load(), slots)

        return _shape_of(profiled, workload, ranks, 0, line)

    return of_ranks


class SolvedRouting:
    """As the solver places them for the cost model's layer time, with replicas in spare slots; a
    `RoutingByRanks`. Sketches, but for the numbers of ranks that it is told to be thorough for."""

    def __init__(self, profiled: ProfiledRouting, workload: Workload) -> None:
        self._profiled, self._workload = profiled, workload
        self._found: dict[int, RoutingShape] = {}

    def __call__(self, ranks: int) -> RoutingShape:
        if ranks not in self._found:
            self._found[ranks] = self._placed(ranks, SKETCH)
        return self._found[ranks]

    def refine(self, *numbers: int) -> None:
        for ranks in set(numbers):
            self._found[ranks] = self._placed(ranks, THOROUGH)

    def _placed(self, ranks: int, work: int) -> RoutingShape:
        costs = _costs(self._workload, ranks)

        def line(routing: LayerRouting, slots: tuple[int, ...]) -> Line:
            return solve_layer(routing, slots, costs=costs, work=work).expert_of_slot

        spare = self._profiled.spare_slots
        return _shape_of(self._profiled, self._workload, ranks, spare, line)


def _shape_of(
    profiled: ProfiledRouting,
    workload: Workload,
    ranks: int,
    spare: int,
    place: Callable[[LayerRouting, tuple[int, ...]], Line],
) -> RoutingShape:
    experts = workload.shape.num_experts
    if ranks > experts:  # such a split is refused; without one, some devices hold no experts
        return uniform(workload.shape, ranks)
    shares = contiguous(experts, ranks, num_layers=1, moe_layers=[0]).slots_per_rank
    slots = tuple(min(experts, share + spare) for share in shares)
    sampled = _spaced(len(profiled.layers), LAYERS)
    found = routing_shape(
        [
            (split_sample(routing)[1], layer_slots(place(routing, slots), slots))
            for routing in map(profiled.layers.__getitem__, sampled)
        ]
    )
    nearest = [_nearest(layer, sampled) for layer in range(len(profiled.layers))]
    return RoutingShape(tuple(found.layers[each] for each in nearest))


def _spaced(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, the first and the last among them."""
    chosen = min(count, most)
    return [round(n * (count - 1) / max(1, chosen - 1)) for n in range(chosen)]


def _nearest(number: int, to: Sequence[int]) -> int:
    """Where in `to` the one is that differs least."""
    return min(range(len(to)), key=lambda place: abs(to[place] - number))


def _costs(workload: Workload, ranks: int) -> PlacementCosts:
    """Of a pair at an expert rank, and of a copy over all links of the split."""
    shape, hardware = workload.shape, workload.hardware
    senders = workload.devices - ranks if ranks < workload.devices else ranks
    row_bytes = shape.hidden_size * shape.element_bytes
    link_ms = max(any_split(workload, way).ms_per_byte for way in ("a2e", "e2a"))
    return PlacementCosts(
        pair=max(shape.pair_flops * hardware.expert.ms_per_flop, 1e-12),
        copy=max(row_bytes * link_ms / min(senders, ranks), 1e-12),
    )


def routing_answer(
    profiled: ProfiledRouting,
    before: tuple[Split, RoutingShape],
    after: tuple[Split, RoutingShape],
) -> RoutingAnswer:
    """The best splits with experts in order, and placed."""
    (split_before, shape_before), (split_after, shape_after) = before, after
    was, now = shape_before.mean, shape_after.mean
    gain = 0.0
    if split_before.samples_per_s:
        gain = split_after.samples_per_s / split_before.samples_per_s - 1
    return RoutingAnswer(
        spare_slots=profiled.spare_slots,
        copies=now.copies,
        load=now.load,
        in_order_copies=was.copies,
        in_order_load=was.load,
        in_order_samples_per_s=split_before.samples_per_s,
        gain_fraction=gain,
        advice=_advice(split_after, gain, was, now),
    )


def _advice(split: Split, gain: float, was: Spread, now: Spread) -> str:
    if gain > MIN_GAIN:
        return (
            f"Placing experts brings {gain:.1%}: a token goes to {now.copies:.2f} ranks instead of "
            f"{was.copies:.2f}, the busiest has {now.load:.2f} of the mean's pairs instead of "
            f"{was.load:.2f}."
        )
    if gain < -MIN_GAIN:
        return (
            f"Placing experts so costs {-gain:.1%} here: what spare slots take in memory and in "
            "calls of experts is more than they bring. Leave them out."
        )
    busy = busy_fractions(split)
    links = max(busy["A2E"], busy["E2A"])
    return (
        f"Grouping brings nothing here: links are busy {links:.0%} of the time, expert ranks "
        f"{busy['expert ranks']:.0%}, and in order the busiest has {was.load:.2f} of the mean's "
        "pairs."
    )
