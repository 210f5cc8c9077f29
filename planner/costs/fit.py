"""Robust least squares for stage models, with non-negative coefficients and relative errors.

Stages span four orders of magnitude: plain least squares would fit the largest sizes and get the
launch times wrong, which decide r1 and r2. Shapes: N samples, F features.

`OnlineLinear` follows measured times: relative least squares over an exponentially weighted past,
with Huber's loss. It follows a slower machine within about MEMORY samples and ignores single
outliers. O(1) time and memory per sample, no clock. For a stage with several sizes (attention:
tokens and pairs), x may be the time that the profile predicts; beta then is a relative speed.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.arrays import Floats
from planner.costs.stages import MAX_MS, Linear

HUBER_WIDTH = 1.5  # in robust standard deviations
_ROUNDS = 40
_CONVERGED = 1e-4
MAD_TO_SIGMA = 1.4826  # of a normal distribution
_LEAST_SIGMA = 1e-6  # of relative errors: below, everything is exact
_ROUNDING = 1e-20  # of a sum of squares: smaller differences depend on the machine's rounding


class NonNegativeFit(NamedTuple):
    """coefficients_F >= 0, and the fit's quality.

    r2: of the samples as they are. median_error_fraction: of |predicted - measured| / measured.
    uncertain: a coefficient vanished and is bounded from below (planner/costs/stage_fit.py).
    """

    coefficients_F: Floats
    predicted_N: Floats
    r2: float
    median_error_fraction: float
    uncertain: bool = False


def fit_linear(samples: Sequence[tuple[float, float]]) -> Linear:
    """Fit alpha_ms + beta_ms * x to (x, ms) samples. Raises ValueError like `fit_nonnegative`."""
    x_N = np.array([x for x, _ in samples], dtype=np.float64)
    features_NF = np.stack([np.ones_like(x_N), x_N], axis=1)
    fit = fit_nonnegative(features_NF, np.array([ms for _, ms in samples], dtype=np.float64))
    alpha_ms, beta_ms = fit.coefficients_F.tolist()
    return Linear(alpha_ms, beta_ms)


def fit_nonnegative(features_NF: Floats, times_N: Floats) -> NonNegativeFit:
    """Fit c >= 0 with features_NF @ c near times_N, relative errors, Huber's loss.

    Raises ValueError without samples, or for one that is not finite and positive.
    """
    _check(features_NF, times_N)
    scaled_NF = features_NF / times_N[:, None]  # residuals are then relative: scaled @ c - 1
    size_F = np.abs(scaled_NF).max(axis=0)
    size_F[size_F == 0] = 1.0
    scaled_NF = scaled_NF / size_F
    weights_N = np.ones_like(times_N)
    for _ in range(_ROUNDS):
        coefficients_F = _nonnegative(scaled_NF, weights_N)
        before_N, weights_N = weights_N, _huber_weights(scaled_NF @ coefficients_F - 1.0)
        if np.abs(weights_N - before_N).max() < _CONVERGED:
            break
    coefficients_F = coefficients_F / size_F
    predicted_N = features_NF @ coefficients_F
    errors_N = np.abs(predicted_N - times_N) / times_N
    return NonNegativeFit(
        coefficients_F, predicted_N, _r2(times_N, predicted_N), float(np.median(errors_N))
    )


def _check(features_NF: Floats, times_N: Floats) -> None:
    if len(times_N) == 0:
        raise ValueError("no samples to fit")
    if not np.isfinite(features_NF).all() or features_NF.min() < 0:
        raise ValueError("sizes of samples must be finite and not negative")
    if not np.isfinite(times_N).all() or times_N.min() <= 0:
        raise ValueError("times of samples must be finite and above 0 ms")


def _nonnegative(scaled_NF: Floats, weights_N: Floats) -> Floats:
    """Return the weighted solution without negative coefficients.

    The optimum is the plain solution on its own support; with at most 9 features all 511 supports
    are tried. A feature that is zero in all samples gets 0.
    """
    root_N = np.sqrt(weights_N)
    a_NF, b_N = scaled_NF * root_N[:, None], root_N
    features = np.flatnonzero(scaled_NF.any(axis=0)).tolist()
    best_F, best = np.zeros(scaled_NF.shape[1]), float(b_N @ b_N)
    for count in range(1, len(features) + 1):
        for support in itertools.combinations(features, count):
            part_F, *_ = np.linalg.lstsq(a_NF[:, support], b_N, rcond=None)
            if part_F.min() < 0:
                continue
            error = float(np.square(a_NF[:, support] @ part_F - b_N).sum())
            if error < best * (1 - 1e-12) - _ROUNDING:
                best_F, best = np.zeros(scaled_NF.shape[1]), error
                best_F[list(support)] = part_F
    return best_F


def _huber_weights(errors_N: Floats) -> Floats:
    sigma = max(MAD_TO_SIGMA * float(np.median(np.abs(errors_N))), _LEAST_SIGMA)
    return np.minimum(1.0, HUBER_WIDTH * sigma / np.maximum(np.abs(errors_N), 1e-300))


def _r2(times_N: Floats, predicted_N: Floats) -> float:
    """Return 1 - residual / total sum of squares; 1 if all times are equal and met."""
    total = float(np.square(times_N - times_N.mean()).sum())
    residual = float(np.square(times_N - predicted_N).sum())
    if total == 0.0:
        return 1.0 if residual <= 1e-18 * float(np.square(times_N).sum()) else 0.0
    return 1.0 - residual / total


MEMORY = 64  # samples
_SCALE_SAMPLES = 16  # recent errors that determine the scale
_LEAST_ERROR = 0.02  # relative; no machine is steadier
LEAST_MS = 1e-6  # the least time that errors are relative to
_DAMPING = 1e-6  # keeps directions that no sample determines


class OnlineLinear:
    """Follows measured times; `prior` counts as `prior_samples` samples around `typical_x`."""

    def __init__(self, prior: Linear, typical_x: float, *, prior_samples: int = 8) -> None:
        """Create the model. Raises ValueError unless typical_x is finite and above 0."""
        if not 0 < typical_x < math.inf:
            raise ValueError(f"typical_x={typical_x}: give a positive size")
        self._alpha, self._beta = prior.alpha_ms, prior.beta_ms
        self._errors: deque[float] = deque(maxlen=_SCALE_SAMPLES)
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0
        for x in (typical_x / 2, 2 * typical_x):
            ms = prior.at(x)
            self._add(x, ms, prior_samples / 2 / max(ms, LEAST_MS) ** 2)

    @property
    def model(self) -> Linear:
        return Linear(min(self._alpha, MAX_MS), min(self._beta, MAX_MS))

    def update(self, x: float, ms: float) -> None:
        """Add a measured time. Raises ValueError for one that is not finite and positive."""
        if not 0 <= x < math.inf or not 0 < ms < math.inf:
            raise ValueError(f"x={x}, ms={ms}: a size from 0 and a time above 0 ms are needed")
        predicted = self._alpha + self._beta * x
        weight = 1.0 / max(predicted, LEAST_MS) ** 2
        error = abs(ms - predicted) * math.sqrt(weight)
        self._errors.append(error)
        sigma = max(_LEAST_ERROR, MAD_TO_SIGMA * statistics.median(self._errors))
        weight *= min(1.0, HUBER_WIDTH * sigma / max(error, 1e-300))
        for name in ("_w", "_wx", "_wxx", "_wy", "_wxy"):
            setattr(self, name, (1.0 - 1.0 / MEMORY) * getattr(self, name))
        self._add(x, ms, weight)
        self._solve()

    def _add(self, x: float, ms: float, weight: float) -> None:
        self._w += weight
        self._wx += weight * x
        self._wxx += weight * x * x
        self._wy += weight * ms
        self._wxy += weight * x * ms

    def _solve(self) -> None:
        """Make a damped Newton step, then restore non-negative coefficients.

        The step is the exact solution in all directions that samples determine.
        """
        w, wx, wxx = self._w * (1 + _DAMPING), self._wx, self._wxx * (1 + _DAMPING)
        determinant = w * wxx - wx * wx
        if determinant <= 0.0:  # every x is 0
            self._alpha = self._wy / self._w
            return
        by_alpha = self._wy - self._w * self._alpha - self._wx * self._beta
        by_beta = self._wxy - self._wx * self._alpha - self._wxx * self._beta
        self._alpha += (wxx * by_alpha - wx * by_beta) / determinant
        self._beta += (w * by_beta - wx * by_alpha) / determinant
        if self._alpha < 0.0:
            self._alpha, self._beta = 0.0, self._wxy / self._wxx
        elif self._beta < 0.0:
            self._alpha, self._beta = self._wy / self._w, 0.0
