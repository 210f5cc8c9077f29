"""Placements compared: copies, load and LAR by token table on texts held out, by method.

    python -m benchmarks.placement.traces --data DATA --output bundled.npz           (a minute)
    python -m benchmarks.placement.fine_grained --data DATA --output fine.npz        (six minutes)
    python -m benchmarks.placement --traces bundled.npz --experts 16 --name bundled
    python -m benchmarks.placement --traces fine.npz --experts 64 --name fine --ranks 4
    python -m benchmarks.placement --made-up                                         (256 experts)

Needs pymetis (extra `bench`). Placements are made of the train texts and judged on test texts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Measured, Table, table_of
from benchmarks.placement.compared import (
    Judged,
    compared,
    even,
    in_order,
    judged,
    layers_of,
    mean,
    ours,
    packed,
)
from benchmarks.placement.others import enumerated, priced
from benchmarks.placement.synthetic import gaussian, planted
from benchmarks.placement.traces import OTHERS, Traces, read
from planner.placement.objective import usual_costs
from planner.placement.routing import LayerRouting
from planner.placement.slots import held
from planner.placement.solve import solve_layer, split

SIZES = (300, 1_000, 10_000)
Rows = dict[str, list[Judged]]


def of_traces(traces: dict[str, Traces], options: argparse.Namespace) -> dict[str, Any]:
    """By "ranks | method", a row for each layer."""
    E = options.experts
    train, test = layers_of(traces["train"], E), layers_of(traces["test"], E)
    rows: dict[str, Any] = {}
    for ranks in options.ranks:
        for method, found in compared(train, test, ranks, brief=options.brief).items():
            rows[f"{ranks} | {method}"] = found
        rows |= replicas(train, test, ranks, options.spare)
        if options.brief:
            continue
        rows |= sizes(traces["train"], test, ranks, E)
        rows |= other_texts(train, traces, ranks, E)
    if E == 16 and 2 in options.ranks:
        rows["optimum"] = [optimal(layer) for layer in train]
    return rows


def replicas(
    train: Sequence[LayerRouting], test: Sequence[LayerRouting], ranks: int, spares: Sequence[int]
) -> Rows:
    rows: Rows = {}
    for spare in spares:
        slots = even(train[0].num_experts, ranks, spare)
        if max(slots) > train[0].num_experts:
            continue
        for name, method in (("in order", in_order), ("EPLB", packed), ("ours", ours)):
            pairs = zip(train, test, strict=True)
            rows[f"{ranks} | {spare} spare | {name}"] = [
                judged(method, one, other, slots)[0] for one, other in pairs
            ]
        print(f"{ranks} ranks, {spare} spare", flush=True)
    return rows


def sizes(traces: Traces, test: Sequence[LayerRouting], ranks: int, experts: int) -> Rows:
    """Of profiles of few tokens, spread over the texts."""
    rows: Rows = {}
    for tokens in SIZES:
        step = max(1, len(traces.ids_P2) // tokens)
        few = Traces(traces.ids_P2[::step][:tokens], traces.paths_PLK[::step][:tokens])
        pairs = zip(layers_of(few, experts), test, strict=True)
        rows[f"{ranks} | profile of {tokens:,} tokens"] = [
            judged(ours, one, other, even(experts, ranks))[0] for one, other in pairs
        ]
    return rows


def other_texts(
    train: Sequence[LayerRouting], traces: dict[str, Traces], ranks: int, experts: int
) -> Rows:
    """The profile's placement on texts that it is not of, and one of their own first half on the
    second."""
    rows: Rows = {}
    slots = even(experts, ranks)
    for kind in OTHERS:
        half = len(traces[kind].ids_P2) // 2
        own = layers_of(traces[kind], experts, half)
        rest = Traces(traces[kind].ids_P2[half:], traces[kind].paths_PLK[half:])
        test = layers_of(rest, experts)
        for name, made_of, method in (
            ("in order", train, in_order),
            ("the profile's", train, ours),
            ("its own", own, ours),
        ):
            pairs = zip(made_of, test, strict=True)
            rows[f"{ranks} | {kind} | {name}"] = [
                judged(method, one, other, slots)[0] for one, other in pairs
            ]
    return rows


def optimal(layer: LayerRouting) -> dict[str, float]:
    """The price of our placement at two ranks, and of the best of all 6,435 divisions."""
    fitted, _ = split(layer)
    costs, slots = usual_costs(layer.sets_PK.shape[1], 2), even(layer.num_experts, 2)
    best = enumerated(fitted, slots, costs)
    own = solve_layer(layer, slots, costs=costs).expert_of_slot
    return {"best": round(best, 6), "ours": round(priced(fitted, own, slots, costs), 6)}


def made_up() -> Rows:
    """Planted groups, and 256 experts."""
    rows: Rows = {}
    for experts, groups in ((16, 4), (64, 8), (128, 8)):
        routing, group_E = planted(experts, 4, groups, stray=0.1, tokens=20_000, seed=0)
        slots = even(experts, groups)
        found, line = judged(ours, routing, routing, slots)
        held_ER = held(line, slots, experts)
        mixed = sum(len(set(group_E[held_ER[:, rank]])) - 1 for rank in range(groups))
        print(f"{experts} experts in {groups} groups: {mixed} groups of others on ranks")
        rows[f"planted, {experts} experts, {groups} groups | ours"] = [found]
        rows[f"planted, {experts} experts, {groups} groups | in order"] = [
            judged(in_order, routing, routing, slots)[0]
        ]
    one, other = gaussian(256, 8, 50_000, of_token=0.5, tokens=60_000, seed=0)
    for spare in (0, 2):
        slots = even(256, 8, spare)
        for name, method in (("in order", in_order), ("EPLB", packed), ("ours", ours)):
            start = time.perf_counter()
            rows[f"256 experts, top 8, {spare} spare | {name}"] = [
                judged(method, one, other, slots)[0]
            ]
            print(f"256 experts, {spare} spare, {name}: {time.perf_counter() - start:.1f} s")
    return rows


def measure(options: argparse.Namespace) -> Measured:
    rows = made_up() if options.made_up else of_traces(read(options.traces), options)
    optimum = rows.pop("optimum", None)
    summary: dict[str, Any] = {
        key: {field: round(value, 4) for field, value in mean(each)._asdict().items()}
        for key, each in rows.items()
    }
    samples: dict[str, Any] = {
        key: [[round(value, 4) for value in layer] for layer in each] for key, each in rows.items()
    }
    if optimum is not None:
        summary["optimum at 2 ranks"] = samples["optimum at 2 ranks"] = optimum
    return Measured(samples, summary, {}, "_made_up" if options.made_up else f"_{options.name}")


def tables(summary: dict[str, Any]) -> list[Table]:
    shown = {
        name.removeprefix("4 | "): row
        for name, row in summary.items()
        if name.startswith(("4 | ", "planted")) and name.count(" | ") == 1
    }
    return [table_of(shown, "4 ranks", "method", ("copies", "load", "local", "seconds"))]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--name", default="bundled")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--spare", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--brief", action="store_true", help="only in order, METIS together, ours")
    parser.add_argument("--made-up", action="store_true")


CASES = [
    Case(
        "placement",
        "Placements",
        "Copies, load and locality on held-out texts, by placement method.",
        measure,
        tables,
        add_options,
    )
]
