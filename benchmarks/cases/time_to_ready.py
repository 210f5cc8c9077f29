"""Time from the start of `tandem serve` on the bundled model to its first answers.

To the first 200 of /health, to the first answered completion, and how that one compares with the
next ones.

    python -m benchmarks time_to_ready
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.server import ServerProcess
from contracts.config import BUNDLED
from contracts.errors import LaunchError

BODY = {
    "model": BUNDLED,
    "prompt": "Message: Running late, order me a coffee?\nSpam:",
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}
WARM_REQUESTS = 20
SPLITS = {
    "1 attention, 1 expert": (),
    "2 attention, 2 expert": ("--attention-ranks", "2", "--expert-ranks", "2"),
}


class Start(msgspec.Struct, frozen=True):
    """One start. Seconds since the process began, then the latencies of requests."""

    healthy_s: float
    answered_s: float
    first_request_s: float
    warm_requests_s: list[float]


def start_once(arguments: Sequence[str]) -> Start:
    with ServerProcess("--model", BUNDLED, *arguments) as server:
        healthy_s = server.wait_healthy()
        with httpx.Client(base_url=server.url, timeout=60.0) as client:
            client.get("/health")  # the connection is not what is measured
            first_s = _request(client)
            answered_s = time.monotonic() - server.started_s
            return Start(
                healthy_s, answered_s, first_s, [_request(client) for _ in range(WARM_REQUESTS)]
            )


def _request(client: httpx.Client) -> float:
    started_s = time.monotonic()
    client.post("/v1/completions", json=BODY).raise_for_status()
    return time.monotonic() - started_s


def figures(starts: list[Start]) -> dict[str, dict[str, float]]:
    """Seconds."""
    by_name = {
        "start to /health 200": [start.healthy_s for start in starts],
        "start to first completion": [start.answered_s for start in starts],
        "first completion": [start.first_request_s for start in starts],
        "later completions": [s for start in starts for s in start.warm_requests_s],
    }
    return {
        name: {"median_s": statistics.median(values), "min_s": min(values), "max_s": max(values)}
        for name, values in by_name.items()
    }


def measure(options: argparse.Namespace) -> Measured:
    starts: dict[str, list[Start]] = {split: [] for split in SPLITS}
    failed: list[str] = []
    for _ in range(options.runs):
        for split, arguments in SPLITS.items():
            try:
                starts[split].append(start_once(arguments))
            except LaunchError as error:  # Ray gives up after 30 s on an overloaded machine
                failed.append(f"{split}: {error.message}")
    summary = {split: figures(of_split) for split, of_split in starts.items()}
    return Measured(starts, summary, {"failed": failed})


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for split, by_name in summary.items():
        for name, row in by_name.items():
            unit, scale = ("s", 1.0) if name.startswith("start") else ("ms", 1e3)
            ranks = split.replace("attention, ", "+ ").removesuffix(" expert")
            rows.append([f"{ranks}: {name}, {unit}", *(f"{scale * v:.1f}" for v in row.values())])
    return [Table("", ["attention + expert ranks", "median", "minimum", "maximum"], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=7, help="per split, in turn")


CASE = documented_case(__doc__, "Time to ready", measure, tables, add_options)
