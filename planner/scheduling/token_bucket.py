"""How much one client may use: so much a second in the long run, more at once after a pause."""

from __future__ import annotations

BURST_S = 10.0  # what nobody has used for so long may be used at once
MIN_BURST = 1.0


class TokenBucket:
    """Fills by `per_s` up to what BURST_S bring. It may be overdrawn: what was used is known only
    afterwards, and whoever has used more than there was waits until it has come in again, so that
    in any time t no more than burst + per_s * t is begun. Times are given, in order."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self.per_s = per_s
        self.burst = max(MIN_BURST, BURST_S * per_s)
        self._level, self._at_s = self.burst, now_s

    def level(self, now_s: float) -> float:
        """Below 0: overdrawn."""
        return min(self.burst, self._level + self.per_s * (now_s - self._at_s))

    def take(self, amount: float, now_s: float) -> None:
        self._level, self._at_s = self.level(now_s) - amount, now_s

    def wait_s(self, least: float, now_s: float) -> float:
        """Seconds until there is `least`; 0: there is."""
        return max(0.0, (least - self.level(now_s)) / self.per_s)
