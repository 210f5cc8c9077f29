"""Rate limit of one client with bursts."""

BURST_S = 10.0  # unused time that accumulates
MIN_BURST = 1.0


class TokenBucket:
    """A token bucket that fills by `per_s` up to BURST_S seconds' worth.

    It may be overdrawn, because usage is known only afterwards; the client then waits until it is
    refilled. In any time t at most burst + per_s * t is started. Times must not decrease.
    """

    def __init__(self, per_s: float, now_s: float) -> None:
        self.per_s = per_s
        self.burst = max(MIN_BURST, BURST_S * per_s)
        self._level, self._at_s = self.burst, now_s

    def level(self, now_s: float) -> float:
        """Return the level; negative: overdrawn."""
        return min(self.burst, self._level + self.per_s * (now_s - self._at_s))

    def take(self, amount: float, now_s: float) -> None:
        self._level, self._at_s = self.level(now_s) - amount, now_s

    def wait_s(self, least: float, now_s: float) -> float:
        """Return the seconds until the level is `least`."""
        return max(0.0, (least - self.level(now_s)) / self.per_s)
