"""Requests that come one by one to a worker below its threshold, under the three policies.

Blocks of requests: within each the policies take turns with the same arrivals, the next block has
others. One policy runs twice: how far that is from itself, no difference to another one means.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import torch

from benchmarks.prefill_pair import Pair
from benchmarks.two_nodes import TwoNodes

RUNS = {"never": "never", "always": "always", "choose": "choose", "again": "never"}
"""Names of a block's runs, and the policy of each."""
BLOCK_REQUESTS = 16
RUN_S = 300.0  # of a point's runs each: where few requests come, no more than in that time
MEGABITS_PER_S = 1600.0  # so that a pass over a short model takes about 0.2 s, however small
LAYERS = 4
MAX_WAIT_S = 0.1
TOKENS = 128
# requests a second on average, and how many come at once
POINTS = ((0.7, 1), (3.0, 1), (3.0, 4), (8.0, 1))


async def filling_part(
    nodes: TwoNodes, path: Path, requests: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Turnarounds in seconds, by point, run and block; at most `requests` each. One block ahead of
    them does not count: the worker has not seen any yet."""
    nodes.limit_rate(MEGABITS_PER_S)
    pairs: dict[str, Pair] = {}
    samples: dict[str, dict[str, list[list[float]]]] = {}
    try:
        for policy in dict.fromkeys(RUNS.values()):
            pairs[policy] = await Pair.start(
                nodes, path, 2048, experts="gathered", fill=policy, max_wait_s=MAX_WAIT_S
            )
        for rate_per_s, at_once in POINTS:
            label = f"{rate_per_s:g}/s in groups of {at_once}"
            samples[label] = {run: [] for run in RUNS}
            counted = min(requests, round(rate_per_s * RUN_S))
            for block in range(-(-counted // BLOCK_REQUESTS) + 1):
                arrivals_s = arrivals(rate_per_s, at_once, BLOCK_REQUESTS, seed=block)
                for run in list(RUNS)[:: -1 if block % 2 else 1]:
                    turnarounds = await _serve(pairs[RUNS[run]], arrivals_s)
                    if block:
                        samples[label][run].append(turnarounds)
            print(f"measured: {label}", flush=True)
    finally:
        for pair in pairs.values():
            await pair.close()
    return samples


def arrivals(rate_per_s: float, at_once: int, count: int, *, seed: int) -> list[float]:
    """Groups come as a Poisson process; those of a group 20 ms apart."""
    rng, now_s, arrivals_s = random.Random(seed), 0.0, list[float]()
    while len(arrivals_s) < count:
        now_s += rng.expovariate(rate_per_s / at_once)
        arrivals_s += [now_s + 0.02 * number for number in range(at_once)]
    return sorted(arrivals_s[:count])


async def _serve(pair: Pair, arrivals_s: list[float]) -> list[float]:
    begin_s = time.monotonic()

    async def one(number: int, arrival_s: float) -> float:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, 8000, (TOKENS,), generator=generator).tolist()
        await asyncio.sleep(begin_s + arrival_s - time.monotonic())
        start_s = time.monotonic()
        await pair.score(0, ids)
        return time.monotonic() - start_s

    return list(await asyncio.gather(*(one(*item) for item in enumerate(arrivals_s))))
