"""Copies, load and locality on held-out texts, by placement method.

    python -m benchmarks.placement.traces --data DATA --output bundled.npz           (a minute)
    python -m benchmarks placement --traces bundled.npz

Needs pymetis (extra `bench`). Placements are solved on the train texts and judged on test texts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.placement.compared import Judged, compared, even, judged, layers_of, mean
from benchmarks.placement.traces import Traces, read
from planner.placement.routing import LayerRouting
from planner.placement.solve import solve_layer

SIZES = (300, 1_000, 10_000)
Rows = dict[str, list[Judged]]


def of_traces(traces: dict[str, Traces], options: argparse.Namespace) -> dict[str, Any]:
    """By "ranks | method", a row for each layer."""
    E = options.experts
    train, test = layers_of(traces["train"], E), layers_of(traces["test"], E)
    rows: dict[str, Any] = {}
    for ranks in options.ranks:
        for method, found in compared(train, test, ranks).items():
            rows[f"{ranks} | {method}"] = found
        rows |= sizes(traces["train"], test, ranks, E)
    return rows


def sizes(traces: Traces, test: Sequence[LayerRouting], ranks: int, experts: int) -> Rows:
    """Of profiles of few tokens, spread over the texts."""
    rows: Rows = {}
    for tokens in SIZES:
        step = max(1, len(traces.ids_P2) // tokens)
        few = Traces(traces.ids_P2[::step][:tokens], traces.paths_PLK[::step][:tokens])
        pairs = zip(layers_of(few, experts), test, strict=True)
        rows[f"{ranks} | profile of {tokens:,} tokens"] = [
            judged(solve_layer, one, other, even(experts, ranks)) for one, other in pairs
        ]
    return rows


def measure(options: argparse.Namespace) -> Measured:
    rows = of_traces(read(options.traces), options)
    summary: dict[str, Any] = {
        key: {field: round(value, 4) for field, value in mean(each)._asdict().items()}
        for key, each in rows.items()
    }
    samples: dict[str, Any] = {
        key: [[round(value, 4) for value in layer] for layer in each] for key, each in rows.items()
    }
    return Measured(samples, summary, {}, f"_{options.name}")


def tables(summary: dict[str, Any]) -> list[Table]:
    shown = {
        name.removeprefix("4 | "): row
        for name, row in summary.items()
        if name.startswith("4 | ") and name.count(" | ") == 1
    }
    return [table_of(shown, "4 ranks", "method", ("copies", "load", "local", "seconds"))]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--name", default="bundled")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])


CASE = documented_case(__doc__, "Placements", measure, tables, add_options)
