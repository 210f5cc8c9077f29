"""Norms, rotary embedding, pool writes and routing of the CPU, compiled.

Each row is computed by itself in a fixed order, so its bits do not depend on the batch. Numbers are
float32 or bfloat16 (`wide` False), and computed in float32.

Shapes: T rows, D model dim, H heads, d head dim, E experts, N (token, expert) pairs.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from kernels.compiled import (
    I64,
    LANES,
    VECTOR,
    compiled,
    copy_bits,
    emit_loop,
    exp,
    float32_at,
    float_of_bits,
    folded,
    int64_at,
    intrinsic,
    pointer,
    read_numbers,
    rounded_number,
    vector_function,
    write_numbers,
)

COMPILED_DTYPES: Final = (torch.float32, torch.bfloat16)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LEAST, _SMALL = np.float32(-np.inf), np.float32(1e-20)


def is_compiled(x: Tensor) -> bool:
    """Return whether compiled code can read a tensor."""
    return x.is_cpu and x.dtype in COMPILED_DTYPES and x.is_contiguous()


@intrinsic
def _dot(_: Any, x: Any, y: Any, vectors: Any) -> Any:
    """Sum of x * y over vectors of 16: lane by lane, then pairwise."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        x, y, vectors = args
        fma = vector_function(builder, f"llvm.fma.v{LANES}f32", VECTOR)

        def step(number: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(number, I64(4 * LANES))
            places = (pointer(builder, builder.add(each, offset), VECTOR) for each in (x, y))
            return [builder.call(fma, [*(builder.load(at, align=4) for at in places), *sums])]

        (summed,) = emit_loop(builder, vectors, [VECTOR([0.0] * LANES)], step)
        return folded(builder, summed, builder.fadd)

    return types.float32(types.int64, types.int64, types.int64), generate


@compiled
def sum_of_products(x: Any, y: Any, count: int) -> Any:
    """Return the sum of products of the first numbers of two float32 arrays."""
    whole = count // LANES
    total = _dot(x.ctypes.data, y.ctypes.data, whole) if whole else _ZERO
    for i in range(whole * LANES, count):
        total += x[i] * y[i]
    return total


@compiled
def _norm(wide: bool, x: Any, D: int, weight: Any, eps: Any, once: bool) -> None:
    """Scale x [D] to the norm in place; bfloat16 rounds after the division unless `once`."""
    mean = sum_of_products(x, x, D) / np.float32(D)
    scale = _ONE / np.sqrt(mean + eps)
    if wide or once:
        for i in range(D):
            x[i] = x[i] * scale * weight[i]
    else:
        for i in range(D):
            x[i] = rounded_number(False, x[i] * scale) * weight[i]


@compiled
def rms_norm(
    wide: bool, x: int, stride: int, weight: int, out: int, T: int, D: int, eps: float, once: bool
) -> None:
    """Write the RMS norm of rows of D elements, `stride` apart in x and `out` (may be the same)."""
    size = 4 if wide else 2
    row, weight_D = np.empty(D, np.float32), np.empty(D, np.float32)
    read_numbers(wide, weight, D, weight_D)
    for t in range(T):
        read_numbers(wide, x + t * stride * size, D, row)
        _norm(wide, row, D, weight_D, np.float32(eps), once)
        write_numbers(wide, out + t * stride * size, D, row)


@compiled
def layer_norm(
    wide: bool, x: int, stride: int, weight: int, out: int, T: int, D: int, eps: float
) -> None:
    """Write the LayerNorm of rows, as `rms_norm`. weight: address of weight and bias [2, D]."""
    size, ones = 4 if wide else 2, np.ones(D, np.float32)
    row, weight_D, bias_D = ones.copy(), ones.copy(), ones.copy()
    read_numbers(wide, weight, D, weight_D)
    read_numbers(wide, weight + D * size, D, bias_D)
    for t in range(T):
        read_numbers(wide, x + t * stride * size, D, row)
        mean = sum_of_products(row, ones, D) / np.float32(D)
        for i in range(D):
            row[i] -= mean
        variance = sum_of_products(row, row, D) / np.float32(D)
        scale = _ONE / np.sqrt(variance + np.float32(eps))
        for i in range(D):
            row[i] = row[i] * scale * weight_D[i] + bias_D[i]
        write_numbers(wide, out + t * stride * size, D, row)


RMS_NORM, RMS_NORM_ONCE, LAYER_NORM = 0, 1, 2


@compiled
def norm_rows(
    wide: bool, kind: int, x: int, stride: int, weight: int, out: int, T: int, D: int, eps: float
) -> None:
    """Write the norm of a kind of rows (`rms_norm`, `layer_norm`)."""
    if kind == LAYER_NORM:
        layer_norm(wide, x, stride, weight, out, T, D, eps)
    else:
        rms_norm(wide, x, stride, weight, out, T, D, eps, kind == RMS_NORM_ONCE)


@compiled
def norm_and_rope(
    wide: bool, x: int, x_stride: int, x_head: int, weight: int, cos: int, sin: int, out: int,
    out_stride: int, out_head: int, T: int, H: int, d: int, eps: float,
) -> None:  # fmt: skip
    """Write each head of [T, H, d], normed by weight [H, d] (address 0: not), then rotated.

    Elements between rows and between heads: x_stride, x_head, out_stride, out_head. cos, sin:
    [T, d / 2].
    """
    size, half = 4 if wide else 2, d // 2
    head = np.empty(d, np.float32)
    turned = np.empty(d, np.float32)
    cos_half, sin_half = np.empty(half, np.float32), np.empty(half, np.float32)
    weight_Hd = np.empty((H if weight else 0, d), np.float32)
    for h in range(weight_Hd.shape[0]):
        read_numbers(wide, weight + h * d * size, d, weight_Hd[h])
    for t in range(T):
        read_numbers(wide, cos + t * half * size, half, cos_half)
        read_numbers(wide, sin + t * half * size, half, sin_half)
        for h in range(H):
            read_numbers(wide, x + (t * x_stride + h * x_head) * size, d, head)
            if weight:
                _norm(wide, head, d, weight_Hd[h], np.float32(eps), False)
                for i in range(d):
                    head[i] = rounded_number(wide, head[i])
            for i in range(half):
                turned[i] = head[i] * cos_half[i] - head[half + i] * sin_half[i]
                turned[half + i] = head[half + i] * cos_half[i] + head[i] * sin_half[i]
            write_numbers(wide, out + (t * out_stride + h * out_head) * size, d, turned)


@compiled
def write_rows(size: int, x: int, x_stride: int, slots: int, pool: int, T: int, width: int) -> None:
    """Copy rows of `width` elements of `size` 2 or 4 bytes to pool slots int64 [T]."""
    slots_T = carray(int64_at(slots), (T,))
    for t in range(T):
        source, target = x + t * x_stride * size, pool + slots_T[t] * width * size
        copy_bits(source, width * size // 2, target)


@compiled
def clip(wide: bool, x: int, count: int, limit: float) -> None:
    """Limit numbers to -limit .. limit."""
    numbers, most = np.empty(count, np.float32), np.float32(limit)
    read_numbers(wide, x, count, numbers)
    for i in range(count):
        numbers[i] = min(max(numbers[i], -most), most)
    write_numbers(wide, x, count, numbers)


@compiled
def scale_rows(
    wide: bool, x: int, x_stride: int, factors: int, out: int, stride: int, T: int, D: int
) -> None:
    """Write rows of D elements times their float32 factors [T]; `out` may be x."""
    size, row = 4 if wide else 2, np.empty(D, np.float32)
    factors_T = carray(float32_at(factors), (T,))
    for t in range(T):
        read_numbers(wide, x + t * x_stride * size, D, row)
        for i in range(D):
            row[i] *= factors_T[t]
        write_numbers(wide, out + t * stride * size, D, row)


@compiled
def sigmoid(x: int, count: int) -> None:
    """Replace float32 numbers; torch's bits depend on a number's distance from the last one."""
    numbers = carray(float32_at(x), (count,))
    for i in range(count):
        numbers[i] = _ONE / (_ONE + exp(-numbers[i]))


@compiled
def gate_rows(wide: bool, gates: int, out: int, count: int) -> None:
    """Multiply numbers by the sigmoids of gates."""
    gate, numbers = np.empty(count, np.float32), np.empty(count, np.float32)
    read_numbers(wide, gates, count, gate)
    read_numbers(wide, out, count, numbers)
    sigmoid(gate.ctypes.data, count)
    for i in range(count):
        numbers[i] *= rounded_number(wide, gate[i])
    write_numbers(wide, out, count, numbers)


@compiled
def group_pairs(
    ids: int, weights: int, local: int, N: int, top_k: int, e: int, rows: int, sorted: int,
    counts: int,
) -> None:  # fmt: skip
    """Sort (token, expert) pairs of local experts by expert, then by token.

    ids int64, weights float32 [N = T * top_k]; local int64 [E]: `e` for experts that are not local.
    Writes rows int64, sorted weights float32 and counts int64 [e].
    """
    ids_N, local_E = carray(int64_at(ids), (N,)), carray(int64_at(local), (1 << 20,))
    weights_N, rows_N = carray(float32_at(weights), (N,)), carray(int64_at(rows), (N,))
    sorted_N, counts_e = carray(float32_at(sorted), (N,)), carray(int64_at(counts), (e,))
    next_e = np.zeros(e + 1, np.int64)
    for n in range(N):
        next_e[local_E[ids_N[n]]] += 1
    first = 0
    for expert in range(e):
        counts_e[expert] = next_e[expert]
        next_e[expert], first = first, first + next_e[expert]
    for n in range(N):
        expert = local_E[ids_N[n]]
        if expert < e:
            place = next_e[expert]
            next_e[expert] = place + 1
            rows_N[place] = n // top_k
            sorted_N[place] = weights_N[n]


RULE_FIELDS: Final = 9
SOFTMAX, SIGMOID, SPARSEMIXER = 0, 1, 2  # scores


@compiled
def choose_experts(
    wide: bool, rule: int, logits: int, T: int, top_k: int, given: bool, ids: int, weights: int
) -> None:
    """Write the best experts of each row of logits [T, E]: ids int64, weights float32 [T, top_k].

    given: read ids instead. Of equal experts the first one is taken. rule: int64 fields of
    `RoutingRule` (kernels/experts.py): E, kind of scores, whether weights of a row sum to 1, and
    are rounded as logits are; address of the bias (0: none); groups, number of them that are kept,
    and of a group's best experts; bits of scale, or of SPARSEMIXER's jitter.
    """
    E, score, normalizes, rounds, bias, groups, kept, best, scale_bits = carray(
        int64_at(rule), (RULE_FIELDS,)
    )
    size, scale = 4 if wide else 2, np.float32(float_of_bits(scale_bits))
    row, choice, bias_E = np.empty(E, np.float32), np.empty(E, np.float32), np.zeros(E, np.float32)
    if bias:
        read_numbers(True, bias, E, bias_E)
    for t in range(T):
        read_numbers(wide, logits + t * E * size, E, row)
        chosen = carray(int64_at(ids + t * top_k * 8), (top_k,))
        weights_K = carray(float32_at(weights + t * top_k * 4), (top_k,))
        for e in range(E):
            choice[e] = row[e]
        if score == SPARSEMIXER:
            if not given:
                _choose_largest(choice, top_k, chosen)
            _mix(wide, row, choice, chosen, weights_K, scale)
            continue
        if score == SIGMOID:
            for e in range(E):
                row[e] = _ONE / (_ONE + exp(-row[e]))
        else:
            _softmax(row)
        if bias or best > 1:  # otherwise logits have the order of scores, with fewer equal ones
            for e in range(E):
                choice[e] = row[e] + bias_E[e]
        if not given:
            if kept < groups:
                _drop_groups(choice, groups, kept, best)
            _choose_largest(choice, top_k, chosen)
        total = _ZERO
        for k in range(top_k):
            weights_K[k] = row[chosen[k]]
            total += weights_K[k]
        for k in range(top_k):
            if normalizes:
                weights_K[k] /= total + _SMALL
            if rounds:
                weights_K[k] = rounded_number(wide, weights_K[k])
            weights_K[k] *= scale


@compiled
def _softmax(row: Any) -> None:
    largest, total = row[0], _ZERO
    for e in range(row.shape[0]):
        largest = max(largest, row[e])
    for e in range(row.shape[0]):
        row[e] = exp(row[e] - largest)
    for e in range(row.shape[0]):
        total += row[e]
    for e in range(row.shape[0]):
        row[e] /= total


@compiled
def _mix(wide: bool, row: Any, left: Any, chosen: Any, weights_K: Any, jitter: Any) -> None:
    """Write weights of chosen experts (`sparsemixer_weights`). left: a copy of row, changed."""
    E, probs = row.shape[0], np.empty(row.shape[0], np.float32)
    limit = rounded_number(wide, np.float32(2.0) * jitter)
    for k in range(chosen.shape[0]):
        best, total = _LEAST, _ZERO
        for e in range(E):
            best = max(best, left[e])
        for e in range(E):
            distance = rounded_number(wide, best - row[e])
            is_distant = rounded_number(wide, distance / max(abs(row[e]), best)) > limit
            probs[e] = _ZERO if is_distant else exp(left[e] - best)
            if left[e] == _LEAST:
                probs[e] = _ZERO
            total += probs[e]
        weights_K[k] = probs[chosen[k]] / total
        left[chosen[k]] = _LEAST


@compiled
def _drop_groups(choice: Any, groups: int, kept: int, best: int) -> None:
    """Set all but the experts of the groups with the largest sums of their best ones to -inf."""
    size = choice.shape[0] // groups
    sums, chosen = np.zeros(groups, np.float32), np.empty(max(kept, best), np.int64)
    for group in range(groups):
        _choose_largest(choice[group * size : (group + 1) * size], best, chosen)
        for n in range(best):
            sums[group] += choice[group * size + chosen[n]]
    _choose_largest(sums, kept, chosen)
    for group in range(groups):
        is_kept = False
        for n in range(kept):
            is_kept = is_kept or chosen[n] == group
        for e in range(group * size, (group + 1) * size):
            choice[e] = choice[e] if is_kept else _LEAST


@compiled
def _choose_largest(row: Any, top_k: int, chosen: Any) -> None:
    """Write the indices of the largest numbers, largest first."""
    count = 0
    for e in range(row.shape[0]):
        if count == top_k and not row[e] > row[chosen[top_k - 1]]:
            continue
        place = min(count, top_k - 1)
        while place > 0 and row[e] > row[chosen[place - 1]]:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = e
        count = min(count + 1, top_k)
