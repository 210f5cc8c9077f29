"""Interface between an expert cache and its eviction policy."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class ExpertKey(NamedTuple):
    layer: int
    expert: int


class EvictionPolicy(Protocol):
    """Order in which experts are evicted. Owned by one thread at a time."""

    def on_insert(self, key: ExpertKey) -> None: ...

    def on_use(self, key: ExpertKey) -> None: ...

    def on_evict(self, key: ExpertKey) -> None: ...

    def candidates(self, layer: int) -> Iterator[ExpertKey]:
        """Yield experts to evict, the best first, for a slot that `layer` needs.

        The caller may stop at any point. The policy does not change during the iteration.
        """


ShouldPrefetch = Callable[[float, float, float], bool]
"""(precision, hidden_s, wait_s) → whether to prefetch an expert. hidden_s: part of the read that is
hidden before its use; wait_s: possible delay of the next read on demand."""
