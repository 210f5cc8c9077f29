"""Requests, hints and traffic of an expert cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from contracts.requests import Priority
from models.experts.expert_eviction import ExpertKey

_NEWEST: Final = 0.1  # weight of a new measurement in a running mean


class PredictedExpert(NamedTuple):
    """An expert that a layer may need. confidence: precision of such predictions."""

    expert: int
    confidence: float


class AcquiredExpert(NamedTuple):
    expert: int
    slot: int


class ExpertRequest:
    """Experts of a micro-batch at a layer. left: to compute, by place; ready: in a slot."""

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
        """True if there is an expert to compute, an error to raise, or nothing left."""
        return bool(self.ready) or not self.left or self.error != ""


class PrefetchHints:
    """Pending hints by owner and layer. lead_time_s: mean time until the demand; 0: unknown."""

    def __init__(self) -> None:
        self.lead_time_s = 0.0
        self._guesses: dict[tuple[Hashable, int], list[PredictedExpert]] = {}
        self._since_s: dict[tuple[Hashable, int], float] = {}

    def __len__(self) -> int:
        return len(self._guesses)

    def put(
        self, owner: Hashable, layer: int, missing: Sequence[PredictedExpert], now_s: float
    ) -> None:
        """Replace the owner's hints for the layer."""
        self._guesses[owner, layer] = list(missing)
        self._since_s.setdefault((owner, layer), now_s)

    def resolve(self, owner: Hashable, layer: int, now_s: float) -> None:
        """Drop the owner's hints for a layer whose demand is known."""
        self._guesses.pop((owner, layer), None)
        since_s = self._since_s.pop((owner, layer), None)
        if since_s is not None:
            self.lead_time_s = running_mean(self.lead_time_s, now_s - since_s)

    def forget(self, owner: Hashable) -> None:
        for key in [key for key in self._guesses if key[0] == owner]:
            del self._guesses[key]
            self._since_s.pop(key, None)

    def exclude(self, key: ExpertKey) -> None:
        """Drop the hints for an expert that cannot be read."""
        for (_, layer), guesses in self._guesses.items():
            if layer == key.layer:
                guesses[:] = [guess for guess in guesses if guess.expert != key.expert]

    def by_confidence(self) -> list[tuple[float, ExpertKey]]:
        """Return the hinted experts with their confidences, the most confident first."""
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
    """Add a measurement to a running mean. mean: 0: no measurement yet."""
    return newest if mean == 0.0 else mean + _NEWEST * (newest - mean)


DEMAND: Final = "demand"
USED_HINT: Final = "used_hint"
WASTED_HINT: Final = "wasted_hint"


class CacheTraffic:
    """Totals of a cache: bytes read by cause, hits and requested experts by layer.

    waited_s: time without compute because experts were missing. copied_s: time to copy read parts
    to their slots.
    """

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()
        self.requested: Counter[int] = Counter()
        self.read_bytes = {DEMAND: 0, USED_HINT: 0, WASTED_HINT: 0}
        self.waited_s = self.copied_s = 0.0

    def hit_fraction(self, layer: int) -> float:
        """Fraction of the layer's requested experts that were in a slot; 0 without requests."""
        return self.hits[layer] / max(1, self.requested[layer])
