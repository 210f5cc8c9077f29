"""What all open requests of an ingress hold together, within one budget.

A request's account is charged before it takes memory: for its body as it comes in, for what is
decoded of it, for tokens, scores and its answer. It is closed when the answer has gone out, or
whatever else ended the request; then all of it is given back.
"""

from __future__ import annotations

from contracts.config import LimitsConfig
from contracts.errors import OverloadError, TooCostlyError

RETRY_AFTER_S = 1.0
BEST_EFFORT = 0.75  # of the budget: so that a flood of it leaves room for others
STEP_BYTES = 1 << 16


class MemoryBudget:
    """The budget. On one event loop."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.limits = limits
        self.request_bytes = limits.request_bytes
        self.held_bytes = 0

    def open(self) -> MemoryAccount:
        return MemoryAccount(self)


class MemoryAccount:
    """One request's part of the budget. best_effort: it is charged only while others have room."""

    best_effort = False

    def __init__(self, requests: MemoryBudget) -> None:
        self._requests = requests
        self._held = 0
        self._small = 0
        self._closed = False

    @property
    def held_bytes(self) -> int:
        return self._held

    def charge(self, count: int, param: str | None = None) -> None:
        """Raises TooCostlyError (413) for more than one request may hold, OverloadError (429) where
        others hold what is missing; then nothing is charged. After `close`, without effect."""
        if self._closed:
            return
        requests, held = self._requests, self._held + count
        if held > requests.request_bytes:
            what = f"{param}: the request" if param else "the request"
            raise TooCostlyError(
                f"{what} would hold {held} bytes, one may hold {requests.request_bytes}"
                " (limits.open_bytes times limits.request_fraction): send it in parts",
                param,
            )
        total, most = requests.held_bytes + count, requests.limits.open_bytes
        if self.best_effort:
            most = int(BEST_EFFORT * most)
        if total > most:
            raise OverloadError(
                f"open requests would hold {total} bytes, at most {most}"
                f" (limits.open_bytes): try again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )
        self._held = held
        requests.held_bytes = total

    def grow(self, count: int) -> None:
        """`charge` for what grows by little at a time, in steps."""
        self._small += count
        if self._small >= STEP_BYTES:
            grown, self._small = self._small, 0
            self.charge(grown)

    def release(self, count: int) -> None:
        """Of what was charged."""
        count = min(count, self._held)
        self._held -= count
        self._requests.held_bytes -= count

    def close(self) -> None:
        """Harmless when repeated."""
        self._closed = True
        self.release(self._held)
