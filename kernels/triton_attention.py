"""Attention over pages as triton kernels. Imported only if triton is installed.

A program computes a tile's rows for some query heads of one KV head, which are the rows of its
products: row m is token m // HEADS, head m % HEADS. A head's D elements are two parts, of powers of
two: the second begins at D1. With latents (SHARED) the values are the keys' first part.
"""

# mypy: disable-error-code="untyped-decorator, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.pages import TILE_COLUMNS, TILE_HEADS, PagedPart, next_power_of_2

_LOG2_E = tl.constexpr(1.4426950408889634)
_COLUMNS = tl.constexpr(TILE_COLUMNS)
_LEAST = 16  # rows, columns and depth of a product


@triton.jit
def _lowest(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the lowest position that a row sees."""
    low = position * 0
    if WINDOW:
        low = position - position % WINDOW if CHUNKED else tl.maximum(position - WINDOW + 1, 0)
    return low


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    blocks_ptr,
    tiles_ptr,
    sinks_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    scale,
    q_stride,
    W,
    BT: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    KEYS: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    tile = tiles_ptr + tl.program_id(0) * _COLUMNS
    g, group, split = tl.program_id(1) % G, tl.program_id(1) // G, tl.program_id(2)
    first, count, start = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    table, place = tl.load(tile + 3).to(tl.int64), tl.load(tile + 4).to(tl.int64)
    stop = start + count
    begin, end = _lowest(start, WINDOW, CHUNKED), stop
    if place >= 0:
        begin += split * SPLIT
        end = tl.minimum(begin + SPLIT, stop)
    elif split > 0:
        begin = stop
    if (begin < end) & (count > 0):
        m = tl.arange(0, M)
        row, r = m // HEADS, group * HEADS + m % HEADS
        is_row = (row < count) & (r < R)
        position, head = start + row, (g * R + r).to(tl.int64)
        i1, i2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
        at = q_ptr + (first + row) * q_stride + head * D
        q1 = tl.load(at[:, None] + i1, mask=is_row[:, None] & (i1 < D), other=0.0)
        if D > D1:
            q2 = tl.load(at[:, None] + i2, mask=is_row[:, None] & (i2 < D), other=0.0)
        largest = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        sums1 = tl.zeros((M, D1), tl.float32)
        if (D > D1) & (not SHARED):
            sums2 = tl.zeros((M, D2), tl.float32)
        for key in range(begin, end, KEYS):
            n = key + tl.arange(0, KEYS)
            is_key = n < end
            block = tl.load(blocks_ptr + table * W + n // BT, mask=is_key, other=0).to(tl.int64)
            place_n = ((block * BT + n % BT) * G + g) * D
            k1 = tl.load(k_ptr + place_n[:, None] + i1, mask=is_key[:, None] & (i1 < D), other=0.0)
            scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
            if D > D1:
                k2 = tl.load(
                    k_ptr + place_n[:, None] + i2, mask=is_key[:, None] & (i2 < D), other=0.0
                )
                scores += tl.dot(q2, tl.trans(k2), input_precision="ieee")
            low = _lowest(position, WINDOW, CHUNKED)
            is_seen = is_key[None, :] & (n[None, :] <= position[:, None])
            is_seen &= n[None, :] >= low[:, None]
            scores = tl.where(is_seen, scores * scale, float("-inf"))
            now = tl.maximum(largest, tl.max(scores, axis=1))
            base = tl.where(now == float("-inf"), 0.0, now)  # rows that see no key so far
            probs, kept = tl.exp2(scores - base[:, None]), tl.exp2(largest - base)
            total, largest = total * kept + tl.sum(probs, axis=1), now
            probs = probs.to(k1.dtype)
            if SHARED:
                v1 = k1
            else:
                v1 = tl.load(
                    v_ptr + place_n[:, None] + i1, mask=is_key[:, None] & (i1 < D), other=0.0
                )
            sums1 = sums1 * kept[:, None] + tl.dot(probs, v1, input_precision="ieee")
            if (D > D1) & (not SHARED):
                v2 = tl.load(
                    v_ptr + place_n[:, None] + i2, mask=is_key[:, None] & (i2 < D), other=0.0
                )
                sums2 = sums2 * kept[:, None] + tl.dot(probs, v2, input_precision="ieee")
        if place >= 0:
            at_split = (place + split) * G * R + head
            tl.store(stats_ptr + 2 * at_split, largest, mask=is_row)
            tl.store(stats_ptr + 2 * at_split + 1, total, mask=is_row)
            out = sums_ptr + at_split * V
            tl.store(out[:, None] + i1, sums1, mask=is_row[:, None] & (i1 < V))
            if (D > D1) & (not SHARED):
                tl.store(out[:, None] + i2, sums2, mask=is_row[:, None] & (i2 < V))
        else:
            if SINKS:
                sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
                sink *= _LOG2_E
                now = tl.maximum(largest, sink)
                kept = tl.exp2(largest - now)
                total = total * kept + tl.exp2(sink - now)
                sums1 *= kept[:, None]
                if (D > D1) & (not SHARED):
                    sums2 *= kept[:, None]
            divisor = tl.where(is_row, total, 1.0)[:, None]
            kind = out_ptr.dtype.element_ty
            to = out_ptr + ((first + row) * G * R + head) * V
            tl.store(to[:, None] + i1, (sums1 / divisor).to(kind), mask=is_row[:, None] & (i1 < V))
            if (D > D1) & (not SHARED):
                values = (sums2 / divisor).to(kind)
                tl.store(to[:, None] + i2, values, mask=is_row[:, None] & (i2 < V))


@triton.jit
def _combine(
    tiles_ptr,
    sinks_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    H,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, h = tiles_ptr + tl.program_id(0) * _COLUMNS, tl.program_id(1).to(tl.int64)
    first, start = tl.load(tile).to(tl.int64), tl.load(tile + 2)
    place = tl.load(tile + 4).to(tl.int64)
    if place >= 0:
        i = tl.arange(0, BLOCK)
        keys = start + 1 - _lowest(start, WINDOW, CHUNKED)
        largest, total = start * 0 - float("inf"), start * 0.0
        sums = tl.zeros((BLOCK,), tl.float32)
        for split in range((keys + SPLIT - 1) // SPLIT):
            at = (place + split) * H + h
            found = tl.load(stats_ptr + 2 * at)
            now = tl.maximum(largest, found)
            kept, weight = tl.exp2(largest - now), tl.exp2(found - now)
            total = total * kept + tl.load(stats_ptr + 2 * at + 1) * weight
            values = tl.load(sums_ptr + at * V + i, mask=i < V, other=0.0)
            sums, largest = sums * kept + values * weight, now
        if SINKS:
            sink = tl.load(sinks_ptr + h).to(tl.float32) * _LOG2_E
            now = tl.maximum(largest, sink)
            kept = tl.exp2(largest - now)
            total, sums = total * kept + tl.exp2(sink - now), sums * kept
        kind = out_ptr.dtype.element_ty
        tl.store(out_ptr + (first * H + h) * V + i, (sums / total).to(kind), mask=i < V)


def sizes(R: int, D: int, V: int, tile_rows: int, *, shared: bool) -> dict[str, int]:
    """Return heads, rows and keys of a program, parts of a head, and warps.

    V, of a shared value, is within the first part of a key.
    """
    below = 1 << (D.bit_length() - 1)
    D1 = below if below == D or not shared or below >= V else 2 * below
    D1, rest = max(_LEAST, D1), max(0, D - max(_LEAST, D1))
    D2 = max(_LEAST, next_power_of_2(rest)) if rest else _LEAST
    heads = min(TILE_HEADS, next_power_of_2(R))
    M = max(_LEAST, heads * next_power_of_2(tile_rows))
    is_large = M >= 64 or D1 > 256
    keys = 64 if D1 <= 128 else 32 if D1 <= 256 else 16
    return {"HEADS": heads, "M": M, "KEYS": keys, "D1": D1, "D2": D2,
            "num_warps": 8 if is_large else 4, "num_stages": 2}  # fmt: skip


def attend(
    q_THd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    part: PagedPart,
    out_THv: Tensor,
    scale: float,
    sinks_H: Tensor | None,
    partial: tuple[Tensor, Tensor],
) -> None:
    """Write tiles' rows of out, or the results of their splits: sums and (largest, total)."""
    (_, H, D), G, V = q_THd.shape, k_pool_PGd.shape[1], out_THv.shape[2]
    shared = k_pool_PGd.data_ptr() == v_pool_PGd.data_ptr()
    chosen = sizes(H // G, D, V, part.tile_rows, shared=shared)
    blocks_BW, block_tokens = part.pages
    groups = triton.cdiv(H // G, chosen["HEADS"])
    _attend[(len(part.tiles), G * groups, part.longest)](
        q_THd,
        k_pool_PGd,
        v_pool_PGd,
        blocks_BW,
        part.tiles,
        q_THd if sinks_H is None else sinks_H,
        out_THv,
        *partial,
        scale * _LOG2_E.value,
        q_THd.stride(0),
        blocks_BW.stride(0),
        BT=block_tokens,
        G=G,
        R=H // G,
        D=D,
        V=V,
        SINKS=sinks_H is not None,
        SHARED=shared,
        **_seen(part),
        **chosen,
    )


def combine(
    part: PagedPart, out_THv: Tensor, sinks_H: Tensor | None, partial: tuple[Tensor, Tensor]
) -> None:
    """Write the rows of tiles that have several splits."""
    H, V = out_THv.shape[1:]
    sinks = out_THv if sinks_H is None else sinks_H
    _combine[(len(part.tiles), H)](
        part.tiles, sinks, out_THv, *partial, H, V=V, SINKS=sinks_H is not None,
        BLOCK=next_power_of_2(V), **_seen(part),
    )  # fmt: skip


def _seen(part: PagedPart) -> dict[str, Any]:
    seen = part.seen
    return {"WINDOW": seen.window, "CHUNKED": seen.chunked, "SPLIT": seen.split_keys}
