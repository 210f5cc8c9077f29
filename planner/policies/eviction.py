"""Which expert leaves a cache when another one needs its slot.

Layers come in turns: where several sequences want most experts of each, the least recently used is
just what comes next, and the walk of layers keeps what it would lose; for one sequence they are
alike (docs/benchmarks.md). All orders here cost a few dictionary operations per use.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal

from contracts.expert_slots import Eviction, ExpertKey

AGE_USES: Final = 64  # per expert that is kept: after so many uses counts are halved


Kind = Literal["lru", "lfu", "pinned", "walk"]


class LeastRecent:
    """LRU. Being read counts as a use."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ExpertKey, None] = OrderedDict()

    def placed(self, key: ExpertKey) -> None:
        self._kept[key] = None

    def used(self, key: ExpertKey) -> None:
        self._kept.move_to_end(key)

    def gone(self, key: ExpertKey) -> None:
        del self._kept[key]

    def leave(self, layer: int) -> Iterator[ExpertKey]:
        return iter(self._kept)


class LeastFrequent:
    """LFU with ageing; the least recent of those that were used equally often. Counts outlive a
    stay: what comes back is known."""

    def __init__(self) -> None:
        self._uses: Counter[ExpertKey] = Counter()
        self._kept: set[ExpertKey] = set()
        self._by_uses: dict[int, OrderedDict[ExpertKey, None]] = {}
        self._since_aged = 0

    def placed(self, key: ExpertKey) -> None:
        self._kept.add(key)
        self._into(key)

    def used(self, key: ExpertKey) -> None:
        self._out_of(key)
        self._uses[key] += 1
        self._into(key)
        self._since_aged += 1
        if self._since_aged > AGE_USES * len(self._kept):
            self._age()

    def gone(self, key: ExpertKey) -> None:
        self._kept.remove(key)
        self._out_of(key)

    def leave(self, layer: int) -> Iterator[ExpertKey]:
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
        order = list(self.leave(0))
        self._since_aged = 0
        self._uses = Counter({key: uses // 2 for key, uses in self._uses.items() if uses > 1})
        self._by_uses.clear()
        for key in order:
            self._into(key)


class Pinned:
    """LRU among those that are not `pinned`, which leave only where nothing else can."""

    def __init__(self, pinned: Collection[ExpertKey]) -> None:
        self._pinned = frozenset(pinned)
        self._others, self._kept = LeastRecent(), LeastRecent()

    def placed(self, key: ExpertKey) -> None:
        self._of(key).placed(key)

    def used(self, key: ExpertKey) -> None:
        self._of(key).used(key)

    def gone(self, key: ExpertKey) -> None:
        self._of(key).gone(key)

    def leave(self, layer: int) -> Iterator[ExpertKey]:
        yield from self._others.leave(layer)
        yield from self._kept.leave(layer)

    def _of(self, key: ExpertKey) -> LeastRecent:
        return self._kept if key in self._pinned else self._others


class FurthestLayer:
    """By distance in the walk of layers: first of the layer that was left last, for it comes again
    last; within a layer the least recent (SpecMD's "least stale")."""

    def __init__(self) -> None:
        self._by_layer: dict[int, LeastRecent] = {}

    def placed(self, key: ExpertKey) -> None:
        self._by_layer.setdefault(key.layer, LeastRecent()).placed(key)

    def used(self, key: ExpertKey) -> None:
        self._by_layer[key.layer].used(key)

    def gone(self, key: ExpertKey) -> None:
        self._by_layer[key.layer].gone(key)

    def leave(self, layer: int) -> Iterator[ExpertKey]:
        behind = sorted((each for each in self._by_layer if each < layer), reverse=True)
        ahead = sorted((each for each in self._by_layer if each > layer), reverse=True)
        for each in (*behind, *ahead, layer):
            if each in self._by_layer:
                yield from self._by_layer[each].leave(layer)


def eviction(kind: Kind, slots: int, frequencies: Mapping[ExpertKey, float]) -> Eviction:
    """frequencies: of use, by a profile: "pinned" keeps the most used in three of four slots."""
    if kind == "lru":
        return LeastRecent()
    if kind == "lfu":
        return LeastFrequent()
    if kind == "walk":
        return FurthestLayer()
    order = sorted(frequencies, key=lambda key: -frequencies[key])
    return Pinned(order[: slots * 3 // 4])
