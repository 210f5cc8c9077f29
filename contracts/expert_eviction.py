"""Experts that come and go: what a cache asks a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class ExpertKey(NamedTuple):
    layer: int
    expert: int


class EvictionPolicy(Protocol):
    """Which expert leaves when another one needs its slot; owned by one thread at a time."""

    def on_insert(self, key: ExpertKey) -> None:
        """It is there now."""

    def on_use(self, key: ExpertKey) -> None:
        """It is there, and was computed with."""

    def on_evict(self, key: ExpertKey) -> None: ...

    def candidates(self, layer: int) -> Iterator[ExpertKey]:
        """What could go, the best first. layer: which one wants a slot. The caller may stop at any
        point; nothing changes meanwhile."""


ShouldPrefetch = Callable[[float, float, float], bool]
"""(precision, hidden_s, wait_s) → whether to begin to read an expert that may be wanted. hidden_s:
how much of the read lies before it would be wanted; wait_s: for how long the next demand may have
to wait for it."""
