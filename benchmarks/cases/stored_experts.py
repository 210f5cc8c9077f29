"""Time of experts by the storage of their weights, for few rows each, variants in turns.

    python -m benchmarks stored_experts

As in a decode step: every expert has its own weights, together larger than the caches.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Case, Measured, Table
from kernels.experts import panel_run
from kernels.linear import ExpertLinears, PackedLinear
from kernels.stored import Storage, StoredWeight, pack_bfloat16, pack_fp8, pack_int8, pack_mxfp4

D, F, EXPERTS = 512, 256, 256
ROWS = (1, 2, 4, 64)  # of an expert
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
VARIANTS = [
    (Storage.PLAIN, FLOAT32),
    (Storage.BFLOAT16, FLOAT32),
    (Storage.FP8, FLOAT32),
    (Storage.INT8, FLOAT32),
    (Storage.MXFP4, FLOAT32),
    (Storage.PLAIN, BFLOAT16),
    (Storage.FP8, BFLOAT16),
    (Storage.INT8, BFLOAT16),
    (Storage.MXFP4, BFLOAT16),
]


class Experts(NamedTuple):
    gate_up: ExpertLinears
    down: ExpertLinears


def _linears(storage: Storage, dtype: torch.dtype, N: int, K: int) -> ExpertLinears:
    made = []
    for _ in range(EXPERTS):
        if storage is Storage.PLAIN:
            made.append(PackedLinear(torch.randn(N, K).to(dtype)))
        else:
            made.append(PackedLinear.of_panels(_stored(storage, N, K), dtype, None))
    return ExpertLinears(made, None)


def _stored(storage: Storage, N: int, K: int) -> StoredWeight:
    if storage is Storage.MXFP4:
        blocks = torch.randint(0, 256, (N, K // 32, 16), dtype=torch.uint8)
        return pack_mxfp4(blocks, torch.full((N, K // 32), 120, dtype=torch.uint8))
    if storage is Storage.FP8:
        weight = (100 * torch.randn(N, K)).to(torch.float8_e4m3fn)
        return pack_fp8(weight, torch.rand(N, -(-K // 128)))
    if storage is Storage.INT8:
        weight = torch.randint(-128, 128, (N, K), dtype=torch.int8)
        return pack_int8(weight, torch.rand(N, -(-K // 128)))
    return pack_bfloat16(torch.randn(N, K).bfloat16())


def measure(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    variants = {
        f"{storage.name.lower()}, {str(dtype)[6:]} rows": (
            Experts(_linears(storage, dtype, 2 * F, D), _linears(storage, dtype, D, F)),
            torch.randn(16, D).to(dtype),
        )
        for storage, dtype in VARIANTS
    }
    samples: dict[str, dict[str, list[float]]] = {}
    for rows in ROWS:
        times: dict[str, list[float]] = defaultdict(list)
        rows_N, counts = torch.arange(EXPERTS * rows) % 16, [rows] * EXPERTS
        for number in range(options.rounds + 1):  # the first round warms up
            for name, (experts, x_UD) in variants.items():
                start_s = time.perf_counter()
                panel_run(x_UD, *experts, range(EXPERTS), rows_N, counts)
                if number:
                    times[name].append(time.perf_counter() - start_s)
        samples[f"{rows}"] = dict(times)
    summary = {rows: _medians(times) for rows, times in samples.items()}
    return Measured(samples, summary, {"D": D, "F": F, "experts": EXPERTS})


def _medians(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    first = next(iter(times.values()))
    return {
        name: {
            "ms": 1e3 * statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(first, found, strict=True)),
        }
        for name, found in times.items()
    }


def tables(summary: dict[str, Any]) -> list[Table]:
    names = list(next(iter(summary.values())))
    rows = [
        [
            name,
            *(f"{each[name]['ms']:.1f} ({each[name]['ratio']:.2f}x)" for each in summary.values()),
        ]
        for name in names
    ]
    columns = ["storage", *(f"{count} rows" for count in summary)]
    return [Table("ms of all experts (speed beside float32), by rows of an expert", columns, rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=30)


CASES = [
    Case(
        "stored_experts",
        "Weights as stored",
        "Time of experts whose weights stay as a checkpoint stores them, beside float32.",
        measure,
        tables,
        add_options,
    )
]
