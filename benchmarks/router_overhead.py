"""What the router costs where it cannot help: rows that share nothing, with it and without it.

    python -m benchmarks.router_overhead --data DATA

Without: rows are dealt to the same workers by turns, over the same connections' protocol. The two
take turns in one run, pair by pair; no row begins as one of another pair does. The CPU time of
both is what the machine's noise does not touch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import record
from benchmarks.others import cpu_seconds
from benchmarks.prefill_rows import PICKS, Rows, read
from benchmarks.prefill_sides import MODELS, DealtPrefill, RoutedPrefill, encoder, model_folder
from contracts.interpreter import freeze_heap
from contracts.loading import load_config
from models.spec.model import read_spec
from tests.support.local_group import LocalGroup

SETS = {"rt_polarity": 1000, "ag_news": 400}
SIDES = ("router", "dealt")


class Run(NamedTuple):
    """driver_s, workers_s: CPU seconds."""

    seconds: float
    driver_s: float
    workers_s: float


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    config = load_config(
        None,
        [
            "groups.attention_ranks=0",
            "groups.expert_ranks=0",
            f"groups.prefill_ranks={options.workers}",
            f"model.dtype={options.dtype}",
            *options.set,
        ],
    )
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        folder = model_folder(options.model, options.data, Path(scratch) / "model")
        context, encode = read_spec(folder).max_context_tokens, encoder(folder)
        picks = {name: PICKS[name]._replace(rows=rows) for name, rows in SETS.items()}
        found = {name: read(pick, options.data, encode, context) for name, pick in picks.items()}
        works = {name: rows for name, rows in found.items() if rows is not None}
        with LocalGroup(str(folder), config) as group:
            if os.cpu_count() == 2:
                for core, process in enumerate(group.processes.values()):
                    os.sched_setaffinity(process.pid, {core})
            sides = {
                "router": RoutedPrefill(group, folder, config, getattr(torch, options.dtype)),
                "dealt": DealtPrefill(group),
            }
            pids = [process.pid for process in group.processes.values()]
            samples = asyncio.run(_measure(sides, pids, works, options.pairs))
    summary = {name: _summary(works[name], pairs) for name, pairs in samples.items()}
    _show(summary, options)
    raw = {
        name: [{side: run._asdict() for side, run in pair.items()} for pair in pairs]
        for name, pairs in samples.items()
    }
    record(
        f"router_overhead_{options.model}_{options.dtype}",
        options,
        raw,
        summary,
        MODELS[options.model],
    )


async def _measure(
    sides: dict[str, Any], pids: list[int], works: dict[str, Rows], pairs: int
) -> dict[str, list[dict[str, Run]]]:
    for side in sides.values():
        await side.start()
    freeze_heap()  # as an ingress does
    found: dict[str, list[dict[str, Run]]] = {}
    used = 0
    for name, rows in works.items():
        for number in range(pairs + 1):  # the first pair warms up
            pair = {}
            for side in SIDES if number % 2 else reversed(SIDES):
                used += 1
                pair[side] = await _timed(sides[side], rows.behind(used, apart=True), pids)
            if number:
                found.setdefault(name, []).append(pair)
    for side in sides.values():
        await side.close()
    return found


async def _timed(side: RoutedPrefill | DealtPrefill, rows: Rows, pids: list[int]) -> Run:
    workers_s, driver_s, started_s = cpu_seconds(pids), time.process_time(), time.monotonic()
    await side.run(rows)
    return Run(
        time.monotonic() - started_s,
        time.process_time() - driver_s,
        cpu_seconds(pids) - workers_s,
    )


def _summary(rows: Rows, pairs: list[dict[str, Run]]) -> dict[str, Any]:
    ratios = sorted(pair["router"].seconds / pair["dealt"].seconds for pair in pairs)
    quarters = statistics.quantiles(ratios, n=4)
    count = len(rows.token_ids)
    microseconds = {
        f"{side}, {part}": 1e6
        * statistics.median(getattr(p[side], f"{part}_s") for p in pairs)
        / count
        for side in SIDES
        for part in ("driver", "workers")
    }
    return {
        "rows": count,
        "tokens": rows.tokens + count,
        "ratio_median": quarters[1],
        "ratio_quartiles": [quarters[0], quarters[2]],
        "rows_per_s": {
            side: count / statistics.median(pair[side].seconds for pair in pairs) for side in SIDES
        },
        "cpu_us_per_row": microseconds,
    }


def _show(summary: dict[str, Any], options: argparse.Namespace) -> None:
    table = Table(
        title=f"{options.model}, {options.dtype}: with the router, over rows dealt by turns"
    )
    table.add_column("set")
    for heading in (
        "rows",
        "tokens",
        "seconds, ratio (quartiles)",
        "CPU µs a row: router",
        "dealt",
    ):
        table.add_column(heading, justify="right")
    for name, found in summary.items():
        low, high = found["ratio_quartiles"]
        cpu = found["cpu_us_per_row"]
        table.add_row(
            name,
            str(found["rows"]),
            str(found["tokens"]),
            f"{found['ratio_median']:.3f} ({low:.3f}, {high:.3f})",
            *(f"{cpu[f'{side}, driver']:.0f} + {cpu[f'{side}, workers']:.0f}" for side in SIDES),
        )
    Console(width=110).print(table)
    print("CPU: of the client's process with the router + of the workers")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="folder with classification/")
    parser.add_argument("--model", choices=MODELS, default="bundled")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
