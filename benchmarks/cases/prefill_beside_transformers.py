"""Prefill-only rows through two prefill workers and their router beside `transformers` in padded
batches.

The same two cores, checkpoint, rows and dtype, interleaved in one run.

    python -m benchmarks prefill_beside_transformers --data DATA --model medium

`transformers` runs its best: padded batches of rows of similar length on all cores, the last
position's logits alone, with whichever experts, attention and batch size are fastest for the set.
It computes a prefix anew for each row. A round's rows have a token in front that no other round's
have, so that no cache helps from round to round; in sets without prefixes each row has its own.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.planning.planner_inputs import shape_of
from benchmarks.cases.machine import core_rates
from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.others import Others, quietest, wait_for_idle
from benchmarks.support.padded import routing_gap
from benchmarks.support.prefill_rows import PICKS, Rows, read
from benchmarks.support.prefill_sides import (
    MODELS,
    Answer,
    Choice,
    RoutedPrefill,
    TheirPrefill,
    encoder,
    model_folder,
)
from benchmarks.support.sides import IMPLEMENTATIONS, fastest
from contracts.config import TandemConfig
from contracts.loading import load_config
from models.spec.model import read_spec
from planner.routing.open_requests import flops_work
from tests.support.local_group import LocalGroup

BATCH_TOKENS = (1024, 2048, 4096, 8192)
FIRST_TOKENS = 3000  # of rows and of a batch while the implementation is chosen; then
TRIAL_TOKENS = 8192  # while the batch is
QUIET_CORES, IDLE_WAIT_S = 0.15, 2.0
LOGIT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
TIE = 1e-5  # of router logits of which one expert's is above another's
SIDES = ("tandem", "transformers")


class Sample(NamedTuple):
    """One round: seconds by side, what of our prompts was cached, how many cores others kept
    busy."""

    seconds: dict[str, float]
    cached_tokens: int
    flops: int
    others_cores: float


class Bench:
    """Both sides, ready."""

    def __init__(
        self, ours: RoutedPrefill, theirs: TheirPrefill, folder: Path, work: Any, pids: list[int]
    ) -> None:
        self._sides: dict[str, RoutedPrefill | TheirPrefill] = {
            "tandem": ours,
            "transformers": theirs,
        }
        self._theirs = theirs
        self._folder = folder
        self._work = work
        self._pids = pids

    async def choose(self, rows: Rows) -> Choice:
        """Set `transformers` to its fastest: an implementation, then a size of batches."""
        some = rows.sample(FIRST_TOKENS)
        first = [Choice(each, FIRST_TOKENS) for each in IMPLEMENTATIONS]
        best = (await fastest(first, partial(self._seconds, some))).implementation
        some = rows.sample(TRIAL_TOKENS)
        sizes = [Choice(best, batch_tokens) for batch_tokens in BATCH_TOKENS]
        self._theirs.choice = await fastest(sizes, partial(self._seconds, some))
        return self._theirs.choice

    async def _seconds(self, rows: Rows, choice: Choice) -> float:
        self._theirs.choice = choice
        return (await timed(self._theirs, rows))[0]

    async def round(self, rows: Rows, tolerance: float) -> Sample:
        """One run of each side, one after the other. Raises RuntimeError where they disagree."""
        seconds, answers, others_cores = {}, {}, 0.0
        wait_for_idle(self._pids, limit_s=IDLE_WAIT_S, cores=QUIET_CORES)
        for side, runner in self._sides.items():
            others = Others(self._pids)
            seconds[side], answers[side] = await timed(runner, rows)
            others_cores = max(others_cores, others.cores())
        ours, theirs = (answers[side] for side in SIDES)
        self._check(rows, (ours.logits - theirs.logits).abs().amax(1), tolerance)
        pairs = zip(ours.cached_tokens, rows.token_ids, strict=True)
        flops = sum(self._work(cached, len(ids)) for cached, ids in pairs)
        return Sample(seconds, sum(ours.cached_tokens), flops, others_cores)

    def _check(self, rows: Rows, differences: Tensor, tolerance: float) -> None:
        """Rows may differ by more than `tolerance` only where routing is a tie but for rounding."""
        for row in (~(differences <= tolerance)).nonzero().flatten().tolist():
            gap = routing_gap(self._folder, rows.token_ids[row])
            message = f"row {row}: logits differ by {differences[row]:.3g}, routing gap {gap:.3g}"
            print(message, flush=True)
            if not gap <= TIE:
                raise RuntimeError(f"{message}; at most {tolerance:g}, or a gap below {TIE:g}")


async def timed(side: RoutedPrefill | TheirPrefill, rows: Rows) -> tuple[float, Answer]:
    started_s = time.monotonic()
    answer = await side.run(rows)
    return time.monotonic() - started_s, answer


def _config(options: argparse.Namespace) -> TandemConfig:
    workers = [
        "groups.attention_ranks=0",
        "groups.expert_ranks=0",
        f"groups.prefill_ranks={options.workers}",
    ]
    return load_config(None, [*workers, f"model.dtype={options.dtype}"])


async def _measure(
    group: LocalGroup,
    folder: Path,
    works: dict[str, Rows],
    config: TandemConfig,
    options: argparse.Namespace,
) -> dict[str, tuple[list[Sample], str]]:
    """Per set: the rounds, and what `transformers` ran."""
    dtype = getattr(torch, options.dtype)
    ours, theirs = RoutedPrefill(group, folder, config, dtype), TheirPrefill(folder, dtype)
    await ours.start()
    pids = [os.getpid(), *(process.pid for process in group.processes.values())]
    bench = Bench(
        ours, theirs, folder, flops_work(shape_of(read_spec(folder), dtype.itemsize)), pids
    )
    results, used = {}, 0
    for name, rows in works.items():
        choice, samples = await bench.choose(rows), list[Sample]()
        for number in range(options.rounds + 1):  # the first round warms up, and checks
            used += 1
            fresh = rows.behind(used, apart=PICKS[name].rows > 0)
            sample = await bench.round(fresh, LOGIT_TOLERANCE[options.dtype])
            print(name, {side: f"{s:.2f} s" for side, s in sample.seconds.items()}, flush=True)
            if number:
                samples.append(sample)
        results[name] = samples, choice.label
    await ours.close()
    return results


def _summary(rows: Rows, samples: list[Sample], choice: str, rates: Any) -> dict[str, Any]:
    counted = quietest(samples, QUIET_CORES)
    ratios = sorted(s.seconds["transformers"] / s.seconds["tandem"] for s in counted)
    tokens = rows.tokens + len(rows.token_ids)
    medians = {
        side: tokens / statistics.median(sample.seconds[side] for sample in counted)
        for side in SIDES
    }
    reached = [sample.flops / sample.seconds["tandem"] for sample in counted]
    best = rates.flops_per_s * (os.cpu_count() or 1)
    return {
        "rows": len(rows.token_ids),
        "tokens": tokens,
        "cached_fraction": statistics.median(s.cached_tokens for s in counted) / tokens,
        "tokens_per_s": medians,
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "gemm_rate_fraction": statistics.median(reached) / best,
        "transformers_ran": choice,
        "rounds_counted": len(counted),
        "others_cores_most": max(sample.others_cores for sample in counted),
    }


def measure(options: argparse.Namespace) -> Measured:
    rates = core_rates(getattr(torch, options.dtype))
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        folder = model_folder(options.model, options.data, Path(scratch) / "model")
        context, encode = read_spec(folder).max_context_tokens, encoder(folder)
        found = {name: read(PICKS[name], options.data, encode, context) for name in options.sets}
        works = {name: rows for name, rows in found.items() if rows is not None}
        config = _config(options)
        with LocalGroup(str(folder), config) as group:
            if os.cpu_count() == 2:
                for core, process in enumerate(group.processes.values()):
                    os.sched_setaffinity(process.pid, {core})
            results = asyncio.run(_measure(group, folder, works, config, options))
    sets = {name: _summary(works[name], *result, rates) for name, result in results.items()}
    samples = {name: [sample._asdict() for sample in result[0]] for name, result in results.items()}
    return Measured(
        samples,
        {"sets": sets, "one_core": rates._asdict()},
        {"model_config": MODELS[options.model], "left_out": sorted(found.keys() - works.keys())},
        f"_{options.model}_{options.dtype}",
    )


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for name, row in summary["sets"].items():
        ratios, rates = row["ratios"], row["tokens_per_s"]
        rows.append(
            [
                name,
                str(row["tokens"]),
                f"{row['cached_fraction']:.0%}",
                f"{rates['tandem']:.0f}",
                f"{rates['transformers']:.0f}",
                f"{row['ratio_median']:.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})",
                f"{row['gemm_rate_fraction']:.0%}",
            ]
        )
    columns = ["set", "tokens", "cached", *SIDES, "ratio (worst, best)", "of GEMM rate"]
    return [Table("Prompt tokens/s, medians", columns, rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder with classification/")
    parser.add_argument("--model", choices=MODELS, default="medium")
    parser.add_argument("--sets", nargs="+", choices=PICKS, default=list(PICKS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


CASE = documented_case(__doc__, "Prefill-only beside transformers", measure, tables, add_options)
