"""Levelling of items over ranks against the lowest possible level."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.placement.levels import level_ranks


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Draw sets of ranks as bits: few or many, of few kinds or many."""
    ranks, kinds = draw(st.integers(1, 8)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    each = rng.integers(1, 1 << ranks, kinds)
    if draw(st.booleans()):  # of two ranks at most
        each = 1 << rng.integers(0, ranks, kinds) | 1 << rng.integers(0, ranks, kinds)
    often = rng.dirichlet(np.full(kinds, draw(st.sampled_from([0.2, 1.0, 5.0]))))
    return rng.choice(each, draw(st.integers(0, 3000)), p=often).astype(np.uint8), ranks


@settings(deadline=None)
@given(cases(), st.booleans())
def test_items_go_to_allowed_ranks_near_the_least_level(
    case: tuple[np.ndarray, int], spread: bool
) -> None:
    """About one case in a hundred is above 1.2 times the least."""
    sets_N, ranks = case
    rank_N = level_ranks(sets_N, ranks, spread=spread)
    assert ((sets_N >> rank_N) & 1).all()
    found = np.bincount(rank_N, minlength=ranks).max()
    assert found <= 1.5 * _least(sets_N, ranks) + ranks


def test_mean_level_is_near_the_least() -> None:
    ratios = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sets_N = rng.choice(rng.integers(1, 256, 3 + seed), 2000).astype(np.uint8)
        load_R = np.bincount(level_ranks(sets_N, 8, spread=seed % 2 == 0), minlength=8)
        ratios.append(load_R.max() / _least(sets_N, 8))
    assert np.mean(ratios) < 1.06


def test_items_of_a_rank_are_spread_over_the_batch() -> None:
    rank_N = level_ranks(np.full(400, 0b11, np.uint8), 2, spread=True)
    assert [np.bincount(rank_N[first : first + 100]).tolist() for first in range(0, 400, 100)] == [
        [50, 50]
    ] * 4


def _least(sets_N: np.ndarray, ranks: int) -> float:
    """Return the maximum over rank sets of the items that only they may take, per rank."""
    times_S, sets = np.bincount(sets_N, minlength=256), np.arange(256)
    return max(
        float(times_S[(sets & ~some & 255) == 0].sum()) / some.bit_count()
        for some in range(1, 1 << ranks)
    )
