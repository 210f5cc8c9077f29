"""Eviction from an expert cache, and whether a prefetch pays.

Layers are used in turns. If several sequences use most experts of each layer, the least recently
used expert is the one needed next; the distance between layers avoids this. For one sequence both
orders are alike. Each costs a few dictionary operations per use.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

EvictionKind = Literal["lru", "walk"]


class ExpertKey(NamedTuple):
    layer: int
    expert: int


class Eviction:
    """Order in which experts are evicted. Owned by one thread at a time.

    "lru": least recently used first; an insertion counts as a use. "walk": of the layer used last
    from now first, SpecMD's "least stale"; within a layer, least recently used.
    """

    def __init__(self, kind: EvictionKind) -> None:
        self._has_layers = kind == "walk"
        self._by_layer: dict[int, OrderedDict[ExpertKey, None]] = defaultdict(OrderedDict)

    def _kept(self, key: ExpertKey) -> OrderedDict[ExpertKey, None]:
        return self._by_layer[key.layer if self._has_layers else 0]

    def on_insert(self, key: ExpertKey) -> None:
        self._kept(key)[key] = None

    def on_use(self, key: ExpertKey) -> None:
        self._kept(key).move_to_end(key)

    def on_evict(self, key: ExpertKey) -> None:
        del self._kept(key)[key]

    def candidates(self, layer: int) -> Iterator[ExpertKey]:
        """Yield experts to evict, the best first, for a slot that `layer` needs.

        The caller may stop at any point. The order does not change during the iteration.
        """
        behind = sorted((each for each in self._by_layer if each < layer), reverse=True)
        ahead = sorted((each for each in self._by_layer if each > layer), reverse=True)
        for each in (*behind, *ahead, layer):
            yield from self._by_layer.get(each, ())


def pays(precision: float, hidden_s: float, wait_s: float) -> bool:
    """Return whether a prefetch is expected to gain more than it costs if it is not needed.

    hidden_s: part of the read that is hidden before its use. wait_s: possible delay of the next
    read on demand.
    """
    return precision * hidden_s > (1.0 - precision) * wait_s
