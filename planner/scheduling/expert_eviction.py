"""Which expert leaves a cache when another one needs its slot.

Layers come in turns: where several sequences want most experts of each, the least recently used is
just what comes next, and the walk of layers keeps what it would lose; for one sequence they are
alike (docs/benchmarks.md). All orders here cost a few dictionary operations per use.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal

from contracts.expert_eviction import EvictionPolicy, ExpertKey

AGE_USES: Final = 64  # per expert that is kept: after so many uses counts are halved


Kind = Literal["lru", "lfu", "pinned", "walk"]


class LruEviction:
    """LRU. Being read counts as a use."""

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


class LfuEviction:
    """LFU with ageing; the least recent of those that were used equally often. Counts outlive a
    stay: what comes back is known."""

    def __init__(self) -> None:
        self._uses: Counter[ExpertKey] = Counter()
        self._kept: set[ExpertKey] = set()
        self._by_uses: dict[int, OrderedDict[ExpertKey, None]] = {}
        self._since_aged = 0

    def on_insert(self, key: ExpertKey) -> None:
        self._kept.add(key)
        self._into(key)

    def on_use(self, key: ExpertKey) -> None:
        self._out_of(key)
        self._uses[key] += 1
        self._into(key)
        self._since_aged += 1
        if self._since_aged > AGE_USES * len(self._kept):
            self._age()

    def on_evict(self, key: ExpertKey) -> None:
        self._kept.remove(key)
        self._out_of(key)

    def candidates(self, layer: int) -> Iterator[ExpertKey]:
        for uses in sorted(self._by_uses):
            yield from self._by_uses[uses]

    def _into(self, key: ExpertKey) -> None:
        self._by_uses.setdefault(self._uses[key], OrderedDict())[key] = None

    def _out_of(self, key: ExpertKey) -> None:
        uses = self._uses[key]
        del self._by_uses[uses][key]
        if not self._by_uses[uses]:
            del self._by_uses[uses]

    def _age(self) -> None:
        order = list(self.candidates(0))
        self._since_aged = 0
        self._uses = Counter({key: uses // 2 for key, uses in self._uses.items() if uses > 1})
        self._by_uses.clear()
        for key in order:
            self._into(key)


class PinnedEviction:
    """LRU among those that are not `pinned`, which leave only where nothing else can."""

    def __init__(self, pinned: Collection[ExpertKey]) -> None:
        self._pinned = frozenset(pinned)
        self._others, self._kept = LruEviction(), LruEviction()

    def on_insert(self, key: ExpertKey) -> None:
        self._of(key).on_insert(key)

    def on_use(self, key: ExpertKey) -> None:
        self._of(key).on_use(key)

    def on_evict(self, key: ExpertKey) -> None:
        self._of(key).on_evict(key)

    def candidates(self, layer: int) -> Iterator[ExpertKey]:
        yield from self._others.candidates(layer)
        yield from self._kept.candidates(layer)

    def _of(self, key: ExpertKey) -> LruEviction:
        return self._kept if key in self._pinned else self._others


class LayerDistanceEviction:
    """By distance in the walk of layers: first of the layer that was left last, for it comes again
    last; within a layer the least recent (SpecMD's "least stale")."""

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


def eviction(kind: Kind, slots: int, frequencies: Mapping[ExpertKey, float]) -> EvictionPolicy:
    """frequencies: of use, by a profile: "pinned" keeps the most used in three of four slots."""
    if kind == "lru":
        return LruEviction()
    if kind == "lfu":
        return LfuEviction()
    if kind == "walk":
        return LayerDistanceEviction()
    order = sorted(frequencies, key=lambda key: -frequencies[key])
    return PinnedEviction(order[: slots * 3 // 4])
