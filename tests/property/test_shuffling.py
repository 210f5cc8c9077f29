"""Tokens assigned to workers in equal shards, against a slow reference."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.arrays import Floats
from planner.placement import shuffling
from tests.support.made_up_routing import any_routing


def reference_order(shares_TW: Floats) -> list[int]:
    """Exchange tokens one by one for the two workers at hand, until none gains."""
    tokens, workers = shares_TW.shape
    shards = [
        list(range(*pair)) for pair in itertools.pairwise(shuffling.shard_bounds(tokens, workers))
    ]
    for _ in range(shuffling.MAX_ROUNDS):
        for one, other in itertools.combinations(range(workers), 2):
            gain = [row[one] - row[other] for row in shares_TW.tolist()]
            here, there = shards[one], shards[other]
            while here and there:
                worst = min(here, key=lambda t: (gain[t], -t))
                best = max(there, key=lambda t: (gain[t], -t))
                if gain[best] <= gain[worst]:
                    break
                here[here.index(worst)], there[there.index(best)] = best, worst
    return [token for shard in shards for token in sorted(shard)]


@st.composite
def shares(draw: st.DrawFn) -> Floats:
    size = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    return rng.integers(0, draw(st.sampled_from([2, 5, 10**6])), size) / 4.0


@settings(max_examples=150, deadline=None)
@given(shares())
def test_order_is_a_permutation_equal_to_the_reference_and_never_worse(shares_TW: Floats) -> None:
    order_T = shuffling.shuffled_order(shares_TW)
    tokens, workers = shares_TW.shape
    assert order_T.tolist() == reference_order(shares_TW)
    assert sorted(order_T.tolist()) == list(range(tokens))
    bounds = shuffling.shard_bounds(tokens, workers)
    assert bounds[-1] == tokens
    assert np.ptp(np.diff(bounds)) <= 1
    worker_T = np.repeat(np.arange(workers), np.diff(bounds))
    assert shares_TW[order_T, worker_T].sum() >= shares_TW[np.arange(tokens), worker_T].sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**20))
def test_tables_predict_mean_shares_and_the_surer_one_is_taken(workers: int, seed: int) -> None:
    rng, routing = np.random.default_rng(seed), any_routing(4 * workers, 2, 300, seed)
    holds_EW = rng.permutation(np.repeat(np.arange(workers), 4))[:, None] == np.arange(workers)
    before = [(routing.sets_PK[rng.permutation(300)], holds_EW) for _ in range(2)]
    tables = shuffling.share_tables(routing.counts, [*before, (routing.sets_PK, holds_EW)])
    two_P2 = np.stack([shuffling.main_workers(*each) for each in before], 1)
    found_PW = tables.predict(routing.ids_P, two_P2)
    here_PW = holds_EW[routing.sets_PK].mean(1)
    for token in range(0, 300, 37):
        same_two = (two_P2 == two_P2[token]).all(1)
        expected = [
            (here_PW[same].sum(0) + here_PW.mean(0)) / (same.sum() + 1)
            for same in (routing.ids_P == routing.ids_P[token], same_two)
        ]
        surest = np.max(expected) - 1e-9
        assert any(np.allclose(found_PW[token], e) for e in expected if e.max() > surest)
    first = shuffling.share_tables(
        routing.counts, [(routing.sets_PK, holds_EW)]
    )  # and an unknown id
    np.testing.assert_allclose(first.predict(np.array([10**6]), two_P2[:1])[0], here_PW.mean(0))
