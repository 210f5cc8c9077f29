"""One batch through 1 attention and 1 expert rank under several plans: makespan, what overlaps,
and a Perfetto trace of the ASAS plan with r1 = 2, r2 = 2.

    python -m benchmarks.overlap --trace overlap.trace.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from actors.telemetry.chrome_trace import write_chrome_trace
from benchmarks.harness import record
from benchmarks.pinned_batches import BatchRunner, bench_client, pin_to_core
from benchmarks.random_checkpoint import MEDIUM, write_random_checkpoint
from contracts.loading import load_config
from contracts.plan import Order, Plan
from contracts.traces import Stage, TaskSpan
from planner.schedule.exposed_communication import busy_seconds, exposed_communication
from tests.support.local_group import LocalGroup

PLANS = {
    "naive": Plan(order=Order.NAIVE),
    "pppipe r1=2": Plan(order=Order.PPPIPE, r1=2),
    "asas r1=2 r2=1": Plan(order=Order.ASAS, r1=2),
    "asas r1=2 r2=2": Plan(order=Order.ASAS, r1=2, r2=2),
    "asas r1=4 r2=2": Plan(order=Order.ASAS, r1=4, r2=2),
}
TRACED = "asas r1=2 r2=2"
_CALL_TIMEOUT_S = 10.0


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "medium", MEDIUM)
        config = load_config(
            None,
            [
                f"model.dtype={options.dtype}",
                f"schedule.max_batch_tokens={options.sequences * options.tokens}",
                "kv.prefix_cache=false",
                f"kv.pool_tokens={3 * options.sequences * options.tokens}",
            ],
        )
        with LocalGroup(str(path), config, backend=options.backend) as group:
            if os.cpu_count() == 2:  # one core each, so that the plan decides what overlaps
                for core, process in enumerate(group.processes.values()):
                    pin_to_core(process.pid, core)
            samples, traced = asyncio.run(_measure(group, options))
    if options.trace is not None:
        write_chrome_trace(traced, options.trace)
    if options.picture is not None:
        from cluster.tools.plots import draw_gantt

        title = f"Measured: {TRACED}, layers 2 to 4 of 8, {options.dtype}, one core per rank"
        draw_gantt(traced, range(2, 5), title, options.picture)
    _report(samples, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="per sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--backend", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--trace", type=Path, help="write the traced batch here")
    parser.add_argument("--picture", type=Path, help="draw the traced batch here (.svg, .png)")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    return parser.parse_args()


async def _measure(
    group: LocalGroup, options: argparse.Namespace
) -> tuple[dict[str, list[dict[str, float]]], list[TaskSpan]]:
    """Per plan one dict per round, plans interleaved; and the spans of the traced batch."""
    ((name, address),) = group.client_addresses.items()
    client = await bench_client(name, address, group.token)
    attention = group.processes[name]
    runner = BatchRunner(
        client,
        lambda plan: attention.call("pin_plan", plan).result(_CALL_TIMEOUT_S),
        group.spans,
        ahead_tokens=options.sequences * options.tokens,  # a batch of its own
    )
    samples: dict[str, list[dict[str, float]]] = {label: [] for label in PLANS}
    traced: list[TaskSpan] = []
    for number in range(options.rounds + 1):  # the first round warms up
        for label, plan in PLANS.items():
            spans = (await runner.run(plan, _rows(options, seed=number))).spans
            if number == 0:
                continue
            samples[label].append(_figures(spans, options))
            if label == TRACED:
                traced = spans
    await client.close()
    return samples, traced


def _rows(options: argparse.Namespace, *, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    size = (options.sequences, options.tokens)
    rows: list[list[int]] = torch.randint(1, 8192, size, generator=generator).tolist()
    return rows


def _figures(spans: Sequence[TaskSpan], options: argparse.Namespace) -> dict[str, float]:
    makespan_s = max(s.end_s for s in spans) - min(s.start_s for s in spans)
    exposed_s, exposed_fraction = exposed_communication(spans)
    attention = (Stage.ATTENTION, Stage.SHARED, Stage.FINISH)
    return {
        "makespan_s": makespan_s,
        "tokens_per_s": options.sequences * options.tokens / makespan_s,
        "attention_busy_fraction": busy_seconds(spans, attention) / makespan_s,
        "expert_busy_fraction": busy_seconds(spans, (Stage.EXPERT,)) / makespan_s,
        "exposed_communication_s": exposed_s,
        "exposed_communication_fraction": exposed_fraction,
    }


def _report(samples: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    summary: dict[str, Any] = {
        label: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for label, rows in samples.items()
    }
    table = Table(title=f"{options.sequences} x {options.tokens} tokens, {options.dtype}")
    for heading in ("plan", "ms", "tokens/s", "attention busy", "experts busy", "exposed comm"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for label, row in summary.items():
        table.add_row(
            label,
            f"{1e3 * row['makespan_s']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['attention_busy_fraction']:.0%}",
            f"{row['expert_busy_fraction']:.0%}",
            f"{row['exposed_communication_fraction']:.1%}",
        )
    Console(width=100).print(table)
    record(f"overlap_{options.dtype}_{options.backend}", options, samples, summary)


if __name__ == "__main__":
    main()
