"""Eviction policies of an expert cache."""

import random

import pytest

from models.experts.expert_eviction import Eviction, EvictionKind, ExpertKey, pays


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(layer, expert)


@pytest.mark.parametrize(
    ("kind", "evicted"),
    [
        ("lru", [key(0, 1), key(1, 0), key(2, 0), key(0, 0)]),
        ("walk", [key(0, 1), key(0, 0), key(2, 0), key(1, 0)]),
    ],
)
def test_candidates_are_in_eviction_order(kind: EvictionKind, evicted: list[ExpertKey]) -> None:
    order = Eviction(kind)
    for each in (key(0, 0), key(0, 1), key(1, 0), key(2, 0)):
        order.on_insert(each)
    for each in (key(0, 0), key(2, 0), key(1, 0), key(2, 0), key(0, 0)):
        order.on_use(each)
    assert list(order.candidates(1)) == evicted
    order.on_evict(evicted[0])
    assert list(order.candidates(1)) == evicted[1:]


@pytest.mark.parametrize("kind", ["lru", "walk"])
def test_candidates_are_the_cached_experts(kind: EvictionKind) -> None:
    dice = random.Random(3)
    order = Eviction(kind)
    kept: set[ExpertKey] = set()
    for _ in range(2000):
        each = key(dice.randrange(3), dice.randrange(9))
        if each in kept:
            order.on_use(each)
        else:
            if len(kept) == 8:
                evicted = next(iter(order.candidates(each.layer)))
                order.on_evict(evicted)
                kept.remove(evicted)
            order.on_insert(each)
            kept.add(each)
        assert sorted(order.candidates(each.layer)) == sorted(kept)


def test_prefetch_pays_if_expected_gain_exceeds_cost() -> None:
    assert pays(0.6, 1.0, 1.0)
    assert not pays(0.4, 1.0, 1.0)
    assert pays(0.4, 1.0, 0.25), "the wait for one piece is short"
    assert not pays(1.0, 0.0, 1.0)
