"""How much sooner the LS requests of the paper's run could have their first token, and all of
their answer, whatever the policy: modelled with pass times that are measured on the ranks.

A pass over d decodes and n tokens of prompts is taken to last base + d a + n c. With it the same
arrivals are played through run to completion, iteration FCFS and iteration priority; through
"LS alone", strict priority whose preemption costs nothing: LS batches as if no BE were there; and
through nobody's policy, "at once", in which each LS request has the whole machine to itself from
when it comes: no policy is faster, so no ratio can be above that of a baseline to it. Short: as
long as a measured round. Long: until queues have had their time to grow.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant
from benchmarks.priorities.paper import LS_PART, MOST, OFF
from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.tools.bench.outcome import mean, percentile
from cluster.tools.bench.workload import Lengths, RequestArrival, chat_lengths, poisson
from contracts.requests import Priority

SLOTS, BUDGET_TOKENS = 32, 2048  # as in the paper's run
PROMPTS = (16, 64, 75, 128, 256, 512)
DECODES = (1, 4, 8, 16, 32)
OUTPUT, REPEATS = 24, 5
RATES = (0.3, 0.45, 0.6, 0.8, 0.9, 0.95, 1.0, 1.2)  # of iteration FCFS's capacity
OF_WHOLE = 0.9  # of run to completion's, the paper's point
SHORT_S, LONG_S, SEEDS = 40.0, 1200.0, 8


class PassTimes(NamedTuple):
    """Seconds."""

    base: float
    of_decode: float
    of_token: float

    def pass_s(self, decodes: int, tokens: int) -> float:
        return self.base + self.of_decode * decodes + self.of_token * tokens


class Waits(NamedTuple):
    """Of a request, from its arrival: to its first token, and to its last. Seconds."""

    ttft_s: float
    turnaround_s: float


class Job:
    """tokens: of its prompt, and what it has generated, if that is to be computed again."""

    __slots__ = ("arrival", "end_s", "first_s", "left", "tokens")

    def __init__(self, arrival: RequestArrival) -> None:
        self.arrival = arrival
        self.tokens, self.left = arrival.lengths
        self.first_s = self.end_s = -1.0

    @property
    def is_ls(self) -> bool:
        return self.arrival.priority is Priority.LS

    @property
    def waits(self) -> Waits:
        return Waits(self.first_s - self.arrival.at_s, self.end_s - self.arrival.at_s)


class Machine:
    """Iterations of whoever is in: a simulated clock."""

    def __init__(self, times: PassTimes, *, whole: bool, classes: bool) -> None:
        """whole: nobody joins before all have ended. classes: LS first, in place of a BE job where
        slots are full."""
        self._times, self._whole, self._classes = times, whole, classes
        self._now_s = 0.0
        self._waiting: list[Job] = []
        self._running: list[Job] = []

    def play(self, arrivals: list[RequestArrival]) -> list[Job]:
        jobs = [Job(arrival) for arrival in arrivals]
        coming = iter(jobs)
        following = next(coming, None)
        while following is not None or self._waiting or self._running:
            if not (self._waiting or self._running) and following is not None:
                self._now_s = max(self._now_s, following.arrival.at_s)
            while following is not None and following.arrival.at_s <= self._now_s:
                self._waiting.append(following)
                following = next(coming, None)
            self._iterate()
        return jobs

    def _iterate(self) -> None:
        decodes = list(self._running)
        new = [] if self._whole and decodes else list(self._admitted())
        decodes = [job for job in decodes if job in self._running]
        tokens = sum(job.tokens for job in new)
        self._now_s += self._times.pass_s(len(decodes), tokens)
        self._running += new
        for job in [*decodes, *new]:
            if job.first_s < 0:
                job.first_s = self._now_s
            job.left -= 1
            job.end_s = self._now_s
        self._running = [job for job in self._running if job.left > 0]

    def _admitted(self) -> Iterator[Job]:
        left = BUDGET_TOKENS - len(self._running)
        taken = 0
        while self._waiting:
            job = self._waiting[0]
            if self._classes:
                job = next((each for each in self._waiting if each.is_ls), job)
            if job.tokens > left:
                return
            if len(self._running) + taken >= SLOTS and not (job.is_ls and self._evicts()):
                return
            self._waiting.remove(job)
            left, taken = left - job.tokens, taken + 1
            yield job

    def _evicts(self) -> bool:
        """Whether a BE job leaves its slot: the one that has generated least."""
        others = [job for job in self._running if not job.is_ls]
        if not (self._classes and others):
            return False
        victim = max(others, key=lambda job: job.left)
        self._running.remove(victim)
        victim.tokens = sum(victim.arrival.lengths) - victim.left
        self._waiting.insert(0, victim)
        return True


def at_once(times: PassTimes, arrivals: list[RequestArrival]) -> list[Waits]:
    """LS's, if each request had the machine to itself from when it came."""
    found = []
    for prompt, output in (a.lengths for a in arrivals if a.priority is Priority.LS):
        first_s = times.pass_s(0, prompt)
        found.append(Waits(first_s, first_s + (output - 1) * times.pass_s(1, 0)))
    return found


ALONE, AT_ONCE = "LS alone", "at once"
POLICIES = {
    "run to completion": {"whole": True, "classes": False},
    "iteration FCFS": {"whole": False, "classes": False},
    "iteration priority": {"whole": False, "classes": True},
}


def capacity_per_s(times: PassTimes, policy: str) -> float:
    """Jobs per second of a policy that never runs out of them."""
    burst = poisson(1e4, 0.05, chat_lengths(MOST), LS_PART, random.Random(5))
    machine = Machine(times, **POLICIES[policy])
    machine.play(burst)
    return len(burst) / machine._now_s


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        group = Group(path, Variant("off", OFF), options.dtype)
        await group.join()
        points = await _measured(group)
        await group.close()
    times = fitted(points)
    print(f"measured {points}\n{times}", flush=True)
    rate = capacity_per_s(times, "iteration FCFS")
    samples: dict[str, Any] = {
        "passes": [[*size, seconds] for size, seconds in points.items()],
        "times": times._asdict(),
        "capacities": {policy: capacity_per_s(times, policy) for policy in POLICIES},
    }
    for part, (length, seconds) in itertools.product(
        RATES, {"short": SHORT_S, "long": LONG_S}.items()
    ):
        seeds = SEEDS if length == "short" else 1
        samples[f"{part} | {length}"] = _at(times, part * rate, seconds, seeds)
    rate = OF_WHOLE * samples["capacities"]["run to completion"]
    samples[f"{OF_WHOLE} of run to completion | short"] = _at(times, rate, SHORT_S, SEEDS)
    samples[f"{OF_WHOLE} of run to completion | long"] = _at(times, rate, LONG_S, 1)
    return samples


async def _measured(group: Group) -> dict[tuple[int, int], float]:
    """Seconds of a pass over (decodes, tokens of a prompt)."""
    found: dict[tuple[int, int], float] = {}
    for number in range(2):  # the first time compiles products
        for tokens in PROMPTS:
            lone = [
                RequestArrival(0.1 * each, Priority.LS, Lengths(tokens, 1))
                for each in range(REPEATS)
            ]
            lone = [arrival._replace(at_s=3 * arrival.at_s) for arrival in lone]
            measured, _ = await group.measure(lone, 0.1, VOCABULARY, number)
            found[0, tokens] = measured["ls"]["ttft_p50_ms"] / 1e3
        for decodes in DECODES:
            together = [RequestArrival(0.0, Priority.LS, Lengths(16, OUTPUT))] * decodes
            _, outcomes = await group.measure(together, 0.1, VOCABULARY, number)
            gaps_s = [gap for each in outcomes for gap in each.gaps_s[len(each.gaps_s) // 4 :]]
            found[decodes, 0] = percentile(gaps_s, 0.5)
    return found


def fitted(points: dict[tuple[int, int], float]) -> PassTimes:
    """With the least sum of squared relative errors."""
    seconds = np.array(list(points.values()))
    sizes = np.array([[1.0, *size] for size in points]) / seconds[:, None]
    found, *_ = np.linalg.lstsq(sizes, np.ones(len(points)), rcond=None)
    return PassTimes(*map(float, np.maximum(found, 0.0)))


def _at(times: PassTimes, rate: float, seconds: float, seeds: int) -> dict[str, Any]:
    """Of LS, in ms, at so many jobs per second: first tokens by policy, and whole answers."""
    waits: dict[str, list[Waits]] = {name: [] for name in (*POLICIES, ALONE, AT_ONCE)}
    for seed in range(seeds):
        arrivals = poisson(rate, seconds, chat_lengths(MOST), LS_PART, random.Random(seed))
        waits[AT_ONCE] += at_once(times, arrivals)
        for name, policy in POLICIES.items():
            jobs = Machine(times, **policy).play(arrivals)
            waits[name] += [job.waits for job in jobs if job.is_ls]
        of_ls = [arrival for arrival in arrivals if arrival.priority is Priority.LS]
        jobs = Machine(times, **POLICIES["iteration FCFS"]).play(of_ls)
        waits[ALONE] += [job.waits for job in jobs]
    found = {"rate": rate}
    for name, each in waits.items():
        found[name] = 1e3 * mean([wait.ttft_s for wait in each])
        found[f"{name}, turnaround"] = 1e3 * mean([wait.turnaround_s for wait in each])
    return found


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """ms. best_over: of LS's TTFT, the highest ratio to that baseline that there can be; and of
    its turnaround: over each request by itself, and over strict priority at no cost."""
    found: dict[str, Any] = {"capacities": samples["capacities"], "times": samples["times"]}
    for name, row in samples.items():
        if " | " in name:
            found[name] = {key: round(value, 1) for key, value in row.items()}
            found[name]["best_over"] = {
                policy: round(row[policy] / row[AT_ONCE], 1) for policy in POLICIES
            }
            for key, best in (("turnaround", AT_ONCE), ("turnaround_strict", ALONE)):
                found[name][f"best_over_{key}"] = {
                    policy: round(row[f"{policy}, turnaround"] / row[f"{best}, turnaround"], 1)
                    for policy in POLICIES
                }
    return found
