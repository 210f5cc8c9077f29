"""How long a user waits for `tandem serve` on the bundled model: from its start to the first
200 of /health, to the first answered completion, and how that one compares with the next ones.

    python -m benchmarks.time_to_ready
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Result, write_result
from benchmarks.server import ServerProcess
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=7, help="per split, in turn")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    load_before = os.getloadavg()
    starts: dict[str, list[Start]] = {split: [] for split in SPLITS}
    failed: list[str] = []
    for _ in range(options.runs):
        for split, arguments in SPLITS.items():
            try:
                starts[split].append(start_once(arguments))
            except LaunchError as error:  # Ray gives up after 30 s: seen on an overloaded machine
                failed.append(f"{split}: {error.message}")
    summary = {split: figures(of_split) for split, of_split in starts.items()}
    _show(summary)
    print(f"starts that failed: {len(failed)}", *failed, sep="\n  ")
    result = Result(
        name="time_to_ready",
        kind="measured",
        settings={"load_average_before": load_before, "runs": options.runs, "failed": failed},
        samples=msgspec.to_builtins(starts),
        summary=summary,
    )
    print(f"written: {write_result(result, options.output)}")


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


def _show(summary: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title="tandem serve on the bundled model")
    for heading in ("ranks", "", "median", "least", "most"):
        table.add_column(heading, justify="left" if heading in ("ranks", "") else "right")
    for split, by_name in summary.items():
        for name, row in by_name.items():
            unit, scale = ("s", 1.0) if name.startswith("start") else ("ms", 1e3)
            table.add_row(split, name, *(f"{scale * value:.1f} {unit}" for value in row.values()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
