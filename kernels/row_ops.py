"""Norms, rotary embedding, pool writes and decode attention of the CPU, compiled.

Each row is computed by itself in a fixed order, so its bits do not depend on the batch. Numbers are
float32 or bfloat16 (`wide` False), and computed in float32.

Shapes: T rows, D model dim, H heads, G KV heads, R = H / G, d head dim, S context of a sequence.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from kernels.compiled import (
    F32,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    compiled,
    copy_bits,
    exp,
    from_bfloat16,
    int64_at,
    intrinsic,
    pointer,
    read_numbers,
    to_bfloat16,
    uint16_at,
    vector_function,
    write_numbers,
)
from kernels.panels import multiply_block

COMPILED_DTYPES: Final = (torch.float32, torch.bfloat16)
TILE_KEYS: Final = 64  # of a sequence, at multiples of their position
DECODE_COLUMNS: Final = 4
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LEAST: Final = np.float32(-np.inf)


@intrinsic
def _dot(_: Any, wide: Any, x: Any, y: Any, vectors: Any) -> Any:
    """Sum of x * y over vectors of 16: lane by lane, then pairwise. y is bfloat16 unless `wide`."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        wide, x, y, vectors = args
        result = cgutils.alloca_once(builder, F32)
        with builder.if_else(builder.icmp_signed("!=", wide, wide.type(0))) as (floats, bits):
            with floats:
                builder.store(_emit_dot(builder, x, y, vectors, is_wide=True), result)
            with bits:
                builder.store(_emit_dot(builder, x, y, vectors, is_wide=False), result)
        return builder.load(result)

    return types.float32(types.boolean, types.int64, types.int64, types.int64), generate


def _emit_dot(builder: ir.IRBuilder, x: Any, y: Any, vectors: Any, *, is_wide: bool) -> Any:
    before, loop = builder.block, builder.append_basic_block("vectors")
    after = builder.append_basic_block("summed")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, lanes = builder.phi(I64), builder.phi(VECTOR)
    index.add_incoming(I64(0), before)
    lanes.add_incoming(VECTOR([0.0] * LANES), before)
    x_now = builder.add(x, builder.mul(index, I64(4 * LANES)))
    y_now = builder.add(y, builder.mul(index, I64((4 if is_wide else 2) * LANES)))
    left = builder.load(pointer(builder, x_now, VECTOR), align=4)
    right = _load(builder, y_now, is_wide=is_wide)
    fma = vector_function(builder, f"llvm.fma.v{LANES}f32", VECTOR)
    summed = builder.call(fma, [left, right, lanes])
    following = builder.add(index, I64(1))
    index.add_incoming(following, loop)
    lanes.add_incoming(summed, loop)
    builder.cbranch(builder.icmp_signed("!=", following, vectors), loop, after)
    builder.position_at_end(after)
    width = LANES // 2
    while width:
        upper = [n + width if n < width else n for n in range(LANES)]
        other = builder.shuffle_vector(summed, summed, INTEGERS(upper))
        summed = builder.fadd(summed, other)
        width //= 2
    return builder.extract_element(summed, I32(0))


def _load(builder: ir.IRBuilder, address: Any, *, is_wide: bool) -> Any:
    """Emit the load of a vector of float32, or of bfloat16 that is widened."""
    if is_wide:
        return builder.load(pointer(builder, address, VECTOR), align=4)
    bits = builder.load(pointer(builder, address, ir.VectorType(ir.IntType(16), LANES)), align=2)
    widened = builder.shl(builder.zext(bits, INTEGERS), INTEGERS([16] * LANES))
    return builder.bitcast(widened, VECTOR)


@intrinsic
def _copy_vector(_: Any, wide: Any, source: Any, target: Any) -> Any:
    """Copy a vector of numbers to float32."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        wide, source, target = args
        to = pointer(builder, target, VECTOR)
        with builder.if_else(builder.icmp_signed("!=", wide, wide.type(0))) as (floats, bits):
            with floats:
                builder.store(_load(builder, source, is_wide=True), to, align=4)
            with bits:
                builder.store(_load(builder, source, is_wide=False), to, align=4)
        return context.get_dummy_value()

    return types.void(types.boolean, types.int64, types.int64), generate


@compiled
def _sum_of_products(x: Any, y: Any, count: int) -> Any:
    whole = count // LANES
    total = _dot(True, x.ctypes.data, y.ctypes.data, whole) if whole else _ZERO
    for i in range(whole * LANES, count):
        total += x[i] * y[i]
    return total


@compiled
def _norm(wide: bool, x: Any, D: int, weight: Any, eps: Any, once: bool) -> None:
    """Scale x [D] to the norm in place; bfloat16 rounds after the division unless `once`."""
    mean = _sum_of_products(x, x, D) / np.float32(D)
    scale = _ONE / np.sqrt(mean + eps)
    if wide or once:
        for i in range(D):
            x[i] = x[i] * scale * weight[i]
    else:
        for i in range(D):
            x[i] = from_bfloat16(to_bfloat16(x[i] * scale)) * weight[i]


@compiled
def rms_norm(
    wide: bool, x: int, weight: int, out: int, T: int, D: int, eps: float, once: bool
) -> None:
    """Write the RMS norm of rows [T, D]."""
    size = 4 if wide else 2
    row, weight_D = np.empty(D, np.float32), np.empty(D, np.float32)
    read_numbers(wide, weight, D, weight_D)
    for t in range(T):
        read_numbers(wide, x + t * D * size, D, row)
        _norm(wide, row, D, weight_D, np.float32(eps), once)
        write_numbers(wide, out + t * D * size, D, row)


@compiled
def norm_and_rope(
    wide: bool,
    x: int,
    x_stride: int,
    weight: int,
    cos: int,
    sin: int,
    out: int,
    T: int,
    H: int,
    d: int,
    eps: float,
) -> None:
    """Write each head of [T, H, d], normed by weight [H, d] (address 0: not), then rotated.

    x_stride: elements between rows of x. cos, sin: [T, d / 2].
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
            read_numbers(wide, x + (t * x_stride + h * d) * size, d, head)
            if weight:
                _norm(wide, head, d, weight_Hd[h], np.float32(eps), False)
                if not wide:
                    for i in range(d):
                        head[i] = from_bfloat16(to_bfloat16(head[i]))
            for i in range(half):
                turned[i] = head[i] * cos_half[i] - head[half + i] * sin_half[i]
                turned[half + i] = head[half + i] * cos_half[i] + head[i] * sin_half[i]
            write_numbers(wide, out + (t * H + h) * d * size, d, turned)


@compiled
def write_rows(size: int, x: int, x_stride: int, slots: int, pool: int, T: int, width: int) -> None:
    """Copy rows of `width` elements of `size` 2 or 4 bytes to pool slots int64 [T]."""
    slots_T = carray(int64_at(slots), (T,))
    for t in range(T):
        source, target = x + t * x_stride * size, pool + slots_T[t] * width * size
        units = width * size // 2
        copy_bits(source, units, carray(uint16_at(target), (units,)))


@compiled
def attend_decode(
    wide: bool,
    q: int,
    q_stride: int,
    k_pool: int,
    v_pool: int,
    pool_stride: int,
    out: int,
    sequences: int,
    first: int,
    last: int,
    H: int,
    G: int,
    d: int,
    dv: int,
    window: int,
    scale: float,
    sinks: int,
) -> None:
    """Attend one row of each of sequences [first, last) to its context in the pool.

    q [T, H, d], out [T, H, dv] contiguous; q_stride and pool_stride: elements between rows.
    sequences: int64 [B, DECODE_COLUMNS]: row, context, first pool slot, address of int64 slots (0:
    consecutive). window 0: none. sinks: address of H numbers, or 0.
    """
    size, R = 4 if wide else 2, H // G
    d_vectors, dv_panels = -(-d // LANES), -(-dv // LANES)
    is_whole = d % LANES == 0
    table = carray(int64_at(sequences), (last, DECODE_COLUMNS))
    queries = np.zeros((R, d_vectors * LANES), np.float32)
    key, ones = np.zeros(d_vectors * LANES, np.float32), np.ones(TILE_KEYS, np.float32)
    sums = np.empty((R, dv_panels * LANES), np.float32)
    more = np.empty((R, dv_panels * LANES), np.float32)
    most, total = np.empty(R, np.float32), np.empty(R, np.float32)
    scores = np.empty((R, TILE_KEYS), np.float32)
    values = np.zeros((dv_panels, TILE_KEYS, LANES), np.float32)
    sinks_H = np.empty(H, np.float32)
    if sinks:
        read_numbers(wide, sinks, H, sinks_H)
    for index in range(first, last):
        row, context, start, listed = table[index]
        slots = carray(int64_at(listed), (context if listed else 0,))
        oldest = max(0, context - window) if window else 0
        for g in range(G):
            for r in range(R):
                head = g * R + r
                read_numbers(wide, q + (row * q_stride + head * d) * size, d, queries[r])
                for i in range(d):
                    queries[r, i] *= np.float32(scale)
                most[r], total[r] = (sinks_H[head], _ONE) if sinks else (_LEAST, _ZERO)
                for i in range(sums.shape[1]):
                    sums[r, i] = _ZERO
            tile = oldest - oldest % TILE_KEYS
            while tile < context:
                begin, end = max(tile, oldest), min(tile + TILE_KEYS, context)
                count = end - begin
                steps = -(-count // LANES) * LANES
                for n in range(count):
                    slot = slots[begin + n] if listed else start + begin + n
                    k_address = k_pool + (slot * pool_stride + g * d) * size
                    if not is_whole:
                        read_numbers(wide, k_address, d, key)
                        k_address = key.ctypes.data
                    for r in range(R):
                        scores[r, n] = _dot(
                            wide or not is_whole, queries[r].ctypes.data, k_address, d_vectors
                        )
                    v_address = v_pool + (slot * pool_stride + g * dv) * size
                    v_to = values.ctypes.data + 4 * LANES * n
                    for panel in range(dv // LANES):
                        _copy_vector(
                            wide,
                            v_address + panel * LANES * size,
                            v_to + panel * 4 * LANES * TILE_KEYS,
                        )
                    if dv % LANES:
                        panel = dv // LANES
                        read_numbers(
                            wide, v_address + panel * LANES * size, dv % LANES, values[panel, n]
                        )
                for r in range(R):
                    for n in range(count, steps):
                        scores[r, n] = _LEAST
                    largest = _largest(scores[r], steps, most[r])
                    fade = exp(most[r] - largest) if most[r] > _LEAST else _ZERO
                    most[r] = largest
                    for n in range(steps):
                        scores[r, n] = exp(scores[r, n] - largest)
                    for n in range(count, steps):
                        scores[r, n] = _ZERO
                    fresh = _dot(True, scores[r].ctypes.data, ones.ctypes.data, steps // LANES)
                    total[r] = total[r] * fade + fresh
                    for i in range(sums.shape[1]):
                        sums[r, i] *= fade
                for panel in range(dv_panels):
                    to, stride = more.ctypes.data + 4 * LANES * panel, more.shape[1] * 4
                    weights = scores.ctypes.data
                    panel_at = values[panel].ctypes.data
                    multiply_block(0, weights, 4 * TILE_KEYS, R, panel_at, count, 1, to, stride)
                for r in range(R):
                    for i in range(sums.shape[1]):
                        sums[r, i] += more[r, i]
                tile += TILE_KEYS
            for r in range(R):
                for i in range(dv):
                    sums[r, i] /= total[r]
                write_numbers(wide, out + ((row * H + g * R + r) * dv) * size, dv, sums[r])


@compiled
def _largest(values: Any, count: int, least: Any) -> Any:
    """Return the largest of `count` numbers, a multiple of LANES, and `least`."""
    lanes = np.full(LANES, least, np.float32)
    for first in range(0, count, LANES):
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], values[first + lane])
    for lane in range(LANES):
        least = max(least, lanes[lane])
    return least
