"""Time of experts whose weights stay as a checkpoint stores them, beside float32.

    python -m benchmarks stored_experts                (about 2 minutes)
    python -m benchmarks stored_experts --processor haswell

Variants run in turns. As in a decode step, every expert has its own weights, together larger than
the caches. Decode steps are those of the medium model with random weights, in one process, each
with other tokens. --processor haswell: compiled for AVX2, without instructions for bfloat16.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.random_checkpoint import MEDIUM
from benchmarks.support.random_in_memory import random_halves
from kernels.compiled import processor_name
from kernels.experts import panel_run
from kernels.linear import ExpertLinears, PackedLinear
from kernels.stored import RawWeight, Storage, StoredWeight
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.decoder.layer_decoder import CallOwner, ResidentLayerDecoder
from models.experts.expert_loading import ExpertLayer

D, F, EXPERTS = 512, 256, 256
ROWS = (1, 2, 4, 64)  # of an expert
STREAMS, CONTEXT, BLOCK = (1, 16), 160, 16  # of decode steps; tokens
STEPS = 4  # of a round
HASWELL = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse2,+ssse3,+sse4.1,+sse4.2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
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


def _linears(
    storage: Storage, dtype: torch.dtype, N: int, K: int, count: int = EXPERTS
) -> ExpertLinears:
    if storage is Storage.PLAIN:
        weight_NK = torch.randn(N, K).to(dtype)
        return ExpertLinears([PackedLinear(weight_NK) for _ in range(count)], None)
    stored = _stored(storage, N, K)
    copies = [stored._replace(panels=stored.panels.clone()) for _ in range(count)]
    made = [PackedLinear.of_panels(each, dtype, None) for each in copies]
    return ExpertLinears(made, None)


def _stored(storage: Storage, N: int, K: int) -> StoredWeight:
    if storage is Storage.MXFP4:
        blocks = torch.randint(0, 256, (N, K // 32, 16), dtype=torch.uint8)
        return RawWeight(
            Storage.MXFP4, blocks, torch.full((N, K // 32), 120, dtype=torch.uint8)
        ).packed()
    if storage is Storage.FP8:
        weight = (100 * torch.randn(N, K)).to(torch.float8_e4m3fn)
        return RawWeight(Storage.FP8, weight, torch.rand(N, -(-K // 128))).packed()
    if storage is Storage.INT8:
        weight = torch.randint(-128, 128, (N, K), dtype=torch.int8)
        return RawWeight(Storage.INT8, weight, torch.rand(N, -(-K // 128))).packed()
    return RawWeight(Storage.BFLOAT16, torch.randn(N, K).bfloat16()).packed()


class Decoder:
    """Decode steps of the medium model with experts of one storage."""

    def __init__(self, storage: Storage, half: AttentionHalf) -> None:
        spec, dtype = half.spec, half.dtype
        D, F, E = spec.hidden_size, spec.expert_ffn_size, spec.num_experts
        blocks = -(-(CONTEXT + 1) // BLOCK)
        kv = KvPool(spec, blocks * max(STREAMS), BLOCK, dtype, half.device)
        for layer in range(spec.num_layers):
            for entries in kv.entries(layer):
                entries.normal_()
        layers = {
            layer: ExpertLayer(
                _linears(storage, dtype, 2 * F, D, E), _linears(storage, dtype, D, F, E)
            )
            for layer in spec.moe_layers
        }
        self._half, self._blocks = half, blocks
        self._decoder = ResidentLayerDecoder(half, layers, torch.arange(E), kv)

    def step(self, token_ids: list[int]) -> None:
        half, each = self._half, self._blocks
        rows = [
            SequenceSlice([token], CONTEXT, range(n * each, (n + 1) * each))
            for n, token in enumerate(token_ids)
        ]
        batch = AttentionBatch.build(rows, block_tokens=BLOCK, device=half.device)
        hidden_TD = half.embed(batch)
        whole, owner = (0, half.spec.num_layers), CallOwner(0, 0, 0)
        self._decoder.run(whole, hidden_TD, batch, owner, is_alone=True)
        half.logits(hidden_TD)


def _name(storage: Storage, dtype: torch.dtype) -> str:
    return f"{storage.name.lower()}, {str(dtype)[6:]} rows"


def _decode(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a decode step by number of streams and variant, round by round."""
    device = torch.device("cpu")
    halves = {dtype: random_halves(MEDIUM, dtype, device)[1] for dtype in (FLOAT32, BFLOAT16)}
    decoders = {
        _name(storage, dtype): Decoder(storage, halves[dtype]) for storage, dtype in VARIANTS
    }
    samples: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode():
        for streams in STREAMS:
            times: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 1):  # the first round warms up
                tokens = torch.randint(0, MEDIUM["vocab_size"], (STEPS, streams)).tolist()
                for name, decoder in decoders.items():
                    start_s = time.perf_counter()
                    for token_ids in tokens:
                        decoder.step(token_ids)
                    if number:
                        times[name].append((time.perf_counter() - start_s) / STEPS)
            samples[f"decode of {streams}"] = dict(times)
    return samples


def measure(options: argparse.Namespace) -> Measured:
    if options.processor and processor_name() != options.processor:
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **HASWELL})
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    variants = {
        _name(storage, dtype): (
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
    del variants
    samples |= _decode(options.rounds)
    summary = {rows: _medians(times) for rows, times in samples.items()}
    settings = {
        "D": D,
        "F": F,
        "experts": EXPERTS,
        "context": CONTEXT,
        "compiled": processor_name(),
    }
    return Measured(samples, summary, settings, f"_{options.processor}" * bool(options.processor))


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
    counts = (f"{count} rows" if count.isdigit() else count for count in summary)
    title = "ms of all experts by rows of an expert, of a step by streams (speed beside float32)"
    return [Table(title, ["storage", *counts], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processor", choices=["haswell"], help="that code is compiled for")


CASE = documented_case(__doc__, "Weights as stored", measure, tables, add_options)
