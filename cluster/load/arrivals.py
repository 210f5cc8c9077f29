"""When requests come, and how long they are: drawn, or as a trace has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from contracts.requests import Priority


class Lengths(NamedTuple):
    """prompt: of it in tokens; output: how many are generated, 1 or more."""

    prompt: int
    output: int


class Arrival(NamedTuple):
    """at_s: after the start."""

    at_s: float
    priority: Priority
    lengths: Lengths


Draw = Callable[[random.Random], Lengths]


def always(prompt: int, output: int) -> Draw:
    return lambda _: Lengths(prompt, output)


def like_chats(most: Lengths = Lengths(512, 256)) -> Draw:  # noqa: B008
    """About as long as ShareGPT's first turns: lognormal, medians 75 and 100."""

    def draw(rng: random.Random) -> Lengths:
        prompt, output = rng.lognormvariate(4.3, 0.8), rng.lognormvariate(4.6, 0.6)
        return Lengths(
            min(max(4, round(prompt)), most.prompt), min(max(1, round(output)), most.output)
        )

    return draw


def poisson(
    rate: float, seconds: float, draw: Draw, ls: float, rng: random.Random
) -> list[Arrival]:
    """rate: per second. ls: the part of them that is latency-sensitive."""
    arrivals, at_s = [], 0.0
    while rate > 0 and (at_s := at_s + rng.expovariate(rate)) < seconds:
        priority = Priority.LS if rng.random() < ls else Priority.BE
        arrivals.append(Arrival(at_s, priority, draw(rng)))
    return arrivals


def from_trace(rows: Iterable[tuple[float, Lengths]], ls: float, seed: int) -> list[Arrival]:
    """As they came. ls: the part that is drawn to be latency-sensitive."""
    rng = random.Random(seed)
    return [
        Arrival(at_s, Priority.LS if rng.random() < ls else Priority.BE, lengths)
        for at_s, lengths in rows
    ]


def fitted(
    rows: Sequence[tuple[float, Lengths]], seconds: float, rate: float, divisor: int
) -> list[tuple[float, Lengths]]:
    """A stretch of a trace for a small machine: its arrivals keep their pattern, `rate` of them a
    second on average over `seconds`; its lengths are divided."""
    kept = rows[: round(rate * seconds)]
    stretch = seconds / kept[-1][0]
    return [
        (
            at_s * stretch,
            Lengths(max(4, lengths.prompt // divisor), max(1, lengths.output // divisor)),
        )
        for at_s, lengths in kept
    ]
