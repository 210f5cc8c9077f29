"""Products with weights in panels, compiled for any number of rows (kernels/compiled.py).

    weight [N, K]  →  panels [N / 16, K, 16]            float32
                      panels [N / 16, K / 2, 16, 2]     bfloat16, pairs of neighbours in K

A step multiplies an element of x (a pair in bfloat16) by sixteen outputs' weights. Each output is
one chain of fused multiply-adds along K, in float32, whatever other rows and outputs are computed
beside it, so a row's bits do not depend on the batch, on the number of threads or on the vector
width. bfloat16 uses the processor's dot products of pairs, or widens the weights in registers.

Shapes: T rows, K inputs, N outputs; experts: N (token, expert) pairs, D model dim, F FFN dim.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from torch import Tensor
from torch.nn import functional

from kernels.compiled import (
    F32,
    I8,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    address_of,
    all_lanes,
    compiled,
    copy_bits,
    emit_loop,
    exp,
    float32_at,
    float_bits,
    float_of_bits,
    int64_at,
    intrinsic,
    pointer,
    processor_has,
    read_numbers,
    vector_function,
    write_numbers,
)
from kernels.stored import (
    HAS_PAIRS,
    LAYOUTS,
    BFloat,
    Storage,
    emit_units,
    panel_bytes,
    rounded,
    unpack_panel,
    unpacked_pairs,
    unpacked_unit,
)
from kernels.thread_pool import PartNumber, register_part, run_parts


class Arithmetic(enum.IntEnum):
    """Arithmetic of a product, by the dtype of its weights."""

    FLOAT32 = 0
    WIDENED = 1  # bfloat16 weights, float32 rows
    PAIRS = 2  # bfloat16 weights and rows, dot products of the processor


_BFLOAT16: Final = Arithmetic.PAIRS if HAS_PAIRS else Arithmetic.WIDENED
_FLOAT32, _WIDENED, _PAIRS = (int(each) for each in Arithmetic)
_ZERO: Final = np.float32(0.0)


def arithmetic_of(dtype: torch.dtype) -> Arithmetic | None:
    """Return the arithmetic for weights and rows of a dtype, or None."""
    if dtype is torch.float32:
        return Arithmetic.FLOAT32
    if dtype is torch.bfloat16:
        return _BFLOAT16
    return None


# What products are compiled for. bfloat16 is unpacked for float32 rows only.
_PLAIN_KINDS = tuple((kind, Storage.PLAIN) for kind in (Arithmetic.FLOAT32, _BFLOAT16))
_STORED_KINDS = (
    *(
        (kind, each)
        for each in (Storage.MXFP4, Storage.FP8, Storage.INT8)
        for kind in (Arithmetic.FLOAT32, _BFLOAT16)
    ),
    (Arithmetic.FLOAT32, Storage.BFLOAT16),
)


def kind_of(arithmetic: Arithmetic, storage: Storage = Storage.PLAIN) -> int:
    """Return the kind of a product: what its rows are multiplied with, and how it is stored."""
    return int(arithmetic) | storage << _STORAGE_SHIFT


_ARITHMETIC_MASK, _STORAGE_SHIFT = 3, 2


@compiled
def reads_float32(kind: int) -> bool:
    """Return whether the rows and results of a kind of product are float32, not bfloat16."""
    return kind & _ARITHMETIC_MASK == _FLOAT32


def pack_panels(weight_NK: Tensor) -> Tensor:
    """Return the panels of a weight, padded with zeros: 1-D, a copy."""
    pair = 1 if weight_NK.dtype is torch.float32 else 2
    N, K = weight_NK.shape
    padded = functional.pad(weight_NK, (0, -K % pair, 0, -N % LANES))
    return padded.view(-1, LANES, -(-K // pair), pair).transpose(1, 2).flatten()


# --- blocks of rows and panels

_STEP_BYTES = 4 * LANES  # of a panel


_BFLOATS = ir.VectorType(BFloat(), 2 * LANES)


_Sums = list[Any]
"""A vector for each row and panel, row after row."""

_Weights = Iterable[tuple[int, Sequence[Any]]]
"""By element of x of a step, in bytes from the first: a vector of each panel. Vectors of integers
are pairs of bfloat16, for the processor's dot products."""


def _block(shapes: Iterable[tuple[int, int]], kinds: Iterable[tuple[Arithmetic, Storage]]) -> Any:
    """Return the intrinsic that multiplies rows by panels, for given numbers of both.

    Arguments: kind; rows, panels; address and stride of the rows; address and stride of the panels;
    distance ahead at which stored panels are prefetched; steps (of stored panels: pairs of inputs);
    address and stride of the float32 outputs. Strides and distances are in bytes.
    """

    @intrinsic
    def block(
        _: Any, kind: Any, rows: Any, panels: Any, x: Any, x_stride: Any, w: Any, w_stride: Any,
        ahead: Any, steps: Any, out: Any, to: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
            code, *sizes, x, x_stride, w, w_stride, ahead, steps, out, out_stride = args
            for rows, panels in dict.fromkeys(shapes):
                pairs = zip(sizes, (rows, panels), strict=True)
                are_equal = (builder.icmp_signed("==", each, I64(n)) for each, n in pairs)
                with builder.if_then(builder.and_(*are_equal)):
                    x_rows = _addresses(builder, x, x_stride, rows)
                    w_panels = _addresses(builder, w, w_stride, panels)
                    for kind, storage in kinds:
                        chosen = builder.icmp_signed("==", code, I64(kind_of(kind, storage)))
                        with builder.if_then(chosen):
                            if storage is Storage.PLAIN:
                                sums = _plain_sums(builder, kind, x_rows, w_panels, steps)
                            else:
                                given = x_rows, w_panels, steps, ahead
                                sums = _stored_sums(builder, kind, storage, *given)
                            _store_sums(builder, sums, rows, out, out_stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return block


def _plain_sums(
    builder: ir.IRBuilder, kind: Arithmetic, x_rows: list[Any], panels: list[Any], steps: Any
) -> _Sums:
    """Emit a product with panels of the arithmetic's numbers."""
    zeros = [VECTOR([0.0] * LANES)] * (len(x_rows) * len(panels))

    def step(number: Any, sums: _Sums) -> _Sums:
        weights = _plain_weights(builder, kind, panels, number)
        offset = builder.mul(number, I64(8 if kind is Arithmetic.WIDENED else 4))
        return _step(builder, x_rows, offset, weights, sums)

    return emit_loop(builder, steps, zeros, step)


def _stored_sums(
    builder: ir.IRBuilder, kind: Arithmetic, storage: Storage, x_rows: list[Any], panels: list[Any],
    pairs: Any, ahead: Any,
) -> _Sums:  # fmt: skip
    """Emit a product with stored panels."""
    layout, as_pairs = LAYOUTS[storage], kind is Arithmetic.PAIRS
    x_bytes = I64(layout.unit_pairs * (4 if as_pairs else 8))
    zeros = [VECTOR([0.0] * LANES)] * (len(x_rows) * len(panels))

    def step(unit: Any, scales: list[Any], sums: _Sums) -> _Sums:
        offset = builder.mul(unit, I64(layout.unit_bytes))
        at = [builder.add(panel, offset) for panel in panels]
        weights = _stored_weights(builder, kind, storage, at, scales, ahead)
        return _step(builder, x_rows, builder.mul(unit, x_bytes), weights, sums)

    return emit_units(builder, storage, panels, pairs, as_pairs, zeros, step)


def _stored_weights(
    builder: ir.IRBuilder, kind: Arithmetic, storage: Storage, units: list[Any], scales: list[Any],
    ahead: Any,
) -> _Weights:  # fmt: skip
    """Emit the weights of a unit of each panel, and prefetch those ahead."""
    by_panel: list[Iterable[Any]] = []
    for unit, scale in zip(units, scales, strict=True):
        _prefetch(builder, builder.add(unit, ahead))
        if kind is Arithmetic.PAIRS:
            by_panel.append(unpacked_pairs(builder, storage, unit, scale))
            continue
        numbers = unpacked_unit(builder, storage, unit, scale)
        is_rounded = kind is Arithmetic.WIDENED
        by_panel.append(rounded(builder, storage, numbers) if is_rounded else numbers)
    return ((4 * place, each) for place, each in enumerate(zip(*by_panel, strict=True)))


def _addresses(builder: ir.IRBuilder, first: Any, stride: Any, count: int) -> list[Any]:
    found = [first]
    while len(found) < count:
        found.append(builder.add(found[-1], stride))
    return found


def _prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Emit a prefetch of a line into all caches. Any address is allowed."""
    byte = ir.PointerType(I8)
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), I32(0), I32(3), I32(1)])


def _plain_weights(
    builder: ir.IRBuilder, kind: Arithmetic, w_panels: list[Any], step: Any
) -> _Weights:
    """Emit the weights of a step."""
    offset = builder.mul(step, I64(_STEP_BYTES))
    words = [
        builder.load(pointer(builder, builder.add(w, offset), INTEGERS), align=4) for w in w_panels
    ]
    if kind is Arithmetic.PAIRS:
        yield 0, words
    elif kind is Arithmetic.FLOAT32:
        yield 0, [builder.bitcast(each, VECTOR) for each in words]
    else:
        shift, mask = (INTEGERS([n] * LANES) for n in (16, 0xFFFF0000))
        yield 0, [builder.bitcast(builder.shl(each, shift), VECTOR) for each in words]
        yield 4, [builder.bitcast(builder.and_(each, mask), VECTOR) for each in words]


def _step(
    builder: ir.IRBuilder, x_rows: list[Any], offset: Any, weights: _Weights, sums: _Sums
) -> _Sums:
    """Emit one step of all rows, whose elements are at `offset`; return the new sums."""
    x_rows, sums = [builder.add(x, offset) for x in x_rows], list(sums)
    for place, vectors in weights:
        is_pairs = vectors[0].type == INTEGERS
        if is_pairs:
            function = vector_function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _BFLOATS)
            vectors = [builder.bitcast(each, _BFLOATS) for each in vectors]
        else:
            function = vector_function(builder, f"llvm.fma.v{LANES}f32", VECTOR)
        for row, x in enumerate(x_rows):
            value = _broadcast(builder, builder.add(x, I64(place)), I32 if is_pairs else F32)
            value = builder.bitcast(value, _BFLOATS) if is_pairs else value
            for index, vector in enumerate(vectors, row * len(vectors)):
                args = [sums[index], value, vector] if is_pairs else [value, vector, sums[index]]
                sums[index] = builder.call(function, args)
    return sums


def _store_sums(builder: ir.IRBuilder, sums: _Sums, rows: int, out: Any, stride: Any) -> None:
    panels = len(sums) // rows
    for row, to in enumerate(_addresses(builder, out, stride, rows)):
        for panel, vector in enumerate(sums[row * panels : (row + 1) * panels]):
            address = builder.add(to, I64(panel * _STEP_BYTES))
            builder.store(vector, pointer(builder, address, VECTOR), align=4)


def _broadcast(builder: ir.IRBuilder, address: Any, element: ir.Type) -> Any:
    return all_lanes(builder, builder.load(pointer(builder, address, element), align=2))


# Thirty-two registers of a vector hold the sums of eight rows and two panels; sixteen of half a
# vector those of six rows and one panel. Of few rows, panels side by side are chains of sums that
# do not wait for each other.
_WIDE: Final = processor_has("avx512f")
_ROWS: Final = 8 if _WIDE else 6
_PANELS: Final = 2 if _WIDE else 1
_FEW_PANELS: Final = 2 if _WIDE else 4  # of one row
_plain_block = _block(
    ((_ROWS, _PANELS), (_ROWS, 1), (4, _PANELS), (4, 1), (2, 2), (2, 1), (1, _FEW_PANELS), (1, 1)),
    _PLAIN_KINDS,
)
# Registers also hold the unpacked weights and what they are unpacked with.
_STORED_TILE: Final = 4 if _WIDE else 2  # panels of one row
_stored_block = _block(
    ((4, _PANELS), (3, _PANELS), (2, _PANELS), (1, _STORED_TILE), (1, 1)), _STORED_KINDS
)
_FEW_ROWS = 4  # for which unpacking into registers is faster than into the cache
_TILE = 128  # rows whose inputs stay in the cache


@compiled
def multiply_block(
    kind: int, x: int, x_stride: int, rows: int, w: int, steps: int, panels: int, out: int,
    stride: int,
) -> None:  # fmt: skip
    """Write [rows, panels * 16] float32 to `out`. Strides are in bytes."""
    arithmetic, storage = kind & _ARITHMETIC_MASK, kind >> _STORAGE_SHIFT
    if storage == 0:
        _multiply_plain(arithmetic, x, x_stride, rows, w, steps, panels, out, stride)
        return
    is_float32, is_pairs = arithmetic == _FLOAT32, arithmetic == _PAIRS
    pairs = (steps + 1) // 2 if is_float32 else steps
    if rows <= _FEW_ROWS and not (is_float32 and steps % 2):
        _multiply_stored(kind, x, x_stride, rows, w, pairs, panels, out, stride)
        return
    plain_kind, plain_steps = (_PAIRS if is_pairs else _FLOAT32), steps
    if arithmetic == _WIDENED:  # whose rows are float32 already
        plain_steps = 2 * steps
    size, stored_size = plain_steps * _STEP_BYTES, panel_bytes(storage, pairs)
    plain = np.empty((_PANELS * plain_steps + 1) * LANES, np.float32)
    plain_at = address_of(plain)
    for first in range(0, panels, _PANELS):
        count = min(_PANELS, panels - first)
        for panel in range(count):
            stored, to = w + (first + panel) * stored_size, plain_at + panel * size
            unpack_panel(storage, not is_float32, stored, pairs, to)
        at = out + first * _STEP_BYTES
        _multiply_plain(plain_kind, x, x_stride, rows, plain_at, plain_steps, count, at, stride)
    plain[0] = _ZERO  # it lives until here


@compiled
def _multiply_stored(
    kind: int, x: int, x_stride: int, rows: int, w: int, pairs: int, panels: int, out: int,
    stride: int,
) -> None:  # fmt: skip
    """Multiply at most _FEW_ROWS rows by stored panels, which are unpacked into registers."""
    size = panel_bytes(kind >> _STORAGE_SHIFT, pairs)
    step = _STORED_TILE if rows == 1 else _PANELS
    for panel in range(0, panels, step):
        weight, to = w + panel * size, out + panel * _STEP_BYTES
        if panels - panel >= step:
            ahead = step * size if panel + step < panels else 0
            _stored_block(kind, rows, step, x, x_stride, weight, size, ahead, pairs, to, stride)
            continue
        for each in range(panels - panel):
            for t in range(rows):
                at, one, row = (
                    to + t * stride + each * _STEP_BYTES,
                    weight + each * size,
                    x + t * x_stride,
                )
                _stored_block(kind, 1, 1, row, x_stride, one, size, 0, pairs, at, stride)


@compiled
def _multiply_plain(
    kind: int, x: int, x_stride: int, rows: int, w: int, steps: int, panels: int, out: int,
    stride: int,
) -> None:  # fmt: skip
    w_stride, panel = steps * _STEP_BYTES, 0
    tile = _FEW_PANELS if rows < 4 else _PANELS
    while panel < panels:
        count, row = tile if panels - panel >= tile else 1, 0
        while row < rows:
            left = rows - row
            taken = _ROWS if left >= _ROWS else 4 if left >= 4 else min(left, 2)
            step = min(count, 2) if taken == 2 else count
            for first in range(panel, panel + count, step):
                weight, to = w + first * w_stride, out + row * stride + first * _STEP_BYTES
                x_row = x + row * x_stride
                _plain_block(
                    kind, taken, step, x_row, x_stride, weight, w_stride, 0, steps, to, stride
                )
            row += taken
        panel += count


# --- products


@compiled
def _multiply_part(args: int, first: int, last: int) -> None:
    """Write panels [first, last) of a product; args: kind, x, w, bias, out, T, K, N."""
    kind, x, w, bias, out, T, K, N = carray(int64_at(args), (8,))
    size = 4 if kind & _ARITHMETIC_MASK == _FLOAT32 else 2
    _multiply_rows(kind, x, K * size, w, bias, out, N * size, T, K, N, first, last)


@compiled
def _copy_row(arithmetic: int, x: int, K: int, to: int) -> None:
    """Copy a row as products read it."""
    if arithmetic == _PAIRS:
        copy_bits(x, K, to)
    else:
        read_numbers(arithmetic == _FLOAT32, x, K, carray(float32_at(to), (K,)))


@compiled
def _multiply_rows(
    kind: int, x: int, x_stride: int, w: int, bias: int, out: int, stride: int, T: int, K: int,
    N: int, first: int, last: int,
) -> None:  # fmt: skip
    """Write panels [first, last) of x @ weight.T + bias. Strides of rows are in bytes."""
    arithmetic, storage = kind & _ARITHMETIC_MASK, kind >> _STORAGE_SHIFT
    is_float32, is_pairs = arithmetic == _FLOAT32, arithmetic == _PAIRS
    size, steps = (4, K) if is_float32 else (2, (K + 1) // 2)
    panels, columns = last - first, min(N, last * LANES) - first * LANES
    w += first * (panel_bytes(storage, (K + 1) // 2) if storage else steps * _STEP_BYTES)
    out += first * LANES * size
    if is_float32 and columns == panels * LANES and bias == 0:
        for row in range(0, T, _TILE):
            x_tile, to, rows = x + row * x_stride, out + row * stride, min(_TILE, T - row)
            multiply_block(kind, x_tile, x_stride, rows, w, steps, panels, to, stride)
        return
    tile, copies = min(T, _TILE), arithmetic == _WIDENED or (is_pairs and K % 2 == 1)
    copied_bytes = steps * (4 if is_pairs else 8)  # of a row
    copied = np.zeros((tile if copies else 0, copied_bytes // 2), np.uint16)
    sums = np.empty((tile, panels * LANES), np.float32)
    bias_n = np.zeros(panels * LANES, np.float32)
    if bias:
        read_numbers(is_float32, bias + first * LANES * size, columns, bias_n)
    for row in range(0, T, _TILE):
        rows = min(_TILE, T - row)
        x_rows, x_step = x + row * x_stride, x_stride
        if copies:
            for t in range(rows):
                _copy_row(arithmetic, x_rows + t * x_stride, K, address_of(copied[t]))
            x_rows, x_step = address_of(copied), copied_bytes
        to, at = out + row * stride, address_of(sums)
        multiply_block(kind, x_rows, x_step, rows, w, steps, panels, at, panels * LANES * 4)
        for t in range(rows):
            for n in range(columns):
                sums[t, n] += bias_n[n]
            write_numbers(is_float32, to + t * stride, columns, sums[t])


_MULTIPLY: Final = register_part(PartNumber.MULTIPLY, _multiply_part)
_PART_ELEMENTS = 1 << 16  # of the weight: some microseconds


@compiled
def multiply(
    pool: int, kind: int, x: int, w: int, bias: int, out: int, T: int, K: int, N: int
) -> None:
    """Write x @ weight.T + bias, [T, N] in the weight's dtype, in the threads of the pool.

    bias: address of N elements of the weight's dtype, or 0.
    """
    args = np.array((kind, x, w, bias, out, T, K, N))
    least = 1 + _PART_ELEMENTS // (LANES * max(1, K))
    run_parts(pool, _MULTIPLY, args, (N + LANES - 1) // LANES, least)


@compiled
def _heads_part(args: int, begin: int, end: int) -> None:
    """Multiply by the weights of heads [begin, end); args: those of `multiply_heads`."""
    kind, x, x_stride, x_head, w, w_head, out, stride, out_head, T, K, N = carray(
        int64_at(args), (12,)
    )
    for head in range(begin, end):
        x_at, w_at, to = x + head * x_head, w + head * w_head, out + head * out_head
        panels = (N + LANES - 1) // LANES
        _multiply_rows(kind, x_at, x_stride, w_at, 0, to, stride, T, K, N, 0, panels)


_HEADS: Final = register_part(PartNumber.MULTIPLY_HEADS, _heads_part)


@compiled
def multiply_heads(
    pool: int, kind: int, x: int, x_stride: int, x_head: int, w: int, w_head: int, out: int,
    stride: int, out_head: int, T: int, K: int, N: int, H: int,
) -> None:  # fmt: skip
    """Write x[:, h] @ weight[h].T for each head h: rows of T x H vectors with K, then N elements.

    Distances between rows of x and of `out`, and between heads of x, the panels and `out`, are in
    bytes.
    """
    args = np.array((kind, x, x_stride, x_head, w, w_head, out, stride, out_head, T, K, N))
    run_parts(pool, _HEADS, args, H, 1 + _PART_ELEMENTS // max(1, N * K))


# --- experts


@compiled
def _gate(h_F2: Any, F: int, alpha: Any, limit: Any) -> None:
    """Set h[:F] to silu(gate) * up, or with a limit to the clamped gate of gpt-oss."""
    one = np.float32(1.0)
    if limit == np.float32(0.0):
        for f in range(F):
            h_F2[f] = h_F2[f] / (one + exp(-h_F2[f])) * h_F2[F + f]
        return
    for f in range(F):
        gate, up = min(h_F2[f], limit), min(max(h_F2[F + f], -limit), limit)
        h_F2[f] = gate / (one + exp(-alpha * gate)) * (up + one)


@compiled
def run_mlp(
    pool: int, kind: int, x: int, gate_up: int, down: int, gate: int, out: int, T: int, D: int,
    F: int,
) -> None:  # fmt: skip
    """Write down @ (silu(gate @ x) * (up @ x)), [T, D], in the threads of the pool.

    gate: address of the panels of a row whose product's sigmoid each row is multiplied by, or 0.
    """
    wide, one = kind & _ARITHMETIC_MASK == _FLOAT32, np.float32(1.0)
    size, row = 4 if wide else 2, np.empty(max(D, 2 * F), np.float32)
    h, gates = np.empty(1 + T * 2 * F, np.float32), np.empty(T, np.float32)
    h_at = address_of(h)
    multiply(pool, kind, x, gate_up, 0, h_at, T, D, 2 * F)
    for t in range(T):
        read_numbers(wide, h_at + t * 2 * F * size, 2 * F, row)
        _gate(row, F, _ZERO, _ZERO)
        write_numbers(wide, h_at + t * F * size, F, row)
    multiply(pool, kind, h_at, down, 0, out, T, F, D)
    if gate:
        multiply(pool, kind, x, gate, 0, h_at, T, D, 1)
        read_numbers(wide, h_at, T, gates)
        for t in range(T):
            read_numbers(wide, out + t * D * size, D, row)
            scale = one / (one + exp(-gates[t]))
            for i in range(D):
                row[i] *= scale
            write_numbers(wide, out + t * D * size, D, row)
    h[0] = _ZERO  # it lives until here


@compiled
def _experts_part(args: int, begin: int, end: int) -> None:
    """Run experts [begin, end) of those listed; args: those of `run_experts`."""
    kind, x, rows, gate_up, down, experts, counts, D, F, alpha_bits, limit_bits, y = carray(
        int64_at(args), (12,)
    )
    alpha, limit = np.float32(float_of_bits(alpha_bits)), np.float32(float_of_bits(limit_bits))
    gate_ups, downs = carray(int64_at(gate_up), (1 << 20, 2)), carray(int64_at(down), (1 << 20, 2))
    experts_r, counts_r = carray(int64_at(experts), (end,)), carray(int64_at(counts), (end,))
    first, tile = 0, 0
    for index in range(begin):
        first += counts_r[index]
    pairs = first
    for index in range(begin, end):
        pairs += counts_r[index]
        tile = max(tile, min(_TILE, counts_r[index]))
    rows_N, arithmetic = carray(int64_at(rows), (pairs,)), kind & _ARITHMETIC_MASK
    is_float32, is_pairs = arithmetic == _FLOAT32, arithmetic == _PAIRS
    size, pair = (4, 1) if is_float32 else (2, 2)  # of x and of the biases
    D_steps, F_steps = (D + pair - 1) // pair, (F + pair - 1) // pair
    D_panels, F2_panels = (D + LANES - 1) // LANES, (2 * F + LANES - 1) // LANES
    stored = 2 if is_pairs else 4  # bytes of a number that is multiplied
    x_stride, h_stride = D_steps * pair * stored, F_steps * pair * stored
    x_rows, h_rows = (
        np.zeros((tile, x_stride // 2), np.uint16),
        np.zeros((tile, h_stride // 2), np.uint16),
    )
    gates = np.empty((tile, F2_panels * LANES), np.float32)
    sums = np.empty((tile, D_panels * LANES), np.float32)
    gate_up_bias, down_bias = np.zeros(2 * F, np.float32), np.zeros(D, np.float32)
    for index in range(begin, end):
        gate_up_at, gate_up_bias_at = gate_ups[experts_r[index]]
        down_at, down_bias_at = downs[experts_r[index]]
        if gate_up_bias_at:
            read_numbers(is_float32, gate_up_bias_at, 2 * F, gate_up_bias)
            read_numbers(is_float32, down_bias_at, D, down_bias)
        last = first + counts_r[index]
        while first < last:
            count = min(_TILE, last - first)
            # Here and not before the loop: an array ends with its last use, whatever its address.
            x_at, h_at = address_of(x_rows), address_of(h_rows)
            for t in range(count):
                row = x + rows_N[first + t] * D * size
                _copy_row(arithmetic, row, D, x_at + t * x_stride)
            to, stride = gates.ctypes.data, gates.shape[1] * 4
            multiply_block(kind, x_at, x_stride, count, gate_up_at, D_steps, F2_panels, to, stride)
            for t in range(count):
                if gate_up_bias_at:
                    for f in range(2 * F):
                        gates[t, f] += gate_up_bias[f]
                _gate(gates[t], F, alpha, limit)
                write_numbers(not is_pairs, h_at + t * h_stride, F, gates[t])
            to, stride = sums.ctypes.data, sums.shape[1] * 4
            multiply_block(kind, h_at, h_stride, count, down_at, F_steps, D_panels, to, stride)
            for t in range(count):
                if down_bias_at:
                    for d in range(D):
                        sums[t, d] += down_bias[d]
                write_numbers(True, y + (first + t) * D * 4, D, sums[t])
            first += count


_EXPERTS: Final = register_part(PartNumber.RUN_EXPERTS, _experts_part)


@compiled
def _add_part(args: int, begin: int, end: int) -> None:
    """Add columns 16 * begin to 16 * end of the pairs' outputs; args: rows, weights, y, out, N, D.

    In the order of the pairs, so that threads do not change a sum.
    """
    rows, weights, y, out, N, D = carray(int64_at(args), (6,))
    rows_N, weights_N = carray(int64_at(rows), (N,)), carray(float32_at(weights), (N,))
    first, columns = begin * LANES, min(D, end * LANES) - begin * LANES
    for n in range(N):
        y_n = carray(float32_at(y + (n * D + first) * 4), (columns,))
        out_n = carray(float32_at(out + (rows_N[n] * D + first) * 4), (columns,))
        weight = weights_N[n]
        for d in range(columns):
            out_n[d] += weight * y_n[d]


_ADD: Final = register_part(PartNumber.ADD_WEIGHTED, _add_part)
_ADD_ELEMENTS = 1 << 15


@compiled
def add_weighted(pool: int, rows: int, weights: int, y: int, out: int, N: int, D: int) -> None:
    """Add weights float32 [N] times y [N, D] to rows int64 [N] of out [U, D] float32."""
    args = np.array((rows, weights, y, out, N, D))
    least = 1 + _ADD_ELEMENTS // (LANES * max(1, N))
    run_parts(pool, _ADD, args, (D + LANES - 1) // LANES, least)


@compiled
def run_experts(
    pool: int, kind: int, x: int, rows: int, gate_up: int, down: int, experts: int, counts: int,
    num_experts: int, D: int, F: int, alpha: float, limit: float, y: int,
) -> None:  # fmt: skip
    """Write each pair's unweighted expert output to y [N, D] float32, in the pool's threads.

    x: rows [U, D]; `rows` int64 [N] selects the pairs' rows, in the order of `experts` int64 with
    `counts` int64 pairs each. gate_up, down: int64 [e, 2], addresses of panels and bias. limit 0:
    SwiGLU, otherwise gpt-oss's clamped gate with `alpha`.
    """
    clamp = float_bits(alpha), float_bits(limit)
    args = np.array((kind, x, rows, gate_up, down, experts, counts, D, F, *clamp, y))
    run_parts(pool, _EXPERTS, args, num_experts, 1)
