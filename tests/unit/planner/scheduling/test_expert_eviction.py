"""Which expert leaves a cache."""

from __future__ import annotations

import random

import pytest

from contracts.expert_eviction import ExpertKey
from planner.scheduling.expert_eviction import AGE_USES, Kind, eviction
from planner.scheduling.prefetch_trial import pays


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(layer, expert)


KEYS = [key(0, 0), key(0, 1), key(1, 0), key(2, 0)]


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("lru", [key(0, 1), key(1, 0), key(2, 0), key(0, 0)]),
        ("lfu", [key(0, 1), key(2, 0), key(1, 0), key(0, 0)]),
        ("walk", [key(0, 1), key(0, 0), key(2, 0), key(1, 0)]),
        ("pinned", [key(1, 0), key(2, 0), key(0, 1), key(0, 0)]),
    ],
)
def test_the_order_in_which_experts_leave(kind: Kind, leaves: list[ExpertKey]) -> None:
    frequencies = {key(0, 0): 0.6, key(0, 1): 0.5, key(1, 0): 0.4, key(2, 0): 0.1}
    order = eviction(kind, 3, frequencies)  # two of three slots are for pinned ones
    for each in KEYS:
        order.on_insert(each)
    for each in (key(0, 0), key(1, 0), key(2, 0), key(0, 0), key(1, 0), key(0, 0)):
        if kind == "lfu" or each != key(1, 0):
            order.on_use(each)
    if kind in ("lru", "walk", "pinned"):
        for each in (key(1, 0), key(2, 0), key(0, 0)):
            order.on_use(each)
    assert list(order.candidates(1)) == leaves
    order.on_evict(leaves[0])
    assert list(order.candidates(1)) == leaves[1:]


def test_counts_age_so_that_what_was_once_used_often_leaves_in_the_end() -> None:
    order = eviction("lfu", 2, {})
    order.on_insert(key(0, 0))
    order.on_insert(key(0, 1))
    for _ in range(40):
        order.on_use(key(0, 0))
    for _ in range(20 * AGE_USES):
        order.on_use(key(0, 1))
    assert list(order.candidates(0)) == [key(0, 0), key(0, 1)]


@pytest.mark.parametrize("kind", ["lru", "lfu", "walk", "pinned"])
def test_each_policy_knows_what_is_kept(kind: Kind) -> None:
    dice = random.Random(3)
    order = eviction(kind, 8, {key(0, number): 1.0 / (1 + number) for number in range(9)})
    kept: set[ExpertKey] = set()
    for _ in range(2000):
        each = key(dice.randrange(3), dice.randrange(9))
        if each in kept:
            order.on_use(each)
        else:
            if len(kept) == 8:
                on_evict = next(iter(order.candidates(each.layer)))
                order.on_evict(on_evict)
                kept.remove(on_evict)
            order.on_insert(each)
            kept.add(each)
        assert sorted(order.candidates(each.layer)) == sorted(kept)


def test_reading_ahead_pays_where_more_is_hidden_than_lost() -> None:
    assert pays(0.6, 1.0, 1.0)
    assert not pays(0.4, 1.0, 1.0)
    assert pays(0.4, 1.0, 0.25), "pieces can be given up soon"
    assert not pays(1.0, 0.0, 1.0)
