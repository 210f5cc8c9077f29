"""Below the threshold: holding batches back or not, never much worse than the better of the two."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated_filling import SimulatedFilling
from planner.policies.filling import WINDOW_REQUESTS, Filling, FillLimits, PassTimes

REQUESTS = 8 * WINDOW_REQUESTS
TIMES = PassTimes(layers=8, resident=1, transfer_s=0.05, flops_per_s=1e9)


def arrivals(kind: str, rate_per_s: float, flops: float, seed: int) -> list[tuple[float, float]]:
    return list(itertools.islice(_arrivals(kind, rate_per_s, flops, seed), REQUESTS))


def _arrivals(
    kind: str, rate_per_s: float, flops: float, seed: int
) -> Iterator[tuple[float, float]]:
    rng, now_s = random.Random(seed), 0.0
    while True:
        if kind == "poisson":
            now_s += rng.expovariate(rate_per_s)
            yield now_s, flops
        elif kind == "even":
            now_s += rng.uniform(0.8, 1.2) / rate_per_s
            yield now_s, flops
        else:  # bursts
            size = rng.randint(1, 12)
            now_s += rng.expovariate(rate_per_s / 6.5)
            for _ in range(size):
                now_s += 0.002
                yield now_s, flops


def mean_s(policy: str, requests: list[tuple[float, float]], max_wait_s: float) -> float:
    """After the first requests, from which there is nothing to learn yet."""
    limits = FillLimits(max_wait_s=max_wait_s, max_flops=4 * TIMES.full_flops)
    settled = SimulatedFilling(policy, limits, TIMES).turnarounds(requests)[WINDOW_REQUESTS:]
    return sum(settled) / len(settled)


@pytest.mark.parametrize("kind", ["poisson", "even", "bursts"])
@pytest.mark.parametrize("part_of_full", [0.05, 0.3])
def test_the_choice_costs_no_more_than_three_percent_over_the_better_policy(
    kind: str, part_of_full: float
) -> None:
    flops = part_of_full * TIMES.full_flops
    gains = []
    for used, max_wait_s in itertools.product((0.03, 0.3, 0.9), (0.02, 0.1)):
        requests = arrivals(kind, used * TIMES.flops_per_s / flops, flops, seed=1)
        never, always, chosen = (
            mean_s(policy, requests, max_wait_s) for policy in ("never", "always", "choose")
        )
        assert chosen <= 1.03 * min(never, always), (used, max_wait_s, never, always, chosen)
        gains.append(always / never)
    assert max(gains) > 1.03 * min(gains), "holding matters"


def test_bursts_are_held_and_lone_requests_are_not() -> None:
    flops = 0.05 * TIMES.full_flops
    bursts, lone = arrivals("bursts", 6.5, flops, 2), arrivals("even", 0.2, flops, 2)
    for requests, better, worse in ((bursts, "always", "never"), (lone, "never", "always")):
        means = {policy: mean_s(policy, requests, 0.1) for policy in ("never", "always", "choose")}
        assert means["choose"] < means[worse]
        assert means["choose"] <= 1.03 * means[better]


@given(
    gaps_s=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60),
    flops=st.floats(1e6, 1e9),
    max_wait_s=st.floats(0.0, 0.5),
)
def test_nothing_waits_longer_than_max_wait_s_for_company(
    gaps_s: list[float], flops: float, max_wait_s: float
) -> None:
    filling = Filling(FillLimits(max_wait_s=max_wait_s), TIMES)
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        filling.arrived(now_s, flops)
        due_s = filling.due_s(now_s, now_s - 0.1, flops)
        assert due_s <= max(now_s, now_s - 0.1 + max_wait_s)
        assert filling.due_s(now_s, now_s, TIMES.full_flops) == now_s
