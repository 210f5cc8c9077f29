"""What the solver of placements is compared with: every method gives a placement, and finds what is
plain to see."""

from collections.abc import Callable, Sequence

import pytest

from benchmarks.placement.clusters import k_means
from benchmarks.placement.compared import load_alone
from benchmarks.placement.cross_entropy import cross_entropy
from benchmarks.placement.synthetic import planted
from planner.placement.routing import LayerRouting, measure
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
    "k-means": lambda routing, slots: k_means(routing, slots, 0, SECONDS),
    "cross-entropy": lambda routing, slots: cross_entropy(routing, slots, 0, SECONDS),
    "METIS, ids": _metis("metis_ids"),
    "METIS, together": _metis("metis_together"),
    "load": load_alone,
}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("slots", [(4, 4, 4), (5, 4, 3)])
def test_every_method_places_every_expert_once(name: str, slots: tuple[int, ...]) -> None:
    line = METHODS[name](any_routing(12, 2, 1500, seed=0), slots)
    assert sorted(line) == list(range(12))


@pytest.mark.long
@pytest.mark.parametrize("name", ["k-means", "METIS, ids", "METIS, together"])
def test_methods_that_look_for_groups_find_planted_ones(name: str) -> None:
    routing, _ = planted(16, 3, 4, stray=0.02, tokens=4000, seed=1)
    slots = (4, 4, 4, 4)
    found = measure(routing, layer_slots(METHODS[name](routing, slots), slots))
    plain = measure(routing, layer_slots(contiguous_line(routing.load(), slots), slots))
    assert found.copies < 1.1 < plain.copies
