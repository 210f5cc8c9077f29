"""Placement and shuffling over links of two speeds."""

import itertools

import numpy as np
import pytest

from actors.planning.planner_inputs import layer_routing
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from planner.arrays import Ints
from planner.placement.nodes import (
    LinkLevels,
    aligned_on_nodes,
    even_nodes,
    levels_of_hosts,
    sent_ranks,
    solve_on_nodes,
)
from planner.placement.routing import LayerRouting, TokenCounts, measure
from planner.placement.shuffling import shuffled_order
from planner.placement.slots import layer_slots
from planner.placement.solve import solve_layer

SLOTS, LEVELS = (4,) * 4, even_nodes(4, 2)


def bundled(layer: int) -> LayerRouting:
    folder = resolve_model_folder(BUNDLED)
    counts = RoutingCounts.read(folder / "routing.safetensors", folder, read_spec(folder))
    return layer_routing(counts, layer)


def test_copies_are_those_of_a_slow_count() -> None:
    sent_TR = np.random.default_rng(0).random((50, 6)) < 0.5
    sent_TR[:, 0] |= ~sent_TR.any(1)
    levels, inner, outer = LinkLevels((0, 0, 1, 1, 1, 2)), 0, 0
    for row in sent_TR:
        nodes = [levels.nodes[rank] for rank in np.flatnonzero(row)]
        most = max(nodes.count(node) for node in nodes)
        inner, outer = inner + most - 1, outer + len(nodes) - most
    copies = levels.copies(sent_TR)
    assert copies.inner * 50 == pytest.approx(inner)
    assert copies.outer * 50 == pytest.approx(outer)


def test_experts_used_together_share_a_node() -> None:
    # Experts e and e + 8 belong to one of two kinds of tokens; each kind uses eight, in turn.
    kinds = [np.arange(0, 16, 2), np.arange(1, 16, 2)]
    rng = np.random.default_rng(0)
    sets_PK = np.stack([rng.choice(kinds[row % 2], 4, replace=False) for row in range(2000)])
    none = np.zeros(0, np.int64)
    ids_P = np.zeros(2000, np.int64)
    routing = LayerRouting(16, sets_PK, ids_P, TokenCounts(none, none, none))
    line = solve_on_nodes(routing, SLOTS, LEVELS)
    assert LEVELS.copies(sent_ranks(routing, line, SLOTS)).outer == 0.0


@pytest.mark.parametrize("layer", [1, 3])
def test_bundled_model_sends_less_between_nodes(layer: int) -> None:
    routing = bundled(layer)
    plain = solve_layer(routing, SLOTS)
    line = solve_on_nodes(routing, SLOTS, LEVELS)
    before, after = (LEVELS.copies(sent_ranks(routing, each, SLOTS)) for each in (plain, line))
    best = min(
        LEVELS.row_time(LEVELS.copies(sent_ranks(routing, plain, SLOTS)[:, order]))
        for order in itertools.permutations(range(4))
    )
    assert LEVELS.row_time(after) <= best * 1.01 < LEVELS.row_time(before) * 1.01
    aligned = aligned_on_nodes([line], [routing.counts], SLOTS, 16, LEVELS)[0]
    assert LEVELS.copies(sent_ranks(routing, aligned, SLOTS)) == pytest.approx(after)
    loads = [measure(routing, layer_slots(each, SLOTS)).load for each in (line, aligned)]
    assert loads[0] == loads[1]


def test_token_lands_on_the_node_with_most_of_its_experts() -> None:
    shares_TW = np.array([[0.4, 0.0, 0.3, 0.3], [0.4, 0.4, 0.2, 0.0], [0.0, 0.2, 0.4, 0.4]] * 4)
    levels = levels_of_hosts(["a", "a", "b", "b"])
    assert levels.nodes == (0, 0, 1, 1)
    best = [levels.landing_values(shares_TW)[row].argmax() for row in range(3)]
    assert best == [2, 0, 2]
    one = levels_of_hosts(["a"] * 4)
    assert (one.landing_values(shares_TW) == shares_TW).all()
    assert one.mean_row == 1.0
    assert levels.mean_row == pytest.approx(1 + 9 * 8 / 12)

    def local(order: Ints) -> float:
        places = [[0, 1]] * 6 + [[2, 3]] * 6
        return float(
            sum(shares_TW[row, each].sum() for row, each in zip(order, places, strict=True))
        )

    assert local(shuffled_order(levels.landing_values(shares_TW))) > local(
        shuffled_order(shares_TW)
    )
