"""When traffic turned: once, not at all, or several times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.placement.routing_window import find_shift

N, TOKENS = 16, 400


def runs(kinds: str, seed: int = 0) -> NDArray[np.float64]:
    """A run of each kind, whose experts are drawn; kinds differ in how hot a quarter of them is."""
    random = np.random.default_rng(seed)
    heat = {kind: np.where(np.arange(N) % 4 == at, 3.0, 1.0) for at, kind in enumerate("ABCD")}
    return np.array([random.multinomial(TOKENS, heat[k] / heat[k].sum()) for k in kinds], float)


@given(st.integers(3, 13), st.integers(3, 13), st.integers(0, 9))
def test_a_turn_is_found_where_it_is(before: int, after: int, seed: int) -> None:
    found = find_shift(runs("A" * before + "B" * after, seed))
    assert found == before


@given(st.integers(1, 16), st.integers(0, 200))
def test_traffic_of_one_kind_has_no_turn(length: int, seed: int) -> None:
    assert find_shift(runs("A" * length, seed)) is None


@pytest.mark.parametrize(
    "kinds",
    [
        "ABABABABABABABAB",
        "AABBAABBAABBAABB",
        "AAAAABBBBBAAAAAB",
        "BAAAAABBBBBAAAAA",
        "AAAAAABBBBBBCCCC",
    ],
)
def test_several_turns_are_a_mixture(kinds: str) -> None:
    assert find_shift(runs(kinds)) is None


@pytest.mark.parametrize(
    "kinds", ["BAAAAAAAAAAAAAAA", "AAAAAAAABAAAAAAA", "BABAAAAAAAAAAAAA", "AAAAAAAAAAAAABAB"]
)
def test_single_runs_of_another_kind_are_no_turn(kinds: str) -> None:
    assert find_shift(runs(kinds)) is None


def test_runs_that_do_not_differ_at_all_have_no_turn() -> None:
    assert find_shift(np.ones((16, N))) is None
