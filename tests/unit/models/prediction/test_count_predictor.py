"""Estimates from routing counts, on routing with known probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.prediction.count_predictor import (
    BOTH,
    MARGINAL,
    MORE_CONFIDENT,
    PREVIOUS,
    TOKEN,
    TWO_LAYERS,
    TWO_TOKENS,
    CountPredictor,
    NearestTokens,
    more_confident,
)
from models.prediction.path_sample import RoutingPaths
from models.prediction.routing_counter import CountedModel, RoutingCounter
from models.prediction.routing_counts import RoutingCounts

E, K, V = 8, 2, 30
OF = CountedModel(b"c" * 32, b"t" * 32, (0, 1, 2), E, K, V)


def routed(ids_T2: np.ndarray, wanted_TL: np.ndarray) -> tuple[RoutingCounts, RoutingPaths]:
    """Return routing of each token to the wanted expert and the next one."""
    paths_TLK = np.stack([wanted_TL % E, (wanted_TL + 1) % E], 2)
    counter = RoutingCounter(OF)
    counter.add(ids_T2, paths_TLK)
    return counter.counts(), RoutingPaths(ids_T2.astype(np.int32), paths_TLK.astype(np.int16))


def ids(count: int = 600, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (count, 2))


def hit_fraction(chances_TE: np.ndarray, experts_TK: np.ndarray) -> float:
    """Return the fraction of the tokens' experts among the K most likely."""
    likeliest_TK = np.argsort(-chances_TE, axis=1)[:, :K]
    return float((likeliest_TK[:, :, None] == experts_TK[:, None, :]).any(1).mean())


def hits(counts: RoutingCounts, tokens: RoutingPaths, layer: int) -> dict[str, float]:
    found = CountPredictor(counts, layer).predict(tokens)
    assert all(
        probabilities.sum(1) == pytest.approx(K, abs=1e-3) for probabilities in found.values()
    )
    return {name: hit_fraction(each, tokens.paths_PLK[:, layer]) for name, each in found.items()}


def test_token_determines_experts() -> None:
    ids_T2 = ids()
    found = hits(*routed(ids_T2, np.repeat(ids_T2[:, :1], 3, 1)), 0)
    assert found.keys() == {MARGINAL, TOKEN, TWO_TOKENS}
    assert found[TOKEN] == found[TWO_TOKENS] == 1.0
    assert found[MARGINAL] < 0.6


def test_two_tokens_determine_experts() -> None:
    ids_T2 = ids() % 6
    found = hits(*routed(ids_T2, np.repeat(ids_T2.sum(1, keepdims=True), 3, 1)), 0)
    assert found[TWO_TOKENS] == 1.0
    assert found[TOKEN] < 0.8


def test_previous_layers_determine_experts() -> None:
    random = np.random.default_rng(1)
    before_T2 = random.integers(0, E, (2000, 2))
    wanted_TL = np.concatenate([before_T2, before_T2.sum(1, keepdims=True)], 1)
    found = hits(*routed(ids(2000), wanted_TL), 2)
    assert found[TWO_LAYERS] == 1.0
    assert found[MORE_CONFIDENT] > 0.99
    assert max(found[TOKEN], found[PREVIOUS], found[MARGINAL]) < 0.6
    wanted_TL[:, 2] = wanted_TL[:, 1] + 3
    assert hits(*routed(ids(2000), wanted_TL), 2)[PREVIOUS] == 1.0


def test_token_and_previous_layer_predict_better_than_either() -> None:
    random = np.random.default_rng(2)
    ids_T2, before_T = ids(4000) % E, random.integers(0, E, 4000)
    leans = random.random(4000) < 0.5
    wanted_T = np.where(leans, ids_T2[:, 0], before_T)
    counts, tokens = routed(ids_T2, np.stack([before_T, before_T, wanted_T], 1))
    found = hits(counts, tokens, 2)
    assert found[BOTH] > max(found[TOKEN], found[PREVIOUS]) + 0.01


def test_unknown_token_gets_marginal_probabilities() -> None:
    counts, _ = routed(ids() % 10, np.zeros((600, 3), np.int64))
    other = RoutingPaths(np.array([[20, 21]], np.int32), np.array([[[4, 5]] * 3], np.int16))
    for name, probabilities in CountPredictor(counts, 1).predict(other).items():
        assert probabilities[0, :2] == pytest.approx([1.0, 1.0], abs=1e-6), name


def test_unprofiled_token_uses_counts_of_nearest_token() -> None:
    """Ids from 10 on are not profiled, and their embeddings are near id % 10."""
    ids_T2 = ids(400) % 10
    counts, _ = routed(ids_T2, np.repeat(ids_T2[:, :1], 3, 1))
    embedding_VD = torch.eye(10).repeat(3, 1) + 0.1 * torch.rand(V, 10)
    unseen = np.arange(10, V, dtype=np.int32)
    wanted_TK = np.stack([unseen % 10 % E, (unseen % 10 + 1) % E], 1)
    tokens = RoutingPaths(np.stack([unseen, unseen], 1), np.repeat(wanted_TK[:, None], 3, 1))
    without = CountPredictor(counts, 0).predict(tokens)[TOKEN]
    found = CountPredictor(counts, 0, NearestTokens(embedding_VD)).predict(tokens)[TOKEN]
    assert hit_fraction(found, wanted_TK) == 1.0
    assert hit_fraction(without, wanted_TK) < 0.7


def test_nearest_token_is_by_angle_and_keeps_profiled_ids() -> None:
    nearest = NearestTokens(
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 1.0], [0.0, 0.0], [-1.0, 0.1]])
    )
    assert nearest.profiled(np.arange(5), np.array([0, 1])).tolist() == [0, 1, 0, 0, 1]
    assert nearest.profiled(np.arange(5), np.array([], np.int64)).tolist() == [0, 1, 2, 3, 4]
    many = NearestTokens(torch.randn(2000, 4))
    found = many.profiled(np.arange(2000), np.arange(0, 2000, 7))
    assert (found % 7 == 0).all()


def test_more_confident_estimate_is_chosen_per_token() -> None:
    one = np.array([[0.9, 0.8, 0.3], [0.5, 0.5, 1.0]])
    other = np.array([[1.0, 0.6, 0.4], [0.1, 0.95, 0.95]])
    assert more_confident(one, other, 2).tolist() == [one[0].tolist(), other[1].tolist()]
