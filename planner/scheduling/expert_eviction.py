"""Eviction policies of an expert cache.

Layers are used in turns. If several sequences use most experts of each layer, the least recently
used expert is the one needed next; the distance between layers avoids this. For one sequence both
policies are alike. Each costs a few dictionary operations per use.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from contracts.expert_eviction import EvictionPolicy, ExpertKey

Kind = Literal["lru", "walk"]


class LruEviction:
    """Least recently used first; an insertion counts as a use."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ExpertKey, None] = OrderedDict()

    def on_insert(self, key: ExpertKey) -> None:
        self._kept[key] = None

    def on_use(self, key: ExpertKey) -> None:
        self._kept.move_to_end(key)

    def on_evict(self, key: ExpertKey) -> None:
        del self._kept[key]

    def candidates(self, layer: int) -> Iterator[ExpertKey]:
        return iter(self._kept)


class LayerDistanceEviction:
    """Evicts the layer used last from now first; within a layer, least recently used.

    This is SpecMD's "least stale".
    """

    def __init__(self) -> None:
        self._by_layer: dict[int, LruEviction] = {}

    def on_insert(self, key: ExpertKey) -> None:
        self._by_layer.setdefault(key.layer, LruEviction()).on_insert(key)

    def on_use(self, key: ExpertKey) -> None:
        self._by_layer[key.layer].on_use(key)

    def on_evict(self, key: ExpertKey) -> None:
        self._by_layer[key.layer].on_evict(key)

    def candidates(self, layer: int) -> Iterator[ExpertKey]:
        behind = sorted((each for each in self._by_layer if each < layer), reverse=True)
        ahead = sorted((each for each in self._by_layer if each > layer), reverse=True)
        for each in (*behind, *ahead, layer):
            if each in self._by_layer:
                yield from self._by_layer[each].candidates(layer)


def eviction(kind: Kind) -> EvictionPolicy:
    return LruEviction() if kind == "lru" else LayerDistanceEviction()


def pays(precision: float, hidden_s: float, wait_s: float) -> bool:
    """Return whether a prefetch is expected to gain more than it costs if it is not needed."""
    return precision * hidden_s > (1.0 - precision) * wait_s
