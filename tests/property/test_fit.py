"""Fits: recovery of exact models, robustness to outliers, non-negative coefficients."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.fit import OnlineLinear, fit_linear, fit_nonnegative
from planner.costs.stages import Linear

coefficients = st.floats(1e-3, 1e3)
sizes = st.lists(st.floats(0.5, 5e3), min_size=6, max_size=20, unique=True).filter(
    lambda xs: max(xs) > 10 * min(xs)
)
seeds = st.integers(0, 2**32)
some = settings(deadline=None, max_examples=60)


def noisy(model: Linear, xs: list[float], seed: int, spread: float) -> list[tuple[float, float]]:
    noise = random.Random(seed)
    return [(x, model.at(x) * (1 + noise.uniform(-spread, spread))) for x in xs]


@some
@given(coefficients, coefficients, sizes)
def test_exact_samples_recover_the_model(alpha: float, beta: float, xs: list[float]) -> None:
    model = fit_linear([(x, alpha + beta * x) for x in xs])
    for x in xs:
        assert model.at(x) == pytest.approx(alpha + beta * x, rel=1e-6)
    features = np.array([(1.0, x) for x in xs])
    assert fit_nonnegative(features, features @ [alpha, beta]).r2 == pytest.approx(1.0, abs=1e-6)


@some
@given(coefficients, coefficients, seeds)
def test_few_outliers_hardly_change_a_fit(alpha: float, beta: float, seed: int) -> None:
    xs = [alpha / beta * 2.0**power for power in range(-8, 9)]
    samples = noisy(Linear(alpha, beta), xs, seed, 0.01)
    for index in random.Random(seed).sample(range(len(samples)), 3):
        samples[index] = (samples[index][0], 10 * samples[index][1])
    model = fit_linear(samples)
    for x in xs:
        assert model.at(x) == pytest.approx(alpha + beta * x, rel=0.05)


@some
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=60))
def test_coefficients_are_never_negative(samples: list[tuple[float, float]]) -> None:
    online = OnlineLinear(Linear(1.0, 1.0), 10.0)
    for x, ms in samples:
        online.update(x, ms)
    for model in (fit_linear(samples), online.model):
        assert model.alpha_ms >= 0
        assert model.beta_ms >= 0


@some
@given(seeds)
def test_no_other_non_negative_coefficients_are_nearer(seed: int) -> None:
    """Against 200 neighbours of the optimum under Huber's loss; true coefficients may be 0."""
    random_ = np.random.default_rng(seed)
    features = random_.uniform(0.1, 1.0, (12, 3))
    truth = np.maximum(random_.uniform(-0.5, 1.0, 3), 0.0)
    truth[0] += 0.1
    times = features @ truth * random_.uniform(0.99, 1.01, 12)
    found = fit_nonnegative(features, times).coefficients_F
    sigma = max(1.4826 * np.median(np.abs(features @ found / times - 1.0)), 1e-6)

    def loss(coefficients: np.ndarray) -> float:
        errors = np.abs(features @ coefficients / times - 1.0) / (1.5 * sigma)
        return float(np.where(errors < 1, errors**2, 2 * errors - 1).sum())

    for step in random_.normal(0, 1e-2, (200, 3)):
        assert loss(np.maximum(found + step, 0.0)) >= loss(found) * (1 - 1e-3)


@some
@given(seeds)
def test_feature_within_rounding_is_left_out(seed: int) -> None:
    random_ = np.random.default_rng(seed)
    features = random_.uniform(0.1, 1.0, (5, 3))
    times = features[:, :2] @ [0.5, 0.2] * (1 + random_.uniform(-1e-14, 1e-14, 5))
    found = fit_nonnegative(features, times).coefficients_F
    assert found == pytest.approx([0.5, 0.2, 0.0])
    assert found[2] == 0.0


@pytest.mark.parametrize(
    "samples", [[], [(1.0, 0.0)], [(1.0, float("nan"))], [(-1.0, 2.0)], [(float("inf"), 2.0)]]
)
def test_invalid_samples_are_rejected(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="sample"):
        fit_linear(samples)
    for x, ms in ((-1.0, 1.0), (1.0, 0.0), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="above 0 ms"):
            OnlineLinear(Linear(1.0, 1.0), 10.0).update(x, ms)


xs_of_traffic = st.lists(st.floats(1.0, 100.0), min_size=2, max_size=5, unique=True).filter(
    lambda xs: max(xs) > 3 * min(xs)
)


@some
@given(coefficients, coefficients, st.floats(0.3, 3.0), xs_of_traffic, seeds)
def test_drift_is_tracked(
    alpha: float, beta: float, factor: float, xs: list[float], seed: int
) -> None:
    online = OnlineLinear(Linear(alpha, beta), 10.0)
    drifted = Linear(factor * alpha, factor * beta)
    for x, ms in noisy(drifted, xs * 100, seed, 0.02):
        online.update(x, ms)
    for x in xs:
        assert online.model.at(x) == pytest.approx(drifted.at(x), rel=0.05)


@some
@given(coefficients, coefficients, xs_of_traffic, seeds)
def test_tenfold_outlier_changes_nothing(
    alpha: float, beta: float, xs: list[float], seed: int
) -> None:
    truth = Linear(alpha, beta)
    online = OnlineLinear(truth, 10.0)
    for x, ms in noisy(truth, xs * 20, seed, 0.02):
        online.update(x, ms)
    before = online.model
    online.update(xs[0], 10 * truth.at(xs[0]))
    for x in xs:
        assert online.model.at(x) == pytest.approx(before.at(x), rel=0.01)


@some
@given(coefficients, coefficients, st.floats(1.0, 100.0), st.floats(0.5, 2.0))
def test_traffic_of_one_size_is_fitted_there(
    alpha: float, beta: float, x: float, factor: float
) -> None:
    prior = Linear(alpha, beta)
    online = OnlineLinear(prior, 10.0)
    for _ in range(3000):
        online.update(x, factor * prior.at(x))
    assert online.model.at(x) == pytest.approx(factor * prior.at(x), rel=0.01)
    for other in (x / 2, 2 * x):
        assert 0.2 * prior.at(other) < online.model.at(other) < 5 * prior.at(other)
