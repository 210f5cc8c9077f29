"""Long and short prompts at fractions of the capacity, with shared batches on against off.

    python -m benchmarks shared_load

A random checkpoint of 120 M parameters in float32; two groups of two workers with a core each take
turns with equal arrivals: three short prompts for a long one, each to the worker with the fewest
open tokens. Off: prefill.experts=gathered. Ranges: of nine in ten resamplings of the rounds.
"""

import argparse
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from cluster.tools.bench.workload import mean, percentile
from contracts.messages import Failed, Scored
from tests.support.group_harness import RankConnection, prefill_config
from tests.support.local_group import LocalGroup, RankLocation

LONG, SHORT, WORKERS, LOADS = 1500, 150, 2, (0.3, 0.6, 0.9)
MIX = LONG, SHORT, SHORT, SHORT
VARIANTS = {"on": "shuffled", "off": "gathered"}


class Arrival(NamedTuple):
    """worker: None: the one with the fewest open tokens."""

    at_s: float
    tokens: int
    worker: int | None = None


class Workers:
    """Clients of a group. ended: time and event of each answer, by worker and request."""

    def __init__(self, clients: Sequence[RankConnection]) -> None:
        self._clients, self._ended = clients, dict[tuple[int, int], tuple[float, Any]]()
        self._dice = random.Random(0)
        for worker in range(len(clients)):
            threading.Thread(target=self._read, args=(worker,), daemon=True).start()

    def _read(self, worker: int) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError):  # closed
            while True:
                for event in self._clients[worker].read():
                    if isinstance(event, Scored | Failed):
                        self._ended[worker, event.request_id] = time.monotonic(), event

    def play(self, arrivals: Sequence[Arrival]) -> list[float]:
        """Return the seconds from each arrival to its answer."""
        prompts = [self._dice.choices(range(3, 8000), k=each.tokens) for each in arrivals]
        sent, start_s = dict[tuple[int, int], int](), time.monotonic()
        for (at_s, tokens, worker), ids in zip(arrivals, prompts, strict=True):
            time.sleep(max(0.0, start_s + at_s - time.monotonic()))
            if worker is None:
                open_tokens = [0] * len(self._clients)
                for key in sent.keys() - self._ended.keys():
                    open_tokens[key[0]] += sent[key]
                worker = open_tokens.index(min(open_tokens))
            sent[worker, self._clients[worker].submit(ids, candidates=[5])] = tokens
        while not sent.keys() <= self._ended.keys():
            time.sleep(0.002)
        if failed := [self._ended[k][1] for k in sent if isinstance(self._ended[k][1], Failed)]:
            raise RuntimeError(f"a prompt failed: {failed[0]}")
        ends = [self._ended[key][0] for key in sent]
        return [end - start_s - each.at_s for end, each in zip(ends, arrivals, strict=True)]


@contextlib.contextmanager
def running(
    folder: Path, experts: str, inside: Sequence[str] = (), workers: int = WORKERS
) -> Iterator[Workers]:
    """Run a group with a core for each worker."""
    cores = {
        f"prefill-{rank}": RankLocation(inside=("taskset", "-c", str(rank), *inside))
        for rank in range(workers)
    }
    sizes = {"attention_ranks": 0, "expert_ranks": 0, "prefill_ranks": workers}
    config = prefill_config(
        groups={**sizes, "torch_threads": 1, "ready_timeout_s": 300.0},
        kv={"prefix_cache": False, "pool_tokens": 32768},
        prefill={"experts": experts, "max_batch_tokens": 4096},
    )
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(LocalGroup(str(folder), config, locations=cores))
        addresses = group.client_addresses
        clients = [RankConnection(name, addresses[name], group.token) for name in cores]
        yield Workers([stack.enter_context(each) for each in clients])


def measure(options: argparse.Namespace) -> Measured:
    """Measure the capacity, that of a burst with sharing off, and the seconds of prompts."""
    burst = [Arrival(0.0, tokens) for tokens in MIX * options.burst]
    samples, summary = dict[str, list[list[float]]](), dict[str, Any]()
    with TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = write_random_checkpoint(Path(scratch), {**MEDIUM, "torch_dtype": "float32"})
        groups = {n: stack.enter_context(running(folder, mode)) for n, mode in VARIANTS.items()}
        for each, worker in itertools.product(burst[:16], range(WORKERS)):  # to learn their times
            groups["on"].play([each._replace(worker=worker)])
        groups["off"].play(burst)
        summary["prompts_per_s"] = len(burst) / max(groups["off"].play(burst))
        for number, part in itertools.product(range(options.rounds), LOADS):
            rng, arrivals, at_s = random.Random(f"{number} {part}"), list[Arrival](), 0.0
            while (
                at_s := at_s + rng.expovariate(part * summary["prompts_per_s"])
            ) < options.seconds:
                arrivals.append(Arrival(at_s, rng.choice(MIX)))
            for name in VARIANTS if number % 2 else reversed(VARIANTS):
                taken = dict[str, list[float]](long=[], short=[])
                for each, taken_s in zip(arrivals, groups[name].play(arrivals), strict=True):
                    taken["long" if each.tokens == LONG else "short"].append(taken_s)
                for kind, ones in taken.items():
                    samples.setdefault(f"{part:.0%}, {kind}, {name}", []).append(ones)
    for kind in sorted({name.rpartition(", ")[0] for name in samples}):
        rounds = {name: samples[f"{kind}, {name}"] for name in VARIANTS}
        seconds = {name: list(itertools.chain(*each)) for name, each in rounds.items()}
        means = {name: mean(each) for name, each in seconds.items()}
        low, high = ratio_range(rounds["off"], rounds["on"])
        ratios = {"off / on": means["off"] / means["on"], "low": low, "high": high}
        summary[kind] = {"prompts": len(seconds["on"]), **means, **ratios}
    return Measured(dict(samples), summary)


def ratio_range(
    seconds: Sequence[list[float]], others: Sequence[list[float]]
) -> tuple[float, float]:
    """Return the range of nine in ten ratios of means of resampled rounds."""
    dice, sums = random.Random(0), list(zip(map(sum, seconds), map(sum, others), strict=True))
    draws = (zip(*dice.choices(sums, k=len(sums)), strict=True) for _ in range(1000))
    pairs = ((sum(one), sum(other)) for one, other in draws)
    ratios = [one / other for one, other in pairs if other]
    return percentile(ratios, 0.05), percentile(ratios, 0.95)


def tables(summary: dict[str, Any]) -> list[Table]:
    means = {name: row for name, row in summary.items() if "," in name}
    title = f"Mean seconds to the answer, capacity {summary['prompts_per_s']:.2f} prompts/s"
    return [table_of(means, title, "load", ("on", "off", "off / on", "low", "high"))]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=9.0, help="of a variant in a round")
    parser.add_argument("--burst", type=int, default=8, help="long prompts, for the capacity")


CASE = documented_case(__doc__, "Shared batches under load", measure, tables, add_options)
