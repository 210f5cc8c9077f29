"""Attention of the CPU, compiled, and the tokens that a query of sparse attention sees.

Each row is computed by itself in a fixed order, so its bits do not depend on the batch or on
threads. Numbers are float32 or bfloat16 (`wide` False), and computed in float32.

Shapes: T rows, H heads, G KV heads, R = H / G, d head dim, S context of a sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numpy.typing import NDArray
from torch import Tensor

from kernels.compiled import (
    F32,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    address_of,
    all_lanes,
    compiled,
    emit_exp,
    exp,
    float32_at,
    float_bits,
    float_of_bits,
    folded,
    int64_at,
    intrinsic,
    pointer,
    read_numbers,
    write_numbers,
)
from kernels.panels import multiply_block
from kernels.row_ops import sum_of_products
from kernels.steps import Steps
from kernels.thread_pool import PartNumber, register_part, run_parts, shared_pool

TILE_KEYS: Final = 64  # of a sequence, at multiples of their position
TILE_ROWS: Final = 96  # whose scores stay in the cache
ENTRY_COLUMNS: Final = 5
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LEAST: Final = np.float32(-np.inf)


@intrinsic
def _copy_vector(_: Any, wide: Any, source: Any, target: Any) -> Any:
    """Copy a vector of numbers to float32."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        wide, source, target = args
        to = pointer(builder, target, VECTOR)
        with builder.if_else(builder.icmp_signed("!=", wide, wide.type(0))) as (floats, bits):
            with floats:
                builder.store(builder.load(pointer(builder, source, VECTOR), align=4), to, align=4)
            with bits:
                loaded = builder.load(pointer(builder, source, _BITS), align=2)
                widened = builder.shl(builder.zext(loaded, INTEGERS), INTEGERS([16] * LANES))
                builder.store(builder.bitcast(widened, VECTOR), to, align=4)
        return context.get_dummy_value()

    return types.void(types.boolean, types.int64, types.int64), generate


_BITS = ir.VectorType(ir.IntType(16), LANES)
_EIGHT, _KEYS = ir.VectorType(F32, 8), ir.VectorType(I64, LANES)
# Of two vectors of eight: pairs, fours and halves of both.
_MIXES = (
    ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
    ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
)
_COLUMNS = (0, 2, 1, 3, 4, 6, 5, 7)  # in the order in which they are found


@intrinsic
def _transpose(_: Any, source: Any, stride: Any, target: Any) -> Any:
    """Write columns of 8 rows of 8 numbers as rows, 16 numbers apart. stride: of rows, in bytes."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        source, stride, target = args
        rows = []
        for n in range(8):
            address = builder.add(source, builder.mul(stride, I64(n)))
            rows.append(builder.load(pointer(builder, address, _EIGHT), align=4))
        for apart, mixes in zip((1, 2, 4), _MIXES, strict=True):
            low, high = (ir.VectorType(I32, 8)(mix) for mix in mixes)
            for n in (n for n in range(8) if not n & apart):
                both = rows[n], rows[n + apart]
                rows[n] = builder.shuffle_vector(*both, low)
                rows[n + apart] = builder.shuffle_vector(*both, high)
        for n, row in zip(_COLUMNS, rows, strict=True):
            address = builder.add(target, I64(4 * LANES * n))
            builder.store(row, pointer(builder, address, _EIGHT), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@compiled
def _attend_part(args: int, begin: int, end: int) -> None:
    """Attend units [begin, end): unit n is KV head n % G of entry n // G.

    args: those of `attend`.
    """
    (
        is_wide, q, q_stride, k_pool, v_pool, k_stride, v_stride, out, entries, H, G, d, dv, window,
        scale_bits, sinks,
    ) = carray(int64_at(args), (16,))  # fmt: skip
    wide, scale = is_wide != 0, np.float32(float_of_bits(scale_bits))
    size, R, dv_panels = 4 if wide else 2, H // G, -(-dv // LANES)
    table = carray(int64_at(entries), (end, ENTRY_COLUMNS))
    most_rows = 0
    for unit in range(begin, end):
        most_rows = max(most_rows, R * table[unit // G, 1])
    queries = np.empty((most_rows, d), np.float32)
    sums = np.empty((most_rows, dv_panels * LANES), np.float32)
    most, total = np.empty(most_rows, np.float32), np.empty(most_rows, np.float32)
    scores = np.empty((TILE_ROWS, TILE_KEYS), np.float32)
    more = np.empty((TILE_ROWS, dv_panels * LANES), np.float32)
    fades = np.empty(TILE_ROWS, np.float32)
    keys = np.zeros((TILE_KEYS // LANES, d, LANES), np.float32)
    key_rows = np.zeros((TILE_KEYS, d), np.float32)
    values = np.zeros((dv_panels, TILE_KEYS, LANES), np.float32)
    sinks_H = np.empty(H, np.float32)
    q_step, s_step, sum_step = 4 * d, 4 * TILE_KEYS, 4 * sums.shape[1]  # bytes of a row
    if sinks:
        read_numbers(wide, sinks, H, sinks_H)
    for unit in range(begin, end):
        g = unit % G
        first_row, rows, context, start, listed = table[unit // G]
        slots = carray(int64_at(listed), (context if listed else 0,))
        position = context - rows  # of the first row
        for n in range(rows * R):
            head = g * R + n % R
            at = q + ((first_row + n // R) * q_stride + head * d) * size
            read_numbers(wide, at, d, queries[n])
            for i in range(d):
                queries[n, i] *= scale
            most[n], total[n] = (sinks_H[head], _ONE) if sinks else (_LEAST, _ZERO)
            for i in range(sums.shape[1]):
                sums[n, i] = _ZERO
        tile = max(0, position + 1 - window) if window else 0
        tile -= tile % TILE_KEYS
        while tile < context:
            # The rows that see any of the tile's keys.
            first = max(0, tile - position) * R
            last = min(rows, tile + TILE_KEYS - 1 + window - position) * R if window else rows * R
            count = min(TILE_KEYS, context - tile)
            for n in range(count):
                slot = slots[tile + n] if listed else start + tile + n
                read_numbers(wide, k_pool + (slot * k_stride + g * d) * size, d, key_rows[n])
                _read_value(wide, v_pool + (slot * v_stride + g * dv) * size, dv, values, n)
            _zero_values(values, count)
            _turn_keys(key_rows, count, keys)
            panels, at, more_at = -(-count // LANES), address_of(scores), address_of(more)
            keys_at, values_at = address_of(keys), address_of(values)
            for base in range(first, last, TILE_ROWS):
                used, q_at = min(TILE_ROWS, last - base), address_of(queries[base:])
                multiply_block(0, q_at, q_step, used, keys_at, d, panels, at, s_step)
                for row in range(used):
                    n = base + row
                    newest = position + n // R - tile
                    oldest = max(0, newest + 1 - window) if window else 0
                    stop = min(TILE_KEYS, newest + 1)
                    largest, weight = _soften(at + row * s_step, oldest, stop, most[n])
                    fades[row] = exp(most[n] - largest) if most[n] > _LEAST else _ZERO
                    most[n], total[n] = largest, total[n] * fades[row] + weight
                multiply_block(
                    0, at, s_step, used, values_at, TILE_KEYS, dv_panels, more_at, sum_step
                )
                for row in range(used):
                    for i in range(sums.shape[1]):
                        sums[base + row, i] = sums[base + row, i] * fades[row] + more[row, i]
            tile += TILE_KEYS
        for n in range(rows * R):
            for i in range(dv):
                sums[n, i] /= total[n]
            to_row, head = first_row + n // R, g * R + n % R
            write_numbers(wide, out + (to_row * H + head) * dv * size, dv, sums[n])


@compiled
def _turn_keys(key_rows: Any, count: int, keys: Any) -> None:
    """Copy the first keys [TILE_KEYS, d] to columns of the panels [TILE_KEYS / 16, d, 16]."""
    d = key_rows.shape[1]
    for first in range(0, count, 8):
        panel, lane = first // LANES, first % LANES
        for i in range(0, d - 7, 8):
            to = address_of(keys) + ((panel * d + i) * LANES + lane) * 4
            _transpose(address_of(key_rows) + (first * d + i) * 4, 4 * d, to)
        for i in range(d - d % 8, d):
            for n in range(8):
                keys[panel, i, lane + n] = key_rows[first + n, i]


@compiled
def _zero_values(values: Any, first: int) -> None:
    """Zero the rows from `first` on: a weight of 0 does not remove a NaN that another tile left."""
    for panel in range(values.shape[0]):
        for n in range(first, TILE_KEYS):
            for lane in range(LANES):
                values[panel, n, lane] = _ZERO


@compiled
def _read_value(wide: bool, v_at: int, dv: int, values: Any, n: int) -> None:
    """Copy a value to row n of its panels."""
    size = 4 if wide else 2
    for panel in range(dv // LANES):
        _copy_vector(wide, v_at + panel * LANES * size, values[panel, n].ctypes.data)
    if dv % LANES:
        panel = dv // LANES
        read_numbers(wide, v_at + panel * LANES * size, dv % LANES, values[panel, n])


@intrinsic
def _soften(_: Any, scores: Any, oldest: Any, stop: Any, most: Any) -> Any:
    """Turn a row's scores of a tile into weights of keys [oldest, stop), in place.

    Return the largest of the scores and `most`, and the sum of the weights.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        scores, oldest, stop, most = args
        seen, vectors, at = [], [], []
        for first in range(0, TILE_KEYS, LANES):
            keys = _KEYS(list(range(first, first + LANES)))
            is_new = builder.icmp_signed(">=", keys, all_lanes(builder, oldest))
            is_old = builder.icmp_signed("<", keys, all_lanes(builder, stop))
            seen.append(builder.and_(is_new, is_old))
            at.append(pointer(builder, builder.add(scores, I64(4 * first)), VECTOR))
            score = builder.load(at[-1], align=4)
            vectors.append(builder.select(seen[-1], score, VECTOR([-np.inf] * LANES)))
        larger = _larger(builder)
        largest = larger(folded(builder, functools.reduce(larger, vectors), larger), most)
        largest_L = all_lanes(builder, largest)
        weights = []
        for sees, score, to in zip(seen, vectors, at, strict=True):
            weight = emit_exp(builder, builder.fsub(score, largest_L))
            weights.append(builder.select(sees, weight, VECTOR([0.0] * LANES)))
            builder.store(weights[-1], to, align=4)
        total = folded(builder, functools.reduce(builder.fadd, weights), builder.fadd)
        return context.make_tuple(builder, signature.return_type, [largest, total])

    given = types.int64, types.int64, types.int64, types.float32
    return types.UniTuple(types.float32, 2)(*given), generate


def _larger(builder: ir.IRBuilder) -> Callable[[Any, Any], Any]:
    return lambda a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a)


_ATTEND: Final = register_part(PartNumber.ATTEND, _attend_part)


@compiled
def attend(
    pool: int, wide: bool, q: int, q_stride: int, k_pool: int, v_pool: int, k_stride: int,
    v_stride: int, out: int, entries: int, count: int, H: int, G: int, d: int, dv: int, window: int,
    scale: float, sinks: int,
) -> None:  # fmt: skip
    """Attend the last rows of each entry to its context, in the pool's threads.

    q [T, H, d], out [T, H, dv] contiguous. Strides: elements between rows of q and slots of K and
    V. entries: int64 [count, ENTRY_COLUMNS]: first row, rows, context up to the last one, first
    pool slot, address of int64 slots (0: consecutive). window 0: none. sinks: address of H numbers,
    or 0.
    """
    # fmt: off
    args = np.array((
        np.int64(wide), q, q_stride, k_pool, v_pool, k_stride, v_stride, out, entries, H, G, d, dv,
        window, float_bits(scale), sinks,
    ))
    # fmt: on
    run_parts(pool, _ATTEND, args, count * G, 1)


@compiled
def _score(queries: Any, weights: Any, key: Any) -> Any:
    """Return the weighted sum over heads of relu(query · key)."""
    H, d = queries.shape
    total = _ZERO
    for h in range(H):
        product = sum_of_products(queries[h], key, d)
        if product > _ZERO:
            total += product * weights[h]
    return total


@compiled
def _select_part(args: int, begin: int, end: int) -> None:
    if begin >= end:
        return
    is_wide, q, weights, keys, entries, H, d, top_k, out = carray(int64_at(args), (9,))
    wide, size = is_wide != 0, 4 if is_wide else 2
    table, key = carray(int64_at(entries), (end, ENTRY_COLUMNS)), np.empty(d, np.float32)
    for n in range(begin, end):
        row, _, context, start, listed = table[n]
        slots = carray(int64_at(listed), (context if listed else 0,))
        queries = carray(float32_at(q + row * H * d * 4), (H, d))
        weights_H = carray(float32_at(weights + row * H * 4), (H,))
        scores = np.empty(context, np.float32)
        for s in range(context):
            slot = slots[s] if listed else start + s
            read_numbers(wide, keys + slot * d * size, d, key)
            scores[s] = _score(queries, weights_H, key)
        least = np.partition(scores, context - top_k)[context - top_k]
        equal = top_k
        for s in range(context):
            equal -= scores[s] > least
        chosen, count = carray(int64_at(out + n * top_k * 8), (top_k,)), 0
        for s in range(context):
            if scores[s] > least or (scores[s] == least and equal > 0):
                equal -= scores[s] == least
                chosen[count] = slots[s] if listed else start + s
                count += 1


_SELECT: Final = register_part(PartNumber.SELECT_TOKENS, _select_part)


@compiled
def select_tokens(
    pool: int, wide: bool, q: int, weights: int, keys: int, entries: int, count: int, H: int,
    d: int, top_k: int, out: int,
) -> None:  # fmt: skip
    """Write the pool slots of each row's top_k tokens, in order of position, int64 [count, top_k].

    q float32 [T, H, d], weights float32 [T, H]; keys: pool of [d]. entries: int64 [count,
    ENTRY_COLUMNS], of one row each, as `attend` has them, with contexts above top_k.
    Of equal scores the first are taken.
    """
    args = np.array((np.int64(wide), q, weights, keys, entries, H, d, top_k, out))
    run_parts(pool, _SELECT, args, count, 1)


Keys = slice | Tensor  # consecutive pool slots (a view) or a list (a gather)


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch: rows first .. first+count-1 are positions start .. start+count-1.

    slots_S: pool slots of positions 0 .. start+count-1, a slice if they are consecutive; nothing on
    a device, where the batch has block tables.
    """

    first: int
    count: int
    start: int
    slots_S: Keys = dataclasses.field(default_factory=lambda: slice(0, 0))

    @property
    def context(self) -> int:
        return self.start + self.count

    def chunks(self, size: int) -> Iterator[SequenceRows]:
        """Yield the rows of each `size` positions, as a sequence of its own."""
        for start in range(self.start - self.start % size, self.context, size):
            first, last = max(self.start, start), min(self.context, start + size)
            row, keys = self.first + first - self.start, self.slots_S
            if isinstance(keys, slice):
                slots: Keys = slice(keys.start + start, keys.start + last)
            else:
                slots = keys[start:last]
            yield SequenceRows(row, last - first, first - start, slots)


_STEP_SCORES = 1 << 14  # of a head between two yields: a millisecond or more
_ENTRY_QUERIES = 256  # of a KV head: rows times query heads


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledRows:
    """Rows of sequences for `attend`.

    table: int64 [B, ENTRY_COLUMNS]. slots: the tensors whose addresses it has. steps: bounds of
    entries that are attended between two yields. window 0: none.
    """

    table: NDArray[np.int64]
    slots: tuple[Tensor, ...]
    steps: tuple[tuple[int, int], ...]
    window: int


def row_steps(
    q_THd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    rows: CompiledRows,
    out_THd: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Steps[None]:
    """Write the rows of `out`, whose head dim may be less than the pool's: v's first elements."""
    if q_THd.stride()[1:] != (q_THd.shape[2], 1):
        q_THd = q_THd.contiguous()
    H, G = q_THd.shape[1], k_pool_PGd.shape[1]
    for begin, end in rows.steps:
        attend(
            shared_pool(),
            q_THd.dtype is torch.float32,
            q_THd.data_ptr(),
            q_THd.stride(0),
            k_pool_PGd.data_ptr(),
            v_pool_PGd.data_ptr(),
            k_pool_PGd.stride(0),
            v_pool_PGd.stride(0),
            out_THd.data_ptr(),
            rows.table[begin:].ctypes.data,
            end - begin,
            H,
            G,
            q_THd.shape[2],
            out_THd.shape[2],
            rows.window,
            scale,
            0 if sinks_H is None else sinks_H.data_ptr(),
        )
        yield


def compiled_rows(
    sequences: Sequence[SequenceRows], window: int | None, group: int
) -> CompiledRows:
    """Cut sequences into entries of `attend`, and these into steps.

    group: query heads of a KV head.
    """
    entries, slots = list[tuple[int, int, int, int, int]](), list[Tensor]()
    steps, begin, scores = list[tuple[int, int]](), 0, 0
    for seq in sequences:
        start, address = 0, 0
        if isinstance(seq.slots_S, slice):
            start = seq.slots_S.start
        else:
            slots.append(seq.slots_S)
            address = seq.slots_S.data_ptr()
        for first, count in _pieces(seq, window, group):
            width = _width(seq.start + first + count, window)
            if scores and scores + count * width > _STEP_SCORES:
                steps.append((begin, len(entries)))
                begin, scores = len(entries), 0
            scores += count * width
            entries.append((seq.first + first, count, seq.start + first + count, start, address))
    steps.append((begin, len(entries)))
    return CompiledRows(np.array(entries, np.int64), tuple(slots), tuple(steps), window or 0)


def _pieces(seq: SequenceRows, window: int | None, group: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the rows of each entry of a sequence."""
    first = 0
    while first < seq.count:
        width = _width(seq.start + first + 1, window)
        most = max(1, min(_ENTRY_QUERIES // group, _STEP_SCORES // width))
        yield first, min(most, seq.count - first)
        first += most


def _width(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)
