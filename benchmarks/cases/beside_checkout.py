"""What a change costs over HTTP: servers of two checkouts, in turns.

    git worktree add --detach ../before COMMIT
    python -m benchmarks beside_checkout --before ../before

Both serve the bundled model, with prefill workers that answer without computing (so that what is
timed is the way there and back) and one attention and one expert rank that do compute, for chats.
Each pair of blocks asks one server, then the other, the order changing from pair to pair; the
ratios are after / before within a pair.
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.http_line import HttpLine
from benchmarks.support.server import ServerProcess

SERVER = (
    *("--attention-ranks", "1", "--expert-ranks", "1", "--prefill-ranks", "1"),
    *("--set", "prefill.engine=tests.support.stub_rank:stub_rank"),
)
PROMPT = "Message: Running ten minutes late, order me a coffee please?\nSpam:"
CHAT = [{"role": "user", "content": "Is this message spam?\nYou have won a free phone!"}]
TASK = {"template": "Message: {text}\nSpam:", "labels": ["no", "yes"], "input": "Coffee?"}
CONNECTIONS = 32
SIDES = ("before", "after")


class Workload(NamedTuple):
    """Blocks of `requests`, `at_once` of them under way. unit: of the figure of a block."""

    path: str
    body: Mapping[str, object]
    requests: int
    at_once: int
    unit: str


ONE_TOKEN = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
CHAT_BODY = {"messages": CHAT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
WORKLOADS = {
    "completion, alone": Workload("/v1/completions", ONE_TOKEN, 150, 1, "p50 ms"),
    "classification, alone": Workload("/v1/classify", TASK, 150, 1, "p50 ms"),
    "completions at once": Workload("/v1/completions", ONE_TOKEN, 800, CONNECTIONS, "requests/s"),
    "classifications at once": Workload("/v1/classify", TASK, 800, CONNECTIONS, "requests/s"),
    "chat of 16 tokens, alone": Workload("/v1/chat/completions", CHAT_BODY, 12, 1, "p50 ms"),
}


async def _run(before: Path, pairs: int) -> dict[str, dict[str, list[float]]]:
    """samples[workload][side]: one figure a block."""
    samples = {name: {side: list[float]() for side in SIDES} for name in WORKLOADS}
    with contextlib.ExitStack() as stack:
        ports: dict[str, int] = {}
        for side, checkout in zip(SIDES, (before, None), strict=True):
            server = stack.enter_context(ServerProcess(*SERVER, checkout=checkout))
            server.wait_healthy()
            ports[side] = server.port
        for number in range(-1, pairs):  # the first pair warms up
            for name, workload in WORKLOADS.items():
                for side in SIDES if number % 2 else reversed(SIDES):
                    figure = await _block(ports[side], workload)
                    if number >= 0:
                        samples[name][side].append(figure)
    return samples


async def _block(port: int, workload: Workload) -> float:
    lines = [await HttpLine.open("127.0.0.1", port) for _ in range(workload.at_once)]
    body = msgspec.json.encode({"model": "bundled", **workload.body})
    numbers = iter(range(workload.requests))
    times_s: list[float] = []

    async def client(line: HttpLine) -> None:
        for _ in numbers:
            started_s = time.perf_counter()
            await line.post(workload.path, body)
            times_s.append(time.perf_counter() - started_s)

    work: Callable[[HttpLine], Awaitable[None]] = client
    started_s = time.perf_counter()
    await asyncio.gather(*map(work, lines))
    spent_s = time.perf_counter() - started_s
    for line in lines:
        line.close()
    return statistics.median(times_s) * 1000 if workload.at_once == 1 else len(times_s) / spent_s


def _summary(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians of both sides; median and quartiles of the pairs' ratios."""
    ratios = [after / before for before, after in zip(*found.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {side: statistics.median(values) for side, values in found.items()}
    return {**medians, "ratio": middle, "ratio_low": low, "ratio_high": high}


def measure(options: argparse.Namespace) -> Measured:
    samples = asyncio.run(_run(options.before, options.pairs))
    summary = {name: _summary(found) for name, found in samples.items()}
    return Measured(samples, summary, {"server": SERVER, "workloads": WORKLOADS})


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = [
        [
            name,
            WORKLOADS[name].unit,
            *(f"{found[side]:,.2f}" for side in SIDES),
            f"{found['ratio']:.3f}",
            f"{found['ratio_low']:.3f} {found['ratio_high']:.3f}",
        ]
        for name, found in summary.items()
    ]
    return [Table("", ["workload", "unit", *SIDES, "after / before", "quartiles"], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, required=True, help="checkout of the older commit")
    parser.add_argument("--pairs", type=int, default=24)


CASE = documented_case(__doc__, "HTTP beside another checkout", measure, tables, add_options)
