"""Open loop: each kind of client comes at Poisson times of its own rate, whatever the others do."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

MOST_AT_ONCE = 120  # clients under way: the rates should never bring that many

Visit = Callable[[random.Random], Coroutine[Any, Any, str]]


class Kind(msgspec.Struct, frozen=True):
    """visit: one client from its arrival to its end; what came of it, for the count."""

    name: str
    per_s: float
    visit: Visit


class HonestAnswer(msgspec.Struct, frozen=True):
    at_s: float
    took_s: float


class Tally(msgspec.Struct):
    """What came of everybody. fatal: what must not have happened, each in a line."""

    outcomes: dict[str, Counter[str]] = msgspec.field(default_factory=dict)
    honest: list[HonestAnswer] = msgspec.field(default_factory=list)
    fatal: list[str] = msgspec.field(default_factory=list)
    skipped: int = 0

    def count(self, kind: str, outcome: str) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        if outcome.startswith("!"):
            self.fatal.append(f"{kind}: {outcome[1:]}")


class Traffic:
    """Starts clients until it is told to stop."""

    def __init__(self, kinds: list[Kind], tally: Tally, seed: int) -> None:
        self._kinds = kinds
        self._tally = tally
        self._seed = seed
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    async def run(self, seconds: float) -> None:
        """Returns after `seconds`; those who have come are still there."""
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(self._arrivals(kind, end_s) for kind in self._kinds))

    async def drain(self, seconds: float) -> None:
        """Waits for those who are there; who stays longer is sent away."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=seconds)
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _arrivals(self, kind: Kind, end_s: float) -> None:
        dice = random.Random(f"{self._seed} {kind.name}")
        at_s = time.monotonic()
        while True:
            at_s += dice.expovariate(kind.per_s)
            if at_s >= end_s:
                await asyncio.sleep(max(0.0, end_s - time.monotonic()))
                return
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            own = random.Random(dice.random())
            if self.under_way >= MOST_AT_ONCE and kind.name != "honest":
                self._tally.skipped += 1
                continue
            task = asyncio.create_task(self._one(kind, own))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _one(self, kind: Kind, dice: random.Random) -> None:
        try:
            outcome = await kind.visit(dice)
        except (OSError, EOFError) as error:
            outcome = f"{'!' if kind.name == 'honest' else ''}{type(error).__name__}"
        self._tally.count(kind.name, outcome)
