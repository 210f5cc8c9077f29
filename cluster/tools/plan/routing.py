"""`tandem plan` with a routing profile: copies and load of experts in order and placed."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from planner.costs.routing_shape import RoutingShape, Spread, uniform
from planner.placement.layout import PlacementCosts
from planner.placement.routing import LayerRouting
from planner.placement.slots import Line, contiguous, contiguous_line, layer_slots
from planner.placement.solve import WORK, solve_layer
from planner.placement.solve import split as split_sample
from planner.schedule.alternatives import Workload, any_split
from planner.schedule.deployment_search import Split, busy_fractions
from planner.schedule.placed_routing import routing_shape

MIN_GAIN = 0.005  # fraction of throughput; smaller gains count as none
LAYERS = 8  # placed, evenly spaced; each represents the layers nearest to it
SKETCH, THOROUGH = WORK // 100, WORK // 5
"""The solver's work for a layer: for each number of ranks of the search, and for the answer's."""


class RoutingAnswer(msgspec.Struct, kw_only=True):
    """Routing of the best split.

    in_order: each expert once, no spare slots. gain_fraction: of throughput over the best split
    with experts in order.
    """

    spare_slots: int
    copies: float
    load: float
    in_order_copies: float
    in_order_load: float
    in_order_samples_per_s: float
    gain_fraction: float
    advice: str


class ProfiledRouting(NamedTuple):
    """Layers of a profile, ascending.

    Placements use four fifths of the sample; copies and load are measured on the rest.
    """

    layers: list[LayerRouting]
    spare_slots: int


class PlacedRouting:
    """Routing with experts in order, each once, or as the solver places them. A `RoutingByRanks`.

    The solver has replicas in spare slots and minimizes the cost model's layer time: sketched,
    except for refined numbers of ranks.
    """

    def __init__(self, profiled: ProfiledRouting, workload: Workload, *, is_solved: bool) -> None:
        self._profiled, self._workload, self._is_solved = profiled, workload, is_solved
        self._found: dict[int, RoutingShape] = {}

    def __call__(self, ranks: int) -> RoutingShape:
        if ranks not in self._found:
            self._found[ranks] = self._shape(ranks, SKETCH)
        return self._found[ranks]

    def refine(self, *numbers: int) -> None:
        for ranks in set(numbers):
            self._found[ranks] = self._shape(ranks, THOROUGH)

    def _shape(self, ranks: int, work: int) -> RoutingShape:
        profiled, experts = self._profiled, self._workload.shape.num_experts
        if (
            ranks > experts
        ):  # the search refuses such a split; without one, devices may lack experts
            return uniform(self._workload.shape, ranks)
        shares = contiguous(experts, ranks, num_layers=1, moe_layers=[0]).slots_per_rank
        spare = profiled.spare_slots if self._is_solved else 0
        slots = tuple(min(experts, share + spare) for share in shares)

        def place(routing: LayerRouting) -> Line:
            if not self._is_solved:
                return contiguous_line(routing.load(), slots)
            costs = _costs(self._workload, ranks)
            return solve_layer(routing, slots, costs=costs, work=work)

        sampled = _spaced(len(profiled.layers), LAYERS)
        found = routing_shape(
            [
                (split_sample(routing)[1], layer_slots(place(routing), slots))
                for routing in map(profiled.layers.__getitem__, sampled)
            ]
        )
        nearest = [_nearest(layer, sampled) for layer in range(len(profiled.layers))]
        return RoutingShape(tuple(found.layers[each] for each in nearest))


def _spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers below `count`, with the first and the last."""
    chosen = min(count, most)
    return [round(n * (count - 1) / max(1, chosen - 1)) for n in range(chosen)]


def _nearest(number: int, to: Sequence[int]) -> int:
    """Return the index of the nearest number in `to`."""
    return min(range(len(to)), key=lambda place: abs(to[place] - number))


def _costs(workload: Workload, ranks: int) -> PlacementCosts:
    """Return the costs of a pair at an expert rank, and of a copy over all links."""
    shape, hardware = workload.shape, workload.hardware
    senders = workload.devices - ranks if ranks < workload.devices else ranks
    row_bytes = shape.hidden_size * shape.element_bytes
    link_ms = max(any_split(workload, way).ms_per_byte for way in ("a2e", "e2a"))
    return PlacementCosts(
        pair=max(shape.pair_flops * hardware.expert.ms_per_flop, 1e-12),
        copy=max(row_bytes * link_ms / min(senders, ranks), 1e-12),
    )


def routing_answer(
    profiled: ProfiledRouting, before: tuple[Split, RoutingShape], after: tuple[Split, RoutingShape]
) -> RoutingAnswer:
    """Compare the best splits with experts in order and placed."""
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
            f"Placing experts gains {gain:.1%}: a token goes to {now.copies:.2f} ranks instead of "
            f"{was.copies:.2f}, the busiest has {now.load:.2f} of the mean's pairs instead of "
            f"{was.load:.2f}."
        )
    if gain < -MIN_GAIN:
        return (
            f"Placing experts so costs {-gain:.1%} here: spare slots take more memory and expert "
            "calls than they save. Leave them out."
        )
    busy = busy_fractions(split)
    links = max(busy["A2E"], busy["E2A"])
    return (
        f"Grouping has no gain here: links are busy {links:.0%} of the time, expert ranks "
        f"{busy['expert ranks']:.0%}, and in order the busiest has {was.load:.2f} of the mean's "
        "pairs."
    )
