"""A stage whose time is a line of one size."""

from __future__ import annotations

import math

from planner.costs.fit import fit_linear
from planner.costs.refit import OnlineLinear
from planner.costs.stages import Linear

COLD_SIZES = 3  # of different size, and
COLD_SAMPLES = 12  # times in all, before a stage that nobody has profiled has a model


class SizedStage:
    """A stage whose time depends on one number x. `model` None: cold."""

    def __init__(self, prior: Linear | None, typical_x: float) -> None:
        self._online = None if prior is None else OnlineLinear(prior, typical_x)
        self._typical_x = typical_x
        self._samples: dict[int, list[tuple[float, float]]] = {}

    def resized(self, per_x: float) -> SizedStage:
        """One that begins with this one's line, so many times as steep. Of a cold one: cold."""
        now = self.model
        line = None if now is None else Linear(now.alpha_ms, now.beta_ms * per_x)
        return SizedStage(line, self._typical_x)

    @property
    def model(self) -> Linear | None:
        return None if self._online is None else self._online.model

    def add(self, x: float, ms: float) -> None:
        if self._online is not None:
            self._online.update(x, ms)
            return
        size = math.floor(4 * math.log2(max(x, 1e-9)))
        self._samples.setdefault(size, []).append((x, ms))
        samples = [sample for of_size in self._samples.values() for sample in of_size]
        if len(self._samples) >= COLD_SIZES and len(samples) >= COLD_SAMPLES:
            self._online = OnlineLinear(fit_linear(samples).model, self._typical_x)
            self._samples.clear()
