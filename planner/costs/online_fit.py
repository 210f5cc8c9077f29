"""A linear stage model that follows measured times.

Relative least squares over an exponentially weighted past, with Huber's loss: it follows a slower
machine within about `memory` samples and ignores single outliers. O(1) time and memory per sample,
no clock. For a stage with several sizes (attention: tokens and pairs), x may be the time that the
profile predicts; beta then is a relative speed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from planner.costs.fit import HUBER_WIDTH, MAD_TO_SIGMA
from planner.costs.stages import MAX_MS, Linear

_SCALE_SAMPLES = 16  # recent errors that determine the scale
_LEAST_ERROR = 0.02  # relative; no machine is steadier
LEAST_MS = 1e-6  # the least time that errors are relative to
_DAMPING = 1e-6  # keeps directions that no sample determines


class OnlineLinear:
    """Follows measured times; `prior` counts as `prior_samples` samples around `typical_x`."""

    def __init__(
        self, prior: Linear, typical_x: float, *, memory: int = 64, prior_samples: int = 8
    ) -> None:
        """Create the model. Raises ValueError unless typical_x > 0 is finite and memory >= 2."""
        if not 0 < typical_x < math.inf or memory < 2 or prior_samples < 1:
            raise ValueError(
                f"typical_x={typical_x}, memory={memory}, prior_samples={prior_samples}: give a "
                "positive size, at least 2 and at least 1"
            )
        self._alpha, self._beta = prior.alpha_ms, prior.beta_ms
        self._keep = 1.0 - 1.0 / memory
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
            setattr(self, name, self._keep * getattr(self, name))
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
