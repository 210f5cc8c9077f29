"""What it costs a group, while nothing is lost, that it can be repaired.

    python -m benchmarks.repair_cost [--rounds 150] [--add]

A group of plain processes, an attention rank and two expert ranks of the bundled model in float32,
is asked as it is ("with"), without what its ranks do in each layer so that it can be repaired
(unrepaired_rank.py; "without"), and as it is once more ("again"), whose ratio to the first says
what such ratios are worth; in an order drawn anew in each round, 8 sequences at once, generated
greedily. What counts is the ratio within a round, of seconds and of the ranks' processor time; the
tokens of all three are compared. Beside that the parts by themselves, where a difference is far
above what varies (repair_parts.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import RESULTS, record
from benchmarks.pinned_batches import bench_client
from benchmarks.rank_stream import open_stream
from benchmarks.repair_parts import parts_us
from benchmarks.unrepaired_rank import WITH, WITHOUT
from cluster.fleet.model_folder import resolve_model_folder
from cluster.routing.rank_client import RankClient
from contracts.config import BUNDLED
from contracts.loading import config_from
from contracts.messages import Failed, Submit, Tokens
from contracts.requests import Sampling
from tests.support import local_group
from tests.support.local_group import LocalGroup
from tests.support.rank_process import RankProcess

SIDES = ("with", "without", "again")
SEQUENCES, PROMPT_TOKENS, VOCABULARY = 8, 24, 400
WARM_UPS = 3
SETTLING_TOKENS = 4  # after a switch: what has been switched is compiled anew
SILENCE_S = 60.0  # of a rank: the machine may be busy
CONFIG = {
    "model": {"dtype": "float32"},
    "groups": {"attention_ranks": 1, "expert_ranks": 2},
    "kv": {"pool_tokens": 16384, "prefix_cache": False},
    "channel": {"heartbeat_timeout_s": 20.0},
}


def cpu_s(group: LocalGroup) -> dict[str, float]:
    """Processor time so far, of the attention rank and of the expert ranks."""
    found = {"attention": 0.0, "expert": 0.0}
    for name, process in group.processes.items():
        clock = ~process.pid << 3 | 2  # clock_getcpuclockid(3); /proc/PID/stat has hundredths
        found[name.partition("-")[0]] += time.clock_gettime(clock)
    return found


@contextlib.contextmanager
def switched_group(folder: str) -> Iterator[LocalGroup]:
    process = functools.partial(RankProcess, module="benchmarks.unrepaired_rank")
    with contextlib.ExitStack() as stack:
        with patch.object(local_group, "RankProcess", process):
            group = stack.enter_context(LocalGroup(folder, config_from(CONFIG, source="here")))
        yield group


async def generated(client: RankClient, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    submits = [Submit(request_id=0, token_ids=ids, sampling=sampling) for ids in prompts]
    streams = [await open_stream(client, submit) for submit in submits]
    answers = []
    for stream in streams:
        events = [event async for event in stream]
        if isinstance(events[-1], Failed):
            raise SystemExit(events[-1].message)
        answers.append([i for each in events if isinstance(each, Tokens) for i in each.token_ids])
    return answers


async def measure(group: LocalGroup, options: argparse.Namespace) -> list[Any]:
    """A row a round: by side, microseconds of each kind for a token."""
    ((rank, address),) = group.client_addresses.items()
    client = await bench_client(rank, address, group.token, heartbeat_timeout_s=SILENCE_S)
    drawn, rounds = random.Random(options.seed), []
    for number in range(-WARM_UPS, options.rounds):
        prompts = [drawn.choices(range(1, VOCABULARY), k=PROMPT_TOKENS) for _ in range(SEQUENCES)]
        found, answers = {}, []
        for side in drawn.sample(SIDES, len(SIDES)):
            for process in group.processes.values():
                process.send_signal(WITHOUT if side == "without" else WITH)
            await generated(client, prompts[:1], SETTLING_TOKENS)
            begun_s, before_s = time.perf_counter(), cpu_s(group)
            answers.append(await generated(client, prompts, options.tokens))
            took_s = time.perf_counter() - begun_s
            used_s = {kind: after - before_s[kind] for kind, after in cpu_s(group).items()}
            each_us = 1e6 / (SEQUENCES * options.tokens)
            used_s |= {"seconds": took_s, "processor": sum(used_s.values())}
            found[side] = {kind: round(used * each_us, 1) for kind, used in used_s.items()}
        if answers[0] != answers[1] or answers[0] != answers[2]:
            raise SystemExit("the sides have not answered alike")
        if number >= 0:
            rounds.append(found)
    await client.close()
    return rounds


def summary_of(rounds: list[Any]) -> dict[str, Any]:
    """cost: by kind, "with" over "without" less 1, and "again" over "with" less 1, which is chance;
    with the interval that has the median of such ratios in 95 of 100 runs."""
    kinds = tuple(rounds[0]["with"])
    return {
        "rounds": len(rounds),
        "us_per_token": {
            side: {kind: statistics.median(each[side][kind] for each in rounds) for kind in kinds}
            for side in SIDES
        },
        "cost": {kind: _cost(rounds, kind, "with", "without") for kind in kinds},
        "control": {kind: _cost(rounds, kind, "again", "with") for kind in kinds},
    }


def _cost(rounds: list[Any], kind: str, side: str, other: str) -> dict[str, float]:
    ratios = sorted(each[side][kind] / each[other][kind] - 1 for each in rounds)
    half = 0.98 * math.sqrt(len(ratios))
    low, high = math.floor(len(ratios) / 2 - half), math.ceil(len(ratios) / 2 + half)
    sums = [sum(each[name][kind] for each in rounds) for name in (side, other)]
    return {
        "median": statistics.median(ratios),
        "low": ratios[max(low, 0)],
        "high": ratios[min(high, len(ratios) - 1)],
        "of_sums": sums[0] / sums[1] - 1,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=24, help="generated for each sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="go on from what is in the file")
    parser.add_argument("--output", type=Path, default=RESULTS / "repair_cost.json")
    options = parser.parse_args(arguments)
    before: dict[str, Any] = {"rounds": [], "parts": {}}
    if options.add and options.output.exists():
        before = json.loads(options.output.read_text(encoding="utf-8"))["samples"]
    folder = str(resolve_model_folder(BUNDLED))
    with switched_group(folder) as group:
        rounds = before["rounds"] + asyncio.run(measure(group, options))
    samples = {"rounds": rounds, "parts": before["parts"] or parts_us()}
    summary = {**summary_of(rounds), "parts_us": samples["parts"]}
    print(json.dumps(summary, indent=1))
    record("repair_cost", options, samples, summary, {"path": BUNDLED})


if __name__ == "__main__":
    main(sys.argv[1:])
