"""What is wanted of a cache of experts, and what may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from contracts.expert_eviction import ExpertKey
from contracts.requests import Priority

_NEWEST: Final = 0.1  # of a measured time, in its running mean


class PredictedExpert(NamedTuple):
    """An expert that a layer may want. confidence: how often such a guess was right."""

    expert: int
    confidence: float


class AcquiredExpert(NamedTuple):
    expert: int
    slot: int


class ExpertRequest:
    """Experts that a micro-batch is to be computed with at a layer. left: still to be, with their
    places in its order; ready: of those, what is in a slot."""

    __slots__ = ("error", "layer", "left", "number", "priority", "ready", "started_s")

    def __init__(
        self, layer: int, experts: Iterable[int], priority: Priority, number: int, now_s: float
    ) -> None:
        self.layer, self.priority, self.number, self.started_s = layer, priority, number, now_s
        self.left = {expert: place for place, expert in enumerate(experts)}
        self.ready: set[int] = set()
        self.error = ""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to compute, or to raise, or nothing left."""
        return bool(self.ready) or not self.left or self.error != ""


class PrefetchHints:
    """Guesses that are not there yet, by whose they are and of which layer. ahead_s: from a hint
    to the demand, on average; 0: none was seen."""

    def __init__(self) -> None:
        self.lead_time_s = 0.0
        self._guesses: dict[tuple[Hashable, int], list[PredictedExpert]] = {}
        self._since_s: dict[tuple[Hashable, int], float] = {}

    def __len__(self) -> int:
        return len(self._guesses)

    def put(
        self, owner: Hashable, layer: int, missing: Sequence[PredictedExpert], now_s: float
    ) -> None:
        """In place of what `owner` said before."""
        self._guesses[owner, layer] = list(missing)
        self._since_s.setdefault((owner, layer), now_s)

    def requested(self, owner: Hashable, layer: int, now_s: float) -> None:
        """What it does want there is known: its hints have had their time."""
        self._guesses.pop((owner, layer), None)
        since_s = self._since_s.pop((owner, layer), None)
        if since_s is not None:
            self.lead_time_s = running_mean(self.lead_time_s, now_s - since_s)

    def forget(self, owner: Hashable) -> None:
        for key in [key for key in self._guesses if key[0] == owner]:
            del self._guesses[key]
            self._since_s.pop(key, None)

    def exclude(self, key: ExpertKey) -> None:
        """It cannot be read."""
        for (_, layer), guesses in self._guesses.items():
            if layer == key.layer:
                guesses[:] = [guess for guess in guesses if guess.expert != key.expert]

    def by_confidence(self) -> list[tuple[float, ExpertKey]]:
        """With the confidence of each."""
        found = (
            (-guess.confidence, ExpertKey(layer, guess.expert))
            for (_, layer), several in self._guesses.items()
            for guess in several
        )
        return [(-negated, key) for negated, key in sorted(found)]

    def keys(self) -> set[ExpertKey]:
        return {
            ExpertKey(layer, guess.expert)
            for (_, layer), guesses in self._guesses.items()
            for guess in guesses
        }


def running_mean(mean: float, newest: float) -> float:
    """mean: 0: nothing has been seen yet."""
    return newest if mean == 0.0 else mean + _NEWEST * (newest - mean)


DEMAND: Final = "demand"
USED_HINT: Final = "used_hint"
WASTED_HINT: Final = "wasted_hint"


class CacheTraffic:
    """What was read, by cause, so far; hits and wanted: experts, by layer. waited_s: in which
    nothing was computed because experts were not there; copied_s: in which parts that had come
    were copied to their slots."""

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()
        self.requested: Counter[int] = Counter()
        self.read_bytes = {DEMAND: 0, USED_HINT: 0, WASTED_HINT: 0}
        self.waited_s = self.copied_s = 0.0

    @property
    def cost_s(self) -> float:
        """What experts that were not there cost who computes."""
        return self.waited_s + self.copied_s

    def hit_fraction(self, layer: int) -> float:
        """Of the experts that the layer wanted so far; 0: none was."""
        return self.hits[layer] / max(1, self.requested[layer])
