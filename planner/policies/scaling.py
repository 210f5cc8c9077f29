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


class FillScaling:
    """Decides one step at a time. A fill is a mean over time: batches come and go. least: may be
    changed, and is reached at once."""

    def __init__(self, config: ScalingConfig, least: int) -> None:
        """least: workers that there are at any rate. config.max_prefill_ranks: at most."""
        self._config = config
        self.least = least
        self._most = max(least, config.max_prefill_ranks or least)
        self._seen_s: float | None = None
        self._settled_s = 0.0
        self._idle_since_s: float | None = None
        self.fill = 0.0

    def step(self, now_s: float, fills: Sequence[float], *, is_steady: bool) -> int:
        """1: start a worker, -1: end one, 0: neither. To be called every second or so, with the
        fills of those that serve. is_steady: none is starting, ending or being replaced."""
        if not fills or not is_steady:
            self._restart()
            return 0
        self._follow(now_s, sum(fills) / len(fills))
        config, workers = self._config, len(fills)
        if workers > self._most:
            return self._change(-1)
        if workers < self.least:
            return self._change(1)
        if now_s < self._settled_s:
            return 0
        if self.fill >= config.up_fill and workers < self._most:
            return self._change(1)
        others = max(1, workers - 1)
        if workers <= self.least or self.fill * workers / others > config.down_fill:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= config.idle_s:
            return self._change(-1)
        return 0

    def _follow(self, now_s: float, fill: float) -> None:
        if self._seen_s is None:
            self.fill, self._settled_s = fill, now_s + self._config.window_s
        else:
            passed_s = max(0.0, now_s - self._seen_s)
            self.fill += (fill - self.fill) * -math.expm1(-passed_s / self._config.window_s)
        self._seen_s = now_s

    def _change(self, step: int) -> int:
        self._restart()
        return step

    def _restart(self) -> None:
        """What was seen was of other workers."""
        self._seen_s = self._idle_since_s = None
