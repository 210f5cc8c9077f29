"""What each API key may use: requests and tokens a second, and requests at a time.

Tokens count when they have been computed: a key is let in while it has some left, and one that has
overdrawn waits until they have come in again. Every ingress replica counts for itself.
"""

from __future__ import annotations

import math

from contracts.api_keys import ApiKey
from contracts.clock import Clock
from contracts.errors import OverloadError
from planner.scheduling.token_bucket import TokenBucket

CONCURRENCY_RETRY_S = 1.0  # after which one at a time may have ended


class RateLimitError(OverloadError):
    """The key has used what it may; others are none the worse for it."""

    code = "rate_limit_exceeded"


class KeyQuota:
    """Of one key. On one event loop."""

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        now_s = clock()
        self._clock = clock
        self._most_open = key.concurrency
        self._requests = (
            None if key.requests_per_s is None else TokenBucket(key.requests_per_s, now_s)
        )
        self._tokens = None if key.tokens_per_s is None else TokenBucket(key.tokens_per_s, now_s)
        self.open = 0

    def acquire(self) -> None:
        """Lets a request in: each must `release` once. Raises RateLimitError, and then it is
        not."""
        now_s = self._clock()
        if self._most_open is not None and self.open >= self._most_open:
            raise _refused(
                f"{self.open} requests are open",
                "concurrency",
                self._most_open,
                CONCURRENCY_RETRY_S,
            )
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0, now_s)) > 0:
            used = f"{1.0 - self._tokens.level(now_s):.0f} tokens too many were used"
            raise _refused(used, "tokens_per_s", self._tokens.per_s, wait_s)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1.0, now_s)
            if wait_s > 0:
                used = "too many requests were sent"
                raise _refused(used, "requests_per_s", self._requests.per_s, wait_s)
            self._requests.take(1.0, now_s)
        self.open += 1

    def release(self) -> None:
        self.open -= 1

    def used(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """As OpenAI tells what is left; empty where there are no limits a second."""
        now_s, fields = self._clock(), dict[str, str]()
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                fields[f"x-ratelimit-limit-{name}"] = f"{bucket.burst:.0f}"
                left = max(0, math.floor(bucket.level(now_s)))
                fields[f"x-ratelimit-remaining-{name}"] = str(left)
                fields[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.burst, now_s):.3f}s"
        return fields


def _refused(used: str, field: str, limit: float, wait_s: float) -> RateLimitError:
    return RateLimitError(
        f"{used} with this API key ({field}: {limit:g}): try again in {math.ceil(wait_s)} s", wait_s
    )
