"""Resized placements: valid, even, with the fewest moves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError
from contracts.placement import Placement
from planner.placement.resize import experts_received, resize_placement
from planner.placement.slots import contiguous
from tests.support.placements import replicated


def made(experts: int, extra: list[int], seed: int) -> Placement:
    return replicated(experts, extra, num_layers=3, moe_layers=(0, 2), seed=seed)


placements = st.builds(
    made,
    st.integers(5, 9),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(0, 1 << 16),
)


@given(placements, st.integers(1, 5))
def test_resize_keeps_all_experts_and_even_slots(placement: Placement, ranks: int) -> None:
    found = resize_placement(
        placement, ranks, generation=7
    )  # made, so all rules of a placement hold
    assert (found.ranks, found.generation) == (ranks, 7)
    assert max(found.slots_per_rank) - min(found.slots_per_rank) <= 1
    assert [bool(line) for line in found.expert_of_slot] == [True, False, True]
    spare = sum(placement.slots_per_rank) - placement.num_experts
    least = min(spare // placement.ranks * ranks, (placement.num_experts - 1) * ranks)
    assert sum(found.slots_per_rank) - placement.num_experts >= min(
        least, (ranks - 1) * placement.num_experts
    )
    assert found == resize_placement(placement, ranks, generation=7)


def fewest(had: list[set[int]], slots: tuple[int, ...], experts: int) -> int:
    """Return the fewest experts that must move, by trying all that ranks could keep."""
    ways = [
        [set(kept) for size in range(room + 1) for kept in itertools.combinations(own, size)]
        for own, room in zip(had, slots, strict=True)
    ]
    return min(
        sum(slots) - sum(map(len, kept))
        for kept in itertools.product(*ways)
        if experts - len(set().union(*kept)) <= sum(slots) - sum(map(len, kept))
    )


def held(placement: Placement, layer: int, ranks: int) -> list[set[int]]:
    line = placement.expert_of_slot[layer]
    found = [set(line[low:high]) for low, high in placement.slot_bounds[:ranks]]
    return found + [set() for _ in range(ranks - len(found))]


@given(
    st.integers(3, 5),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.integers(0, 1 << 16),
    st.integers(1, 3),
)
def test_resize_moves_as_few_experts_as_possible(
    experts: int, extra: list[int], seed: int, ranks: int
) -> None:
    placement = made(experts, extra, seed)
    found = resize_placement(placement, ranks, generation=1)
    least = sum(
        fewest(held(placement, layer, ranks), found.slots_per_rank, experts) for layer in (0, 2)
    )
    assert sum(experts_received(placement, found)) == least


@given(st.integers(1, 12), st.data())
def test_without_replicas_only_new_ranks_or_leaving_experts_cause_loads(
    experts: int, data: st.DataObject
) -> None:
    before, after = (data.draw(st.integers(1, min(5, experts))) for _ in range(2))
    placement = contiguous(experts, before, num_layers=1, moe_layers=[0])
    found = resize_placement(placement, after, generation=1)
    loads = experts_received(placement, found)
    if after >= before:
        assert not any(loads[:before])
        assert sum(loads) == sum(found.slots_per_rank[before:])
    else:
        assert sum(loads) == sum(placement.slots_per_rank[after:])
    back = resize_placement(found, before, generation=2)
    assert sorted(back.slots_per_rank) == sorted(placement.slots_per_rank)


def test_invalid_rank_count_is_rejected() -> None:
    placement = contiguous(8, 2, num_layers=1, moe_layers=[0])
    for ranks in (0, 9):
        with pytest.raises(ConfigError, match=rf"{ranks} expert ranks for 8 experts: give 1 to 8"):
            resize_placement(placement, ranks, generation=1)


def test_replicas_are_replaced_by_lost_experts() -> None:
    """Two ranks have equal experts, and the ranks with the others leave."""
    line = (0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7)
    placement = Placement(num_experts=8, slots_per_rank=(4, 4, 2, 2), expert_of_slot=(line,))
    found = resize_placement(placement, 2, generation=1)
    assert found.slots_per_rank == (5, 5)
    assert sum(experts_received(placement, found)) == 4
