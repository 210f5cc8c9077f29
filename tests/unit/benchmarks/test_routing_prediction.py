"""Ranks foretold, where it is known what is to come out."""

from __future__ import annotations

import numpy as np

from benchmarks.routing_prediction import RankGuess, by_ranks_before, own_rank

OF_EXPERT = np.array([0, 0, 1, 1])


def test_a_tokens_own_rank_has_most_of_its_experts_and_of_equals_the_first_named() -> None:
    experts_TK = np.array([[0, 1, 2], [3, 2, 0], [2, 0, 1]])
    assert own_rank(experts_TK, OF_EXPERT, 2).tolist() == [0, 1, 0]
    assert own_rank(np.array([[3, 0], [0, 3]]), OF_EXPERT, 2).tolist() == [1, 0]


def test_ranks_of_two_layers_foretell_the_next_by_what_followed_them() -> None:
    random = np.random.default_rng(0)
    before = random.integers(0, 2, (400, 2))
    ranks_TL = np.concatenate([before, (before.sum(1, keepdims=True) == 1)], 1).astype(np.int64)
    found = by_ranks_before(ranks_TL, ranks_TL, 2, 2)
    assert np.array_equal(found.rank_T, ranks_TL[:, 2])
    assert (found.sure_T > 0.999).all()
    of_one = by_ranks_before(ranks_TL, ranks_TL, 1, 2)
    assert (of_one.sure_T < 0.6).all()
    usual = by_ranks_before(np.ones_like(ranks_TL), ranks_TL, 0, 2)
    assert (usual.rank_T == 1).all()


def test_the_surer_guess_is_taken_token_by_token() -> None:
    one = RankGuess(np.array([0, 0, 0]), np.array([0.9, 0.4, 0.5]))
    other = RankGuess(np.array([1, 1, 1]), np.array([0.8, 0.6, 0.5]))
    both = one.or_surer(other)
    assert both.rank_T.tolist() == [0, 1, 0]
    assert both.sure_T.tolist() == [0.9, 0.6, 0.5]
