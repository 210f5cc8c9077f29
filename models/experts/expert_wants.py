"""What is wanted of a cache of experts, and what may be."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from contracts.expert_slots import ExpertKey
from contracts.requests import Priority

_NEWEST: Final = 0.1  # of a measured time, in its running mean


class Guess(NamedTuple):
    """An expert that a layer may want. confidence: how often such a guess was right."""

    expert: int
    confidence: float


class Taken(NamedTuple):
    expert: int
    slot: int


class Want:
    """Experts that a micro-batch is to be computed with at a layer. left: still to be, with their
    places in its order; ready: of those, what is in a slot."""

    __slots__ = ("begun_s", "error", "layer", "left", "number", "priority", "ready")

    def __init__(
        self, layer: int, experts: Iterable[int], priority: Priority, number: int, now_s: float
    ) -> None:
        self.layer, self.priority, self.number, self.begun_s = layer, priority, number, now_s
        self.left = {expert: place for place, expert in enumerate(experts)}
        self.ready: set[int] = set()
        self.error = ""

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to compute, or to raise, or nothing left."""
        return bool(self.ready) or not self.left or self.error != ""


class Hints:
    """Guesses that are not there yet, by whose they are and of which layer. ahead_s: from a hint
    to the demand, on average; 0: none was seen."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._guesses: dict[tuple[Hashable, int], list[Guess]] = {}
        self._since_s: dict[tuple[Hashable, int], float] = {}

    def __len__(self) -> int:
        return len(self._guesses)

    def say(self, owner: Hashable, layer: int, missing: Sequence[Guess], now_s: float) -> None:
        """In place of what `owner` said before."""
        self._guesses[owner, layer] = list(missing)
        self._since_s.setdefault((owner, layer), now_s)

    def wanted(self, owner: Hashable, layer: int, now_s: float) -> None:
        """What it does want there is known: its hints have had their time."""
        self._guesses.pop((owner, layer), None)
        since_s = self._since_s.pop((owner, layer), None)
        if since_s is not None:
            self.ahead_s = running_mean(self.ahead_s, now_s - since_s)

    def forget(self, owner: Hashable) -> None:
        for key in [key for key in self._guesses if key[0] == owner]:
            del self._guesses[key]
            self._since_s.pop(key, None)

    def cannot(self, key: ExpertKey) -> None:
        """It cannot be read."""
        for (_, layer), guesses in self._guesses.items():
            if layer == key.layer:
                guesses[:] = [guess for guess in guesses if guess.expert != key.expert]

    def best_first(self) -> list[tuple[float, ExpertKey]]:
        """With the confidence of each."""
        found = (
            (-guess.confidence, ExpertKey(layer, guess.expert))
            for (_, layer), several in self._guesses.items()
            for guess in several
        )
        return [(-doubt, key) for doubt, key in sorted(found)]

    def keys(self) -> set[ExpertKey]:
        return {
            ExpertKey(layer, guess.expert)
            for (_, layer), guesses in self._guesses.items()
            for guess in guesses
        }


def running_mean(mean: float, newest: float) -> float:
    """mean: 0: nothing has been seen yet."""
    return newest if mean == 0.0 else mean + _NEWEST * (newest - mean)
