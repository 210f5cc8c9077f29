"""Triton kernels for few tokens with experts in slots, beside torch and the memory rate.

Beside a product of torch for each expert, and torch's grouped product over a whole layer.

    python -m benchmarks slot_kernels                               one GPU
    python -m benchmarks slot_kernels --device cpu --shape small    the same way, without triton

Weights are random, of a layer of Qwen3-30B-A3B; each turn wants other experts, so that none is in
the cache of the processor. Fractions are of the memory's rate, measured here: that is the bound.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.support.gpu_rates import add_device_options, memory_bytes_per_s
from benchmarks.support.random_in_memory import SHAPES
from kernels.device import wait_for_device
from kernels.experts import gated
from kernels.gpu_experts import gpu_experts, slot_experts
from kernels.linear import ExpertLinears, plain_linears

Way = Callable[[Tensor, Tensor, list[int]], Tensor]
"""x [T, D], ids [T, K], the same on the host [T * K] → [T * K, D], or the sums [T, D]."""


def ways(gate_up: ExpertLinears, down: ExpertLinears) -> dict[str, Way]:
    """By name."""

    def in_slots(x_TD: Tensor, ids_TK: Tensor, ids_N: list[int]) -> Tensor:
        y_ND = torch.empty(ids_TK.numel(), x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
        slot_experts(x_TD, ids_TK.int(), gate_up, down, y_ND)
        return y_ND

    def one_by_one(x_TD: Tensor, ids_TK: Tensor, ids_N: list[int]) -> Tensor:
        K, rows = ids_TK.shape[1], []
        for n, expert in enumerate(ids_N):
            x_1D = x_TD[n // K : n // K + 1]
            rows.append(down[expert](gated(gate_up[expert](x_1D))))
        return torch.cat(rows)

    def grouped(x_TD: Tensor, ids_TK: Tensor, ids_N: list[int]) -> Tensor:
        weights_TK = torch.ones(ids_TK.shape, device=x_TD.device)
        return gpu_experts(x_TD, ids_TK, weights_TK, gate_up, down)

    return {"in slots": in_slots, "one by one": one_by_one, "grouped": grouped}


def times_us(given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Microseconds per layer, by tokens and way."""
    shape, device = SHAPES[given.shape], torch.device(given.device)
    D, F = shape["hidden_size"], shape["moe_intermediate_size"]
    E, K, dtype = shape["num_experts"], shape["num_experts_per_tok"], getattr(torch, given.dtype)
    torch.manual_seed(0)
    gate_up, down = (
        plain_linears(torch.randn(E, *s, dtype=dtype, device=device) * s[1] ** -0.5)
        for s in ((2 * F, D), (D, F))
    )
    by_way, found = ways(gate_up, down), dict[str, dict[str, list[float]]]()
    for tokens in given.tokens:
        samples = found[str(tokens)] = {name: list[float]() for name in by_way}
        for number in range(given.rounds + 1):
            x_TD = torch.randn(tokens, D, dtype=dtype, device=device)
            ids_TK = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]).to(device)
            _check(by_way, x_TD, ids_TK)
            wanted = [(ids_TK + turn * K) % E for turn in range(given.turns)]
            listed = [each.flatten().tolist() for each in wanted]
            for name in sorted(by_way, reverse=bool(number % 2)):
                wait_for_device(device)
                start_s = time.perf_counter()
                for turn_TK, turn_N in zip(wanted, listed, strict=True):
                    by_way[name](x_TD, turn_TK, turn_N)
                wait_for_device(device)
                if number:
                    samples[name].append(1e6 * (time.perf_counter() - start_s) / given.turns)
    return found


def _check(by_way: dict[str, Way], x_TD: Tensor, ids_TK: Tensor) -> None:
    """Outputs before times."""
    ids_N = ids_TK.flatten().tolist()
    rows_ND, others_ND = (by_way[name](x_TD, ids_TK, ids_N) for name in ("in slots", "one by one"))
    torch.testing.assert_close(rows_ND, others_ND, atol=5e-2, rtol=5e-2)
    sums_TD = others_ND.float().view(*ids_TK.shape, -1).sum(1)
    torch.testing.assert_close(by_way["grouped"](x_TD, ids_TK, ids_N), sums_TD, atol=0.2, rtol=5e-2)


def summarise(
    found: dict[str, dict[str, list[float]]], given: argparse.Namespace
) -> dict[str, Any]:
    """Of the memory's rate: as if each expert that some token wants were read once."""
    shape, rate = SHAPES[given.shape], memory_bytes_per_s(torch.device(given.device))
    itemsize = getattr(torch, given.dtype).itemsize
    expert_bytes = 3 * shape["hidden_size"] * shape["moe_intermediate_size"] * itemsize
    rows: dict[str, Any] = {"memory_bytes_per_s": rate, "expert_bytes": expert_bytes}
    for tokens, by_way in found.items():
        experts = shape["num_experts"]
        unwanted = (1 - shape["num_experts_per_tok"] / experts) ** int(tokens)
        wanted = experts * (1 - unwanted)  # where routing is even
        for name, us in by_way.items():
            median = statistics.median(us)
            rows[f"{tokens} tokens, {name}"] = {
                "us": median,
                "of_memory_rate": wanted * expert_bytes / (1e-6 * median) / rate,
            }
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device_options(parser, rounds=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=int, default=8, help="layers of a sample")


def measure(given: argparse.Namespace) -> Measured:
    with torch.inference_mode():
        found = times_us(given)
        summary = summarise(found, given)
    return Measured({"us": found}, summary, {"shape": SHAPES[given.shape]})


def tables(summary: dict[str, Any]) -> list[Table]:
    title = f"memory: {summary['memory_bytes_per_s'] / 1e9:.1f} GB/s"
    return [table_of(summary, title, "tokens, kernel")]


CASE = documented_case(__doc__, "Experts in slots on one GPU", measure, tables, add_options)
