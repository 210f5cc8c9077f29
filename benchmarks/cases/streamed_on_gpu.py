"""Prefill with experts streamed from host memory beside resident experts on one GPU.

Qwen3-30B-A3B's shape with random bfloat16 weights: tokens/s, what the copies cost, and the share
of the GPU's GEMM rate.

    python -m benchmarks streamed_on_gpu                               one GPU of 80 GiB or more
    python -m benchmarks streamed_on_gpu --device cpu --shape small    the same way, in seconds

Nothing is written to the disk but the result: weights are made on the device. Both variants are the
prefill executor with its store, on the same attention weights, in turns; the streamed one has layer
0 and two buffers of experts on the device, all else in pinned memory. Points are batches, as
fractions of the threshold that the streamed worker's own calibration gives.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.finisher import Finisher
from actors.batching.sequence import Sequence
from actors.engine.executor import Executor, ExecutorParts
from actors.gather.stored_backend import StoredBackend
from actors.planning.calibration import calibrate, product_flops_per_s
from actors.planning.planner_inputs import shape_of
from actors.ranks.prefill_rank import time_layers
from actors.telemetry.telemetry import Timeline
from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.support.gpu_rates import (
    add_device_options,
    add_run_options,
    copy_bytes_per_s,
    peak_bytes,
)
from benchmarks.support.random_in_memory import SHAPES, RandomModel, random_model
from benchmarks.support.streamed_report import summarise
from contracts.clock import monotonic_s
from contracts.messages import Scored, Submit
from contracts.plan import Plan
from contracts.requests import Priority
from models.decoder.attention import KvPool
from models.decoder.batch import SequenceSlice
from models.experts.copying_store import CopyingStore
from planner.routing.open_requests import flops_work
from planner.routing.worker_state import SaturationConfig, threshold

BLOCK_TOKENS = 16
REFERENCE_TOKENS = 65_536  # of the calibration
CHECKED_ROWS = 4
CANDIDATES = 8
DEADLINE_S = 60.0


class Turn(NamedTuple):
    """One variant's passes over a batch of `tokens`, one after another. pass_s: of each, but for
    the first. copied_s, waited_s: of those."""

    tokens: int
    pass_s: list[float]
    copied_s: float
    waited_s: float
    peak_bytes: int


class Worker:
    """A prefill executor over one store. Pools and attention weights may be shared: workers take
    turns."""

    def __init__(self, name: str, model: RandomModel, kv: KvPool, store: CopyingStore) -> None:
        self._vocab = model.layout.spec.vocab_size
        longest = model.layout.spec.max_context_tokens
        self._finisher = Finisher(model.attention, max_context_tokens=longest)
        timeline = Timeline(0)
        backend = StoredBackend(name, model.attention, store, timeline)
        self._parts = ExecutorParts(
            name, model.attention, kv, backend, self._finisher, timeline, monotonic_s
        )
        self.executor = Executor(
            self._parts, chunk_cost=lambda start, stop: float(stop - start), last_rows_only=True
        )
        self._numbers = itertools.count()

    def logits(self, rows: list[list[int]]) -> list[list[float]]:
        """Of the candidates, after each row."""
        chunks, first = [], 0
        for number, row in enumerate(rows):
            submit = Submit(
                request_id=number, token_ids=row, sampling=None, candidates=list(range(CANDIDATES))
            )
            sequence = Sequence((0, number), submit, BLOCK_TOKENS)
            sequence.block_table = list(range(first, first + sequence.blocks_for(len(row))))
            first += len(sequence.block_table)
            chunks.append(Chunk(sequence, 0, len(row), frozenset()))
        self.executor.submit(ScheduledBatch(next(self._numbers), Priority.LS, chunks), Plan())
        while not self.executor.step(0.0):
            if self.executor.failure is not None:
                raise self.executor.failure
        answers, self._finisher.answers = self._finisher.answers, []
        return [_candidates(answer) for _, answer in answers]

    def time_layers(self, lengths: Any) -> list[float]:
        slices, first = [], 0
        for ids in random_rows(lengths, self._vocab, seed=0):
            last = first + -(-len(ids) // BLOCK_TOKENS)
            slices.append(SequenceSlice(ids, 0, range(first, last)))
            first = last
        return time_layers(self._parts, slices)


def _candidates(answer: object) -> list[float]:
    assert isinstance(answer, Scored)
    assert answer.candidate_logits is not None
    return answer.candidate_logits


class Bench:
    """The model with both workers; and rows for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device, self.dtype = torch.device(options.device), getattr(torch, options.dtype)
        self.config = dict(SHAPES[options.shape])
        self.config["num_hidden_layers"] = options.layers or self.config["num_hidden_layers"]
        self.model = random_model(self.config, self.dtype, self.device)
        self.spec = self.model.layout.spec
        self.most_rows = max(1, options.max_tokens // options.row_tokens)
        blocks = (self.most_rows + 1) * -(-options.row_tokens // BLOCK_TOKENS) + 1
        kv = KvPool(self.spec, blocks, BLOCK_TOKENS, self.dtype, self.device, one_layer=True)
        self.copying = CopyingStore(
            self.model.host,
            {self.spec.moe_layers[0]: self.model.experts.layer_experts(self.spec.moe_layers[0])},
            self.model.layout,
            deadline_s=DEADLINE_S,
        )
        resident = CopyingStore(
            None, self.model.experts.layers(), self.model.layout, deadline_s=DEADLINE_S
        )
        self.workers = {
            "resident": Worker("resident", self.model, kv, resident),
            "streamed": Worker("streamed", self.model, kv, self.copying),
        }
        self.layer_bytes = self.model.layout.num_bytes(self.spec.num_experts)
        self.work = flops_work(shape_of(self.spec, self.dtype.itemsize))

    def rows(self, tokens: int, *, seed: int) -> list[list[int]]:
        """Of `row_tokens` each, in all about `tokens`; at least one, at most `most_rows`."""
        length = self.options.row_tokens
        count = min(self.most_rows, max(1, round(tokens / length)))
        return random_rows([length] * count, self.spec.vocab_size, seed)

    def check(self) -> None:
        """Outputs before times: equal bits."""
        rows = self.rows(CHECKED_ROWS * self.options.row_tokens, seed=99)
        found = {name: worker.logits(rows) for name, worker in self.workers.items()}
        assert found["streamed"] == found["resident"], "streamed logits differ from resident ones"
        assert all(abs(value) < 1e4 for row in found["resident"] for value in row)  # no NaN

    def threshold_flops(self) -> int:
        """As a streamed worker gives it to its router (Eq. 3), without the margin."""
        reference = min(self.options.max_tokens, REFERENCE_TOKENS)
        calibration, _ = calibrate(
            self.workers["streamed"].time_layers,
            max_tokens=reference,
            context_tokens=self.options.row_tokens,
        )
        config = SaturationConfig(fallback_prompts=(), margin_fraction=0.0)
        return threshold(config, self.work, calibration)

    def turn(self, name: str, rows: list[list[int]], passes: int) -> Turn:
        """The first pass finds what was copied while the other variant ran; it does not count."""
        worker, times, before = self.workers[name], [], (0.0, 0.0)
        for number in range(passes + 1):
            if number == 1:
                before = self.copying.copied_s, self.copying.waited_s
            start_s = time.monotonic()
            worker.logits(rows)
            times.append(time.monotonic() - start_s)
        return Turn(
            sum(map(len, rows)),
            times[1:],
            self.copying.copied_s - before[0],
            self.copying.waited_s - before[1],
            peak_bytes(self.device),
        )

    def close(self) -> None:
        self.copying.close()


def random_rows(lengths: Any, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def _points(options: argparse.Namespace, threshold_tokens: int) -> Iterator[int]:
    if options.tokens:
        yield from options.tokens
        return
    for fraction in options.points:
        yield min(options.max_tokens, round(fraction * threshold_tokens))


def _rounds(
    bench: Bench, points: list[int], started_s: float
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By batch and variant. Round 0 warms up; who begins takes turns. Ends in time, with at least
    one round."""
    options = bench.options
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number in range(options.rounds + 1):
        for tokens in points:
            rows = bench.rows(tokens, seed=number)
            by_variant = samples.setdefault(
                str(sum(map(len, rows))), {name: [] for name in bench.workers}
            )
            for name in sorted(bench.workers, reverse=bool(number % 2)):
                turn = bench.turn(name, rows, options.passes if number else 0)
                if number:
                    by_variant[name].append(turn._asdict())
        print(f"round {number} of {options.rounds} done", flush=True)
        if number and time.monotonic() - started_s > options.limit_s:
            break
    return samples


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device_options(parser, rounds=5)
    add_run_options(parser, limit_s=420.0)
    add, there = parser.add_argument, torch.cuda.is_available()
    add("--row-tokens", type=int, default=512)
    add("--max-tokens", type=int, default=196_608 if there else 4096, help="of a batch")
    add("--points", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0, 1.1, 1.25, 1.5])
    add("--tokens", type=int, nargs="+", help="batches, in the place of points")
    add("--passes", type=int, default=2, help="that count, of a turn")


def measure(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads or torch.get_num_threads())
    with torch.inference_mode():
        return _measure(options)


def _measure(options: argparse.Namespace) -> Measured:
    started_s = time.monotonic()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    rates = {
        "gemm_flops_per_s": product_flops_per_s(dtype, device, monotonic_s, rounds=10, products=8)
    }
    bench = Bench(options)
    try:
        print(f"model made after {time.monotonic() - started_s:.0f} s", flush=True)
        rates["copy_bytes_per_s"] = copy_bytes_per_s(bench.model.host, bench.model.layout)
        bench.check()
        print("logits: streamed equals resident bit for bit", flush=True)
        threshold = bench.threshold_flops()
        row_flops = bench.work(0, options.row_tokens)
        tokens = round(options.row_tokens * threshold / row_flops)
        samples = _rounds(bench, list(_points(options, tokens)), started_s)
    finally:
        bench.close()
    facts = {"calibrated_flops": threshold, "layer_bytes": bench.layer_bytes, **rates}
    summary = summarise(samples, facts, bench.spec, dtype, options.row_tokens)
    return Measured({"turns": samples}, summary, {"model_config": bench.config})


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for tokens, point in summary["points"].items():
        resident, streamed = point["resident"], point["streamed"]
        hidden = point["hidden_fraction"]
        rows.append(
            [
                tokens,
                *(f"{row['tokens_per_s']:,.0f}" for row in (resident, streamed)),
                f"{point['of_resident']:.3f}",
                "" if hidden is None else f"{hidden:.1%}",
                *(f"{row['flops_utilization']:.1%}" for row in (resident, streamed)),
            ]
        )
    columns = ["tokens", "resident tokens/s", "streamed tokens/s", "ratio", "hidden"]
    columns += ["resident MFU", "streamed MFU"]
    return [
        Table("", columns, rows),
        table_of({"threshold": summary["threshold"], "peak bytes": summary["peak_bytes"]}),
    ]


CASE = documented_case(
    __doc__, "Prefill with streamed experts on one GPU", measure, tables, add_options
)
