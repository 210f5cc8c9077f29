"""Chats of both classes at fractions of the capacity of continuous batching (QLLM, Figures 2 to 4).

A fifth of the chats are LS; 32 slots, Poisson arrivals, by policy.

Each variant has an attention and an expert rank, each pinned to a core; variants take turns.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actors.ranks.rendezvous import GroupSpec, Seat, contiguous_placements, form_group, make_specs
from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.support.pinned_batches import bench_client, pin_to_core
from benchmarks.support.policy_rank import ENVIRONMENT
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.support.rank_load import figures, run_arrivals
from cluster.routing.rank_client import RankClient
from cluster.tools.bench.datasets import Lengths
from cluster.tools.bench.workload import RequestArrival, RequestResult, chat_lengths, mean, poisson
from contracts.loading import load_config
from contracts.requests import Priority
from tests.support.rank_process import RankProcess

_TOKEN = b"benchmark token, of no secret"
_CALL_S, _READY_S = 60.0, 180.0
POOL_TOKENS = 32_768
VOCABULARY = MEDIUM["vocab_size"]
LS_PART = 0.2
WHOLE, FCFS = "run to completion", "iteration FCFS"
SLOTS = ["schedule.max_batch_sequences=32", "schedule.max_batch_tokens=2048"]
OFF = ["priority.preempt=false", *SLOTS]
RATES = ((0.45, WHOLE), (0.9, WHOLE), (0.8, FCFS), (0.95, FCFS), (1.2, FCFS))  # of whose capacity
MOST = Lengths(512, 160)
BURST = poisson(1e4, 0.012, chat_lengths(MOST), LS_PART, random.Random(5))


class Variant(NamedTuple):
    """batching: a baseline's name; "": as configured. classless: the rank gets all requests as one
    class. be: send the BE requests, too."""

    name: str
    overrides: Sequence[str] = ()
    batching: str = ""
    classless: bool = False
    be: bool = True


VARIANTS = [
    Variant(WHOLE, OFF, "static_batching", classless=True),
    Variant(FCFS, OFF, classless=True),
    Variant("iteration priority", OFF),
    Variant("ours", SLOTS),
    Variant("ours, ls_ttft_s=0", [*SLOTS, "priority.ls_ttft_s=0"]),
]
ALONE = Variant("LS alone", SLOTS, be=False)  # ours, without BE: the lower bound of LS's TTFT


class Ranks:
    """The ranks of one variant."""

    def __init__(self, folder: Path, variant: Variant, dtype: str) -> None:
        common = [f"kv.pool_tokens={POOL_TOKENS}", "kv.prefix_cache=false", f"model.dtype={dtype}"]
        config = load_config(None, [*common, *variant.overrides])
        placements = contiguous_placements(str(folder), expert_ranks=1)
        group_spec = GroupSpec(config, str(folder), _TOKEN, 1, "shm", placements=placements)
        seat = [Seat("cpu", "127.0.0.1", 1)]
        specs = make_specs(group_spec, seat, seat)
        os.environ[ENVIRONMENT] = variant.batching
        module = "benchmarks.support.policy_rank"
        self._processes = [RankProcess(spec.name, module=module) for spec in specs]
        self._ready = form_group(specs, self._processes, timeout_s=_READY_S)
        if os.cpu_count() == 2:
            for core, process in enumerate(self._processes):
                pin_to_core(process.pid, core)
        self._client: RankClient

    async def join(self) -> None:
        first = self._ready[0]
        self._client = await bench_client(
            first.name, first.client_address, _TOKEN, heartbeat_timeout_s=30.0
        )

    async def close(self) -> None:
        await self._client.close()
        for process in self._processes:
            with contextlib.suppress(Exception):
                process.call("stop").result(_CALL_S)
            process.close()

    async def run(
        self, variant: Variant, arrivals: Sequence[RequestArrival], seconds: float, seed: int
    ) -> list[RequestResult]:
        """Raise RuntimeError if a request fails."""
        outcomes = await run_arrivals(
            self._client,
            [each for each in arrivals if variant.be or each.priority is Priority.LS],
            seconds,
            vocabulary=VOCABULARY,
            seed=seed,
            classless=variant.classless,
        )
        failed = [each.error for each in outcomes if each.error]
        if failed:
            raise RuntimeError(f"{variant.name}: {len(failed)} failed; the first: {failed[0]}")
        return outcomes


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MEDIUM)
        ranks = {variant.name: Ranks(path, variant, options.dtype) for variant in VARIANTS}
        for each in ranks.values():
            await each.join()
        capacities = {v.name: await _capacity(ranks[v.name], v) for v in VARIANTS[:2]}
        print("capacities, jobs/s:", capacities, flush=True)
        samples: dict[str, Any] = {"capacities_jobs_per_s": capacities}
        for number in range(options.rounds):
            for part, reference in RATES:
                rate = part * capacities[reference]
                rng = random.Random(17 * number + round(100 * part))
                arrivals = poisson(rate, options.seconds, chat_lengths(MOST), LS_PART, rng)
                turns = [*VARIANTS, ALONE]
                for variant in turns if number % 2 else turns[::-1]:
                    if variant.batching and reference != variant.name:
                        continue  # beyond its capacity only its queue grows
                    used = ranks["ours" if variant is ALONE else variant.name]
                    outcomes = await used.run(variant, arrivals, options.seconds, number)
                    row = _row(outcomes) | {"rate": rate}
                    samples.setdefault(f"{part} of {reference} | {variant.name}", []).append(row)
                    print(number, part, variant.name, row, flush=True)
        for each in ranks.values():
            await each.close()
        return samples


def _row(outcomes: Sequence[RequestResult]) -> dict[str, Any]:
    return {
        **{priority.label: figures(outcomes, priority) for priority in Priority},
        "jobs_per_s": len(outcomes) / max(each.end_s for each in outcomes),
    }


async def _capacity(ranks: Ranks, variant: Variant) -> float:
    """Return jobs per second, from tokens per second while all slots are full in the second of two
    bursts."""
    await ranks.run(variant, BURST, 0.1, 1)
    outcomes = await ranks.run(variant, BURST, 0.1, 2)
    times_s = sorted(itertools.chain.from_iterable(each.tokens_s for each in outcomes))
    first, last = len(times_s) // 10, len(times_s) * 3 // 4
    tokens_per_s = (last - first) / (times_s[last] - times_s[first])
    return tokens_per_s * len(outcomes) / len(times_s)


SHOWN = (
    ("ls", "ttft_ms", 1),
    ("ls", "ttft_p99_ms", 1),
    ("ls", "tbt_ms", 1),
    ("ls", "turnaround_s", 3),
    ("be", "turnaround_s", 3),
)


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Return means over rounds."""
    found: dict[str, Any] = {"capacities": samples["capacities_jobs_per_s"]}
    for name, rounds in samples.items():
        if isinstance(rounds, list):
            found[name] = {
                f"{priority}_{key}": round(mean([each[priority][key] for each in rounds]), digits)
                for priority, key, digits in SHOWN
            } | {
                key: round(mean([each[key] for each in rounds]), 3)
                for key in ("rate", "jobs_per_s")
            }
    return found


def measure(options: argparse.Namespace) -> Measured:
    samples = asyncio.run(_run(options))
    return Measured(samples, summary(samples), {"model_config": MEDIUM})


def tables(summary: dict[str, Any]) -> list[Table]:
    columns = ("ls_ttft_ms", "ls_ttft_p99_ms", "ls_turnaround_s", "be_turnaround_s", "jobs_per_s")
    short = {" of run to completion": "r", " of iteration FCFS": "f"}
    rows = {name: row for name, row in summary.items() if isinstance(row, dict)}
    for long, letter in short.items():
        rows = {name.replace(long, letter, 1): row for name, row in rows.items()}
    title = "Capacity of run to completion: r, of iteration FCFS: f"
    return [table_of(rows, title, "variant", columns)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a variant in a round")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


CASE = documented_case(__doc__, "LS and BE chats by arrival rate", measure, tables, add_options)
