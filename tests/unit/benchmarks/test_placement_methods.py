"""What the solver of placements is compared with: every method gives a placement, and finds what is
plain to see."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks.placement.clusters import k_means
from benchmarks.placement.cross_entropy import cross_entropy
from benchmarks.placement.others import eplb, load_alone
from benchmarks.placement.synthetic import planted, routing_of
from contracts.placement import bounds_of
from planner.placement.routing import LayerRouting, local_fraction, measure
from planner.placement.slots import Line, contiguous_line, layer_slots
from tests.support.made_up_routing import any_routing

Method = Callable[[LayerRouting, Sequence[int]], Line]
SECONDS = 0.2


def _metis(name: str) -> Method:
    def method(routing: LayerRouting, slots: Sequence[int]) -> Line:
        pytest.importorskip("pymetis", reason="pymetis is in the extra bench")
        from benchmarks.placement import partitions

        cut: Line = getattr(partitions, name)(routing, slots, 0)
        return cut

    return method


METHODS: dict[str, Method] = {
    "k-means": lambda routing, slots: k_means(routing, slots, 0, SECONDS).line,
    "cross-entropy": lambda routing, slots: cross_entropy(routing, slots, 0, SECONDS).line,
    "METIS, ids": _metis("metis_ids"),
    "METIS, together": _metis("metis_together"),
    "load": load_alone,
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("slots", [(4, 4, 4), (5, 4, 3)])
def test_every_method_places_every_expert_once(name: str, slots: tuple[int, ...]) -> None:
    line = METHODS[name](any_routing(12, 2, 1500, seed=0), slots)
    assert sorted(line) == list(range(12))


@pytest.mark.parametrize("name", ["k-means", "METIS, ids", "METIS, together"])
def test_methods_that_look_for_groups_find_planted_ones(name: str) -> None:
    routing, _ = planted(16, 3, 4, stray=0.02, tokens=4000, seed=1)
    slots = (4, 4, 4, 4)
    found = measure(routing, layer_slots(METHODS[name](routing, slots), slots))
    plain = measure(routing, layer_slots(contiguous_line(routing.load(), slots), slots))
    assert found.copies < 1.1 < plain.copies


def test_labels_of_the_methods_own_are_better_than_any_where_groups_are_planted() -> None:
    routing, _ = planted(16, 3, 4, stray=0.02, tokens=4000, seed=1)
    slots = (4, 4, 4, 4)
    for method in (k_means, cross_entropy):
        found = method(routing, slots, 0, SECONDS)
        assert local_fraction(routing, layer_slots(found.line, slots), found.rank_of_id_V) > 0.3


@pytest.mark.parametrize(("ranks", "spare"), [(2, 3), (4, 1), (4, 4), (3, 5)])
def test_eplb_has_no_expert_twice_on_a_rank_and_spreads_a_hot_one(ranks: int, spare: int) -> None:
    rng = np.random.default_rng(0)
    sets_PK = np.stack([np.zeros(900, np.int64), rng.integers(1, 12, 900)], 1)
    slots = [12 // ranks + spare] * ranks
    line = eplb(routing_of(12, sets_PK, sets_PK[:, 1]), slots)
    assert set(line) == set(range(12))
    for low, high in bounds_of(slots):
        assert len(set(line[low:high])) == high - low
    assert line.count(0) > 1
