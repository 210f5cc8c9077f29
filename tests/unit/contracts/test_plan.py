"""Consistency of plans and placements."""

import pickle
from typing import Any

import msgspec
import pytest

from contracts.errors import ConfigError
from contracts.placement import Placement
from contracts.plan import Order, Plan
from planner.placement.slots import check_fits, contiguous, expert_ranges
from tests.support.placements import replicated


def test_plan_beyond_the_paper_round_trips_through_json() -> None:
    plan = Plan(
        r1=4, r2=2, ma=2, shared_lag=1,
        micro_batch_samples=(2, 1), sequence_chunks=(0.625, 1.0),
    )  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert plan.label == "asas ma=2+1 r1=4 r2=2 lag=1 chunks=2"


@pytest.mark.parametrize(
    ("fields", "beyond"),
    [
        ({}, False),
        ({"ma": 2, "r1": 3, "r2": 4, "order": Order.AASS}, False),
        ({"shared_lag": 1, "r1": 2}, True),
        ({"r1": 2, "micro_batch_samples": (4, 3)}, True),
        ({"r1": 2, "sequence_chunks": (0.5, 1.0)}, True),
    ],
)
def test_plan_is_beyond_paper(fields: dict[str, Any], beyond: bool) -> None:
    assert Plan(**fields).is_beyond_paper is beyond


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shared_lag": -1}, "shared_lag=-1"),
        ({"shared_lag": 2, "r1": 2}, "shared_lag=2 with order asas, r1=2"),
        ({"shared_lag": 1, "order": Order.AASS}, "shared_lag=1 with order aass"),
        ({"shared_lag": 1, "order": Order.PPPIPE}, "order pppipe takes none"),
        ({"micro_batch_samples": (4,), "order": Order.NAIVE}, "order naive takes none"),
        ({"micro_batch_samples": (4, 3)}, "r1=1 with 2 sizes"),
        ({"micro_batch_samples": (4, 0), "r1": 2}, "sizes are at least 1"),
        ({"micro_batch_samples": (4, 3), "r1": 2, "ma": 3}, "ma the largest"),
        ({"sequence_chunks": (0.5, 1.0), "r1": 3}, "r1=3"),
        ({"sequence_chunks": (0.5, 1.0), "r1": 2, "micro_batch_samples": (1, 1)}, "r1=2"),
        ({"sequence_chunks": (0.5, 0.9), "r1": 2}, "sequence_chunks"),
        ({"sequence_chunks": (0.5, 0.5, 1.0), "r1": 3}, "sequence_chunks"),
        ({"sequence_chunks": (0.0, 1.0), "r1": 2}, "sequence_chunks"),
    ],
)
def test_inconsistent_fields_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**fields)


SOME = Placement(
    num_experts=3, slots_per_rank=(2, 2), expert_of_slot=((), (2, 0, 1, 2), (0, 1, 1, 2))
)


def test_experts_of_a_rank_differ_by_layer() -> None:
    assert SOME.ranks == 2
    assert SOME.experts_of(0) == {1: (2, 0), 2: (0, 1)}
    assert SOME.experts_of(1) == {1: (1, 2), 2: (1, 2)}
    assert Placement().ranks == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots_per_rank": (2, -2)}, r"slots_per_rank=\(2, -2\): give numbers from 0"),
        ({"slots_per_rank": (2, 1)}, r"expert_of_slot\[1\] has 4 slots, slots_per_rank adds up to"),
        ({"num_experts": 4}, r"expert_of_slot\[1\]: expert 3 is not placed, or not one of the 4"),
        ({"num_experts": 10**15}, r"expert_of_slot\[1\] has 4 slots for 10{15} experts: too few"),
        ({"num_experts": 2}, r"expert_of_slot\[1\]: expert 2 is not placed, or not one of the 2"),
        ({"expert_of_slot": ((0, 1, 2, 2),)}, r"expert_of_slot\[0\]: rank 1 has an expert twice"),
    ],
)
def test_invalid_placement_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(SOME, **change)


def test_digest_identifies_a_placement() -> None:
    assert pickle.loads(pickle.dumps(SOME)).digest == SOME.digest
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(SOME), type=Placement)
    assert decoded == SOME
    assert decoded.digest == SOME.digest
    swapped = msgspec.structs.replace(SOME, expert_of_slot=SOME.expert_of_slot[::-1])
    cut = msgspec.structs.replace(SOME, slots_per_rank=(1, 3), expert_of_slot=((0, 0, 1, 2),))
    assert len({one.digest for one in (SOME, swapped, cut, Placement())}) == 4


@pytest.mark.parametrize(("experts", "ranks"), [(7, 3), (8, 2), (4, 1), (2, 3), (5, 0)])
def test_contiguous_placement_is_even_and_ordered(experts: int, ranks: int) -> None:
    placement = contiguous(experts, ranks, num_layers=3, moe_layers=[1, 2])
    assert placement.ranks == ranks
    if ranks:
        sizes = placement.slots_per_rank
        assert sum(sizes) == experts
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)
        assert placement.expert_of_slot == ((), tuple(range(experts)), tuple(range(experts)))
        ranges = [range(first, last) for first, last in expert_ranges(placement)]
        assert [list(one) for one in ranges] == [
            list(placement.experts_of(rank)[1]) for rank in range(ranks)
        ]


def test_unordered_expert_ranges_are_rejected() -> None:
    placement = replicated(6, [0, 1], num_layers=2, moe_layers=[1], seed=1)
    with pytest.raises(ConfigError, match="layer 1's experts in another order, or more than once"):
        expert_ranges(placement)


@pytest.mark.parametrize(
    ("ranks", "experts", "layers"), [(3, 3, (1, 2)), (2, 4, (1, 2)), (2, 3, (0, 1)), (2, 3, (1,))]
)
def test_placement_of_another_group_or_model_is_rejected(
    ranks: int, experts: int, layers: tuple[int, ...]
) -> None:
    check_fits(SOME, 2, 3, (1, 2))
    with pytest.raises(ConfigError, match="the placement is of 3 experts in 2 layers on 2 ranks"):
        check_fits(SOME, ranks, experts, layers)
