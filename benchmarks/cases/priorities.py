"""LS requests beside BE requests on one attention and one expert rank, variants in turns."""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness import Case, Measured, Table, table_of
from benchmarks.priorities import group, mix, paper


def _measure(
    run: Callable[[argparse.Namespace], Awaitable[dict[str, Any]]],
    summary: Callable[[dict[str, Any]], dict[str, Any]],
    options: argparse.Namespace,
) -> Measured:
    async def samples() -> dict[str, Any]:
        return await run(options)

    found = asyncio.run(samples())
    return Measured(found, summary(found), {"model_config": group.MODELS[options.model]})


def _tables(columns: tuple[str, ...], summary: dict[str, Any]) -> list[Table]:
    return [table_of(summary, "", "variant", columns)]


MIX_COLUMNS = ("ttft_ms", "ttft_p99_ms", "tbt_p99_ms", "be_tokens_per_s")
PAPER_COLUMNS = ("ls_ttft_ms", "ls_ttft_p99_ms", "ls_turnaround_s", "be_turnaround_s", "jobs_per_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a variant in a round")
    parser.add_argument("--model", choices=group.MODELS, default="medium")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", default="", help="variants whose name contains this|or this")
    parser.add_argument("--load", default="", help="mix, paper: this alone, as '1 out'")
    parser.add_argument(
        "--capacities",
        type=float,
        nargs="*",
        default=[],
        help="paper: jobs/s of run to completion and of iteration FCFS, if known",
    )
    parser.add_argument("--budgets", type=int, nargs="*", default=list(mix.BUDGETS))


CASES = [
    Case(
        "priorities_mix",
        "LS beside a constant BE load",
        "Latency of LS requests beside 16 open BE prompts, by batching policy.",
        functools.partial(_measure, mix.run, mix.summary),
        functools.partial(_tables, MIX_COLUMNS),
        add_options,
    ),
    Case(
        "priorities_paper",
        "LS and BE chats by arrival rate",
        "Chats of both classes at fractions of the capacity of continuous batching (QLLM, "
        "Figures 2 to 4).",
        functools.partial(_measure, paper.run, paper.summary),
        functools.partial(_tables, PAPER_COLUMNS),
        add_options,
    ),
]
