"""How many prefill workers there should be, from how full they are.

fill   work of a worker's open requests over its saturation threshold; 1: its next batch is full

    fill  ┤      ╭─────╮  up_fill ─ ─ ─ ─ ─  above it: one more
          │     ╱       ╲
          │────╯         ╰──────── down_fill ─ ─ where the others would stay below it, and have
          │                                      been for idle_s: one less

Between the two nothing happens, and after a change nothing until the mean has had time to follow:
so load that stays where it is moves nobody back and forth. Pure: time comes with what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from contracts.config import ScalingConfig


class UtilizationScaling:
    """Decides one step at a time. A fill is a mean over time: batches come and go. least: may be
    changed, and is reached at once."""

    def __init__(self, config: ScalingConfig, least: int) -> None:
        """least: workers that there are at any rate. config.max_prefill_ranks: at most."""
        self._config = config
        self.least = least
        self._max_workers = max(least, config.max_prefill_ranks or least)
        self._sampled_s: float | None = None
        self._settled_s = 0.0
        self._low_since_s: float | None = None
        self.utilization = 0.0

    def step(self, now_s: float, utilizations: Sequence[float], *, is_steady: bool) -> int:
        """1: start a worker, -1: end one, 0: neither. To be called every second or so, with the
        fills of those that serve. is_steady: none is starting, ending or being replaced."""
        if not utilizations or not is_steady:
            self._reset()
            return 0
        self._update_mean(now_s, sum(utilizations) / len(utilizations))
        config, workers = self._config, len(utilizations)
        if workers > self._max_workers:
            return self._decide(-1)
        if workers < self.least:
            return self._decide(1)
        if now_s < self._settled_s:
            return 0
        if self.utilization >= config.scale_up_utilization and workers < self._max_workers:
            return self._decide(1)
        others = max(1, workers - 1)
        if (
            workers <= self.least
            or self.utilization * workers / others > config.scale_down_utilization
        ):
            self._low_since_s = None
        elif self._low_since_s is None:
            self._low_since_s = now_s
        elif now_s - self._low_since_s >= config.downscale_delay_s:
            return self._decide(-1)
        return 0

    def _update_mean(self, now_s: float, utilization: float) -> None:
        if self._sampled_s is None:
            self.utilization, self._settled_s = utilization, now_s + self._config.look_back_period_s
        else:
            passed_s = max(0.0, now_s - self._sampled_s)
            self.utilization += (utilization - self.utilization) * -math.expm1(
                -passed_s / self._config.look_back_period_s
            )
        self._sampled_s = now_s

    def _decide(self, step: int) -> int:
        self._reset()
        return step

    def _reset(self) -> None:
        """What was seen was of other workers."""
        self._sampled_s = self._low_since_s = None
