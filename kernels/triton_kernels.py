"""Memory-bound passes over activations as one triton kernel each, and products with experts.

They round where torch's operations do in kernels/fused_ops.py, which imports them only if triton is
installed, and in experts.py.

Shapes: T tokens, H heads, d head dim, D model dim, F FFN dim, N (token, expert) pairs, K top-k, S
slots.
"""

# mypy: disable-error-code="untyped-decorator, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import ExpertLinears
from kernels.stored import Storage

_HEADS = 16  # per program
_OUTPUTS, _INPUTS = 8, 256  # of a product, per program and iteration
_ROW_BLOCK = 1024  # elements of a row per program: whole long rows do not fit the registers
_PLAIN = tl.constexpr(int(Storage.PLAIN))
_MXFP4 = tl.constexpr(int(Storage.MXFP4))
_FP8 = tl.constexpr(int(Storage.FP8))


@triton.jit
def _norm(x_ptr, w_ptr, out_ptr, D, eps, ONCE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * D
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + i, mask=i < D, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + i, mask=i < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / D + eps)
    if not ONCE:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + at + i, (y * w).to(out_ptr.dtype.element_ty), mask=i < D)


@triton.jit
def _rope(
    x_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    H,
    half,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    in_bounds = (h < H) & (i < half)
    kind = out_ptr.dtype.element_ty
    at = h * 2 * half + i
    first = tl.load(x_ptr + t * token_stride + at, mask=in_bounds, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + t * token_stride + at + half, mask=in_bounds, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        w_first = tl.load(w_ptr + at, mask=in_bounds, other=0.0).to(tl.float32)
        w_second = tl.load(w_ptr + at + half, mask=in_bounds, other=0.0).to(tl.float32)
        first = (first * scale).to(kind).to(tl.float32)
        second = (second * scale).to(kind).to(tl.float32)
        first = (first * w_first).to(kind).to(tl.float32)
        second = (second * w_second).to(kind).to(tl.float32)
    cos = tl.load(cos_ptr + t * half + i, mask=i < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + t * half + i, mask=i < half, other=0.0).to(tl.float32)
    rotated_first = (first * cos).to(kind).to(tl.float32) - second * sin
    rotated_second = (second * cos).to(kind).to(tl.float32) + first * sin
    out = out_ptr + t * H * 2 * half + at
    tl.store(out, rotated_first.to(kind), mask=in_bounds)
    tl.store(out + half, rotated_second.to(kind), mask=in_bounds)


@triton.jit
def _gate(h_ptr, out_ptr, count_ptr, F, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = F
    if COUNTED:
        width = tl.where(n < tl.load(count_ptr), F, 0)
    kind = out_ptr.dtype.element_ty
    gate = tl.load(h_ptr + n * 2 * F + i, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + n * 2 * F + F + i, mask=i < width, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + n * F + i, (silu * up).to(kind), mask=i < width)


@triton.jit
def _sum(
    y_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    count_ptr,
    D,
    K: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places_ptr + t * K + k)
        weight = tl.load(weights_ptr + t * K + k)
        width = D
        if COUNTED:
            width = tl.where(place < tl.load(count_ptr), D, 0)
        total += weight * tl.load(y_ptr + place * D + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * D + i, total, mask=i < D)


@triton.jit
def _take(x_ptr, rows_ptr, out_ptr, count_ptr, D, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = D
    if COUNTED:
        width = tl.where(n < tl.load(count_ptr), D, 0)
    row = tl.load(rows_ptr + n)
    tl.store(out_ptr + n * D + i, tl.load(x_ptr + row * D + i, mask=i < width), mask=i < width)


@triton.jit
def _pack(
    x_ptr,
    rows_ptr,
    pairs_ptr,
    counts_ptr,
    x_out_ptr,
    pairs_out_ptr,
    counts_out_ptr,
    absent,
    D,
    e,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PAIRS)
    pairs = tl.load(pairs_ptr + c * 2 * K + k, mask=k < 2 * K, other=0)
    tl.store(pairs_out_ptr + c * 2 * K + k, pairs, mask=k < 2 * K)
    if c == 0:
        j = tl.arange(0, EXPERTS)
        tl.store(counts_out_ptr + j, tl.load(counts_ptr + j, mask=j < e), mask=j < e)
    least = tl.min(tl.where(k < K, pairs, absent), axis=0)
    if least < absent:
        row = tl.load(rows_ptr + c)
        for first in range(0, D, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * D + i, mask=i < D)
            tl.store(x_out_ptr + c * D + i, x, mask=i < D)


@triton.jit
def _add(total_ptr, rows_ptr, y_ptr, D, BLOCK: tl.constexpr):
    c = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = total_ptr + tl.load(rows_ptr + c) * D + i
    kind = total_ptr.dtype.element_ty
    y = tl.load(y_ptr + c * D + i, mask=i < D, other=0.0).to(kind).to(tl.float32)
    total = tl.load(at, mask=i < D, other=0.0).to(tl.float32) + y
    tl.store(at, total.to(kind), mask=i < D)


@triton.jit
def _slot_gated(
    x_ptr,
    slots_ptr,
    w_ptr,
    out_ptr,
    K,
    D: tl.constexpr,
    F: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot >= 0:
        f = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
        rows = w_ptr + slot * 2 * F * D + f * D
        gates = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
        ups = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
        for first in range(0, D, INPUTS):
            d = first + tl.arange(0, INPUTS)[None, :]
            in_bounds = (f < F) & (d < D)
            x = tl.load(x_ptr + (n // K) * D + d, mask=d < D, other=0.0).to(tl.float32)
            gates += x * tl.load(rows + d, mask=in_bounds, other=0.0).to(tl.float32)
            ups += x * tl.load(rows + F * D + d, mask=in_bounds, other=0.0).to(tl.float32)
        kind = out_ptr.dtype.element_ty
        gate = tl.sum(gates, axis=1)[:, None].to(kind).to(tl.float32)
        up = tl.sum(ups, axis=1)[:, None].to(kind).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        tl.store(out_ptr + n * F + f, (silu * up).to(kind), mask=f < F)


@triton.jit
def _slot_product(
    x_ptr,
    slots_ptr,
    w_ptr,
    out_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot >= 0:
        d = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
        rows = w_ptr + slot * D * F + d * F
        sums = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
        for first in range(0, F, INPUTS):
            f = first + tl.arange(0, INPUTS)[None, :]
            x = tl.load(x_ptr + n * F + f, mask=f < F, other=0.0).to(tl.float32)
            sums += x * tl.load(rows + f, mask=(d < D) & (f < F), other=0.0).to(tl.float32)
        y = tl.sum(sums, axis=1)[:, None].to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + n * D + d, y, mask=d < D)


@triton.jit
def _unpacked(
    codes_ptr,
    scales_ptr,
    n,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return weights [OUTPUTS, INPUTS] of outputs n from input `first` on."""
    n = n[:, None]
    if KIND == _MXFP4:
        byte = first // 2 + tl.arange(0, INPUTS // 2)[None, :]
        both = tl.load(codes_ptr + n * (K // 2) + byte, mask=(n < N) & (byte < K // 2), other=0)
        codes = tl.interleave(both & 15, both >> 4).to(tl.uint16)
        bits = ((codes & 7) << 9) | ((codes & 8) << 12)  # of a float16 that is too small by 2**14
        group = first // 32 + tl.arange(0, INPUTS // 32)[None, :]
        at = n * (K // 32) + group
        exponents = tl.load(scales_ptr + at, mask=(n < N) & (group < K // 32), other=0)
        scales = (exponents.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        small = tl.reshape(bits.to(tl.float16, bitcast=True), (OUTPUTS, INPUTS // 32, 32))
        numbers = small.to(tl.float32) * 16384.0 * scales[:, :, None]
        weights = tl.reshape(numbers, (OUTPUTS, INPUTS))
    else:
        k = first + tl.arange(0, INPUTS)[None, :]
        codes = tl.load(codes_ptr + n * K + k, mask=(n < N) & (k < K), other=0)
        if KIND == _PLAIN:
            weights = codes
        else:
            at = n * ((K + 127) // 128) + first // 128
            scales = tl.load(scales_ptr + at, mask=n < N, other=0.0)
            if KIND == _FP8:
                codes = codes.to(tl.uint16)
                bits = ((codes & 127) << 7) | ((codes & 128) << 8)  # a float16 too small by 2**8
                weights = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scales
            else:
                weights = codes.to(tl.float32) * scales
    return weights


@triton.jit
def _grouped(
    x_ptr,
    ends_ptr,
    offsets_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    e,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    j = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + j, mask=j < e, other=0)
    starts = tl.load(ends_ptr + j - 1, mask=(j > 0) & (j < e), other=0)
    tiles = (ends - starts + ROWS - 1) // ROWS
    after, tile = tl.cumsum(tiles, 0), tl.program_id(1)
    expert = tl.sum((after <= tile).to(tl.int32), axis=0)
    if expert < e:
        here = starts + (tile - after + tiles) * ROWS
        first = tl.sum(tl.where(j == expert, here, 0), axis=0)
        end = tl.sum(tl.where(j == expert, ends, 0), axis=0)
        codes_at = tl.load(offsets_ptr + expert)
        if ALIGNED:
            codes_at = tl.multiple_of(codes_at, ALIGNED)
        codes, scales = codes_ptr + codes_at, scales_ptr + tl.load(offsets_ptr + e + expert)
        m = (first + tl.arange(0, ROWS)).to(tl.int64)[None, :]
        n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        kind = x_ptr.dtype.element_ty
        total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for at in range(0, K, INPUTS):
            k = at + tl.arange(0, INPUTS)[:, None]
            x = tl.load(x_ptr + m * K + k, mask=(m < end) & (k < K), other=0.0)
            w = _unpacked(codes, scales, n, at, N, K, KIND, OUTPUTS, INPUTS)
            total = tl.dot(w.to(kind), x, total)
        n = n[:, None]
        if BIAS:
            bias = bias_ptr + tl.load(offsets_ptr + 2 * e + expert) + n
            total += tl.load(bias, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + n, total.to(kind), mask=(m < end) & (n < N))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, round_once: bool) -> Tensor:
    """Return the RMS norm of a contiguous x."""
    out, D = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(D)
    _norm[(x.numel() // D,)](
        x, weight_D, out, D, eps, ONCE=round_once, BLOCK=block, num_warps=norm_warps(block)
    )
    return out


def norm_and_rope(
    x_THd: Tensor, weight_Hd: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Apply each head's RMS norm (weight None: none), then rope. x may be strided by token."""
    T, H, d = x_THd.shape
    out_THd = torch.empty((T, H, d), dtype=x_THd.dtype, device=x_THd.device)
    _rope[(T, triton.cdiv(H, _HEADS))](
        x_THd,
        x_THd if weight_Hd is None else weight_Hd,
        cos,
        sin,
        out_THd,
        x_THd.stride(0),
        H,
        d // 2,
        eps,
        NORM=weight_Hd is not None,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(d // 2),
    )
    return out_THd


def norm_warps(block: int) -> int:
    """Return the warps of a norm, whose row must fit the registers of a program."""
    return max(4, min(16, block // 1024))


def _block(size: int) -> int:
    """Return the elements of a row per program."""
    return min(_ROW_BLOCK, int(triton.next_power_of_2(size)))


def gated(h_NF2: Tensor, count: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, [N, F], of a contiguous h. count: rows to compute, on the device."""
    N, F = h_NF2.shape[0], h_NF2.shape[1] // 2
    out_NF = torch.empty(N, F, dtype=h_NF2.dtype, device=h_NF2.device)
    grid, given = (N, triton.cdiv(F, _block(F))), h_NF2 if count is None else count
    _gate[grid](h_NF2, out_NF, given, F, COUNTED=count is not None, BLOCK=_block(F))
    return out_NF


def gather_rows(x_TD: Tensor, rows_N: Tensor, count: Tensor | None = None) -> Tensor:
    """Return x[rows], [N, D], of a contiguous x. count: rows to copy, on the device."""
    N, D = rows_N.shape[0], x_TD.shape[1]
    out_ND = torch.empty(N, D, dtype=x_TD.dtype, device=x_TD.device)
    grid, given = (N, triton.cdiv(D, _block(D))), rows_N if count is None else count
    _take[grid](x_TD, rows_N, out_ND, given, D, COUNTED=count is not None, BLOCK=_block(D))
    return out_ND


def weighted_sums(
    y_ND: Tensor, places_TK: Tensor, weights_TK: Tensor, out_TD: Tensor, count: Tensor | None = None
) -> None:
    """Fill out_TD float32 with weighted sums of K rows of y. All tensors are contiguous.

    count, on the device: rows of y from there on count as zeros.
    """
    T, K = places_TK.shape
    D = y_ND.shape[1]
    grid, counted = (T, triton.cdiv(D, _block(D))), count is not None
    given = places_TK if count is None else count
    _sum[grid](
        y_ND,
        places_TK,
        weights_TK,
        out_TD,
        given,
        D,
        K=K,
        COUNTED=counted,
        BLOCK=_block(D),
        enable_fp_fusion=False,  # a product is rounded before it is added, as on CPUs
    )


def pack_rows(
    x_TD: Tensor,
    rows_C: Tensor,
    pairs_CM: Tensor,
    counts_e: Tensor,
    x_CD: Tensor,
    pairs_out_CM: Tensor,
    counts_out_e: Tensor,
    absent: int,
) -> None:
    """Fill a packet: x[rows], except rows with absent experts only, pairs, and counts."""
    (C, M), D, e = pairs_CM.shape, x_TD.shape[1], counts_e.shape[0]
    _pack[(C,)](
        x_TD,
        rows_C,
        pairs_CM,
        counts_e,
        x_CD,
        pairs_out_CM,
        counts_out_e,
        absent,
        D,
        e,
        K=M // 2,
        PAIRS=triton.next_power_of_2(M),
        EXPERTS=triton.next_power_of_2(e),
        BLOCK=_block(D),
    )


def add_rows(total_TD: Tensor, rows_C: Tensor, y_CD: Tensor) -> None:
    """Add y to distinct rows of total, rounded to total's dtype."""
    C, D = y_CD.shape
    _add[(C, triton.cdiv(D, _block(D)))](total_TD, rows_C, y_CD, D, BLOCK=_block(D))


def slot_experts(
    x_TD: Tensor, slots_TK: Tensor, gate_up_SND: Tensor, down_SDF: Tensor, y_ND: Tensor
) -> None:
    """Fill the rows of y whose slot (int32) is >= 0: the expert's output for the pair's token.

    Rows are pairs in the order of slots_TK. All tensors are contiguous. A row's bits depend neither
    on its slot nor on other rows.
    """
    T, K = slots_TK.shape
    D, F = down_SDF.shape[1:]
    h_NF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    blocks = {"OUTPUTS": _OUTPUTS, "INPUTS": _INPUTS}
    _slot_gated[(T * K, triton.cdiv(F, _OUTPUTS))](
        x_TD, slots_TK, gate_up_SND, h_NF, K, D, F, **blocks
    )
    _slot_product[(T * K, triton.cdiv(D, _OUTPUTS))](h_NF, slots_TK, down_SDF, y_ND, D, F, **blocks)


def product_tiles(pairs: int, experts: int) -> dict[str, int]:
    """Return the sizes of a program of `_grouped`: few rows where experts have few pairs."""
    rows = min(64, max(16, int(triton.next_power_of_2(triton.cdiv(pairs, experts)))))
    return {"ROWS": rows, "OUTPUTS": 64 if rows < 64 else 128, "INPUTS": 64}


def grouped_products(x_NK: Tensor, linear_e: ExpertLinears, ends_e: Tensor) -> Tensor:
    """Return each expert's product with its rows, [N, N], of a contiguous x. linear_e has a table.

    Rows after the last expert's are not computed. A row's bits do not depend on the others.
    """
    table = linear_e.table
    assert table is not None
    first, codes = table.first, table.first.codes
    (N, K), (rows, e) = first.shape, (len(x_NK), len(linear_e))
    out_NN = torch.empty(rows, N, dtype=x_NK.dtype, device=x_NK.device)
    tiles = product_tiles(rows, e)
    _grouped[(triton.cdiv(N, tiles["OUTPUTS"]), triton.cdiv(rows, tiles["ROWS"]) + min(rows, e))](
        x_NK,
        ends_e,
        table.offsets_3e,
        codes,
        codes if first.scales is None else first.scales,
        x_NK if first.bias_N is None else first.bias_N,
        out_NN,
        e,
        N=N,
        K=K,
        KIND=int(_PLAIN if first.storage is Storage.BFLOAT16 else first.storage),
        BIAS=first.bias_N is not None,
        ALIGNED=16 // codes.element_size() if table.is_aligned else 0,
        EXPERTS=triton.next_power_of_2(e),
        **tiles,
    )
    return out_NN
