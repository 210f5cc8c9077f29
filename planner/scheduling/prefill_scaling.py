"""The number of prefill workers, from their utilization.

Utilization is the work of a worker's open requests over its saturation threshold; at 1 its next
batch is full.

    utilization ┤      ╭─────╮  scale_up_utilization ─ ─  above it: one more
                │     ╱       ╲
                │────╯         ╰────── scale_down_utilization ─ ─ below it for the others after
                │                      downscale_delay_s: one less

Between the two nothing changes, and after a change nothing until the mean has adapted, so steady
load does not oscillate. Pure: the caller has the clock.
"""

import math
from collections.abc import Sequence

from contracts.config import ScalingConfig


class UtilizationScaling:
    """Decides one step at a time, by mean utilization over time; `least` may change."""

    def __init__(self, config: ScalingConfig, least: int) -> None:
        """Create with the least number of workers; config.max_prefill_ranks is the most."""
        self._config = config
        self.least = least
        self._max_workers = max(least, config.max_prefill_ranks or least)
        self._sampled_s: float | None = None
        self._settled_s = 0.0
        self._low_since_s: float | None = None
        self.utilization = 0.0

    def step(self, now_s: float, utilizations: Sequence[float], *, is_steady: bool) -> int:
        """Return 1 to start a worker, -1 to stop one, else 0; call about every second.

        utilizations: of the serving workers. is_steady: none is starting, stopping or being
        replaced.
        """
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
        self._sampled_s = self._low_since_s = None
