"""Causal attention over a ragged batch with keys and values in a paged pool.

A plan is made once per micro-batch and window, and used at every layer. On the CPU a compiled call
attends to keys and values in place (kernels/attention_ops.py). Elsewhere sequences with one new
token (decode) are padded to groups of similar context, short ones are padded to groups too
(kernels/packed_attention.py), and all others are attended one by one.

Shapes: T new tokens, H query heads, G KV heads, R = H / G, d head dim, S context, P pool slots. KV
heads are never repeated in memory: R query heads share one through a stride-0 view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.attention_ops import attend
from kernels.device import upload
from kernels.packed_attention import (
    Keys,
    PackedPart,
    SequenceRows,
    ShortPart,
    attend_packed,
    attend_short,
    packed_part,
    padded_slots,
    short_part,
    split_short,
    take,
)
from kernels.row_ops import COMPILED_DTYPES
from kernels.sinks import attend_with_sinks
from kernels.steps import Steps
from kernels.thread_pool import shared_pool

_TILE_ROWS = 128  # smaller tiles skip more but need more calls


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Query rows q_first..q_last against context positions k_first..k_last.

    Row i of the tile is at its key offset + i. mask [rows, keys] is additive; a causal tile is a
    plain lower triangle without a mask.
    """

    q_first: int
    q_last: int
    k_first: int
    k_last: int
    offset: int
    causal: bool
    mask: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.q_first, self.q_last)

    @property
    def keys(self) -> slice:
        return slice(self.k_first, self.k_last)


def tile_bounds(start: int, count: int, window: int | None, *, whole: bool) -> list[Tile]:
    """Return tiles, without masks, of rows at positions start .. start+count-1.

    whole: a sequence without earlier context is one tile (a fused kernel skips inside).
    """
    full = window is None or window >= count
    if start == 0 and full and whole:
        return [Tile(0, count, 0, count, offset=0, causal=True)]
    tiles = []
    for q_first in range(0, count, _TILE_ROWS):
        q_last = min(q_first + _TILE_ROWS, count)
        oldest = start + q_first
        k_first = 0 if window is None else max(0, oldest - window + 1)
        offset = oldest - k_first
        tiles.append(Tile(q_first, q_last, k_first, start + q_last, offset, causal=False))
    return tiles


class Masks:
    """One additive mask for all tiles.

    The mask at row i and key j depends only on offset + i - j, so a tile's mask is a view of the
    one with the largest offset:

        offset 3, the largest     0 0 0 0 - -      offset 1      | 0 0 - - |
                                  0 0 0 0 0 -                    | 0 0 0 - |
    """

    def __init__(self, tiles: Sequence[Tile], window: int | None, device: torch.device) -> None:
        masked = [tile for tile in tiles if not tile.causal]
        if not masked:
            return
        rows = max(tile.q_last - tile.q_first for tile in masked)
        self._offset = max(tile.offset for tile in masked)
        distance = torch.arange(rows).unsqueeze(1) + self._offset
        distance = distance - torch.arange(self._offset + rows)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        self._mask = mask.to(device)

    def add_to(self, tile: Tile) -> Tile:
        if tile.causal:
            return tile
        first = self._offset - tile.offset
        keys = tile.k_last - tile.k_first
        rows = tile.q_last - tile.q_first
        return dataclasses.replace(tile, mask=self._mask[:rows, first : first + keys])


def tile_steps(
    q_TGRd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    tiles: tuple[Tile, ...],
    out_TGRd: Tensor,
    scale: float,
    sinks_GR: Tensor | None = None,
) -> Steps[None]:
    """Write one sequence's attention of [T, G, R, d] to out_TGRd."""
    if sinks_GR is not None:
        yield from _with_sinks(q_TGRd, k_SGd, v_SGd, tiles, out_TGRd, scale, sinks_GR)
    else:
        yield from _fused(q_TGRd, k_SGd, v_SGd, tiles, out_TGRd, scale)


def _fused(
    q_TGRd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    tiles: tuple[Tile, ...],
    out_TGRd: Tensor,
    scale: float,
) -> Steps[None]:
    """Put KV heads into the batch dim, and the R queries of each into the head dim."""
    R = q_TGRd.shape[2]
    q_GRTd = q_TGRd.permute(1, 2, 0, 3)
    out_GRTd = out_TGRd.permute(1, 2, 0, 3)
    k_GRSd = k_SGd.transpose(0, 1).unsqueeze(1).expand(-1, R, -1, -1)
    v_GRSd = v_SGd.transpose(0, 1).unsqueeze(1).expand(-1, R, -1, -1)
    for tile in tiles:
        rows, keys = tile.rows, tile.keys
        out_GRTd[:, :, rows] = functional.scaled_dot_product_attention(
            q_GRTd[:, :, rows],
            k_GRSd[:, :, keys],
            v_GRSd[:, :, keys],
            attn_mask=None if tile.mask is None else tile.mask.to(q_GRTd.dtype),
            is_causal=tile.causal,
            scale=scale,
        )
        yield


def _with_sinks(
    q_TGRd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    tiles: tuple[Tile, ...],
    out_TGRd: Tensor,
    scale: float,
    sinks_GR: Tensor,
) -> Steps[None]:
    q_GRTd = q_TGRd.permute(1, 2, 0, 3)
    k_GSd, v_GSd = k_SGd.transpose(0, 1), v_SGd.transpose(0, 1)
    for tile in tiles:
        rows, keys = tile.rows, tile.keys
        attended_GRTd = attend_with_sinks(
            q_GRTd[:, :, rows],
            k_GSd[:, keys],
            v_GSd[:, keys],
            sinks_GR,
            mask=tile.mask,
            causal=tile.causal,
            scale=scale,
        )
        out_TGRd[rows] = attended_GRTd.permute(2, 0, 1, 3)
        yield


_STEP_SCORES = 1 << 14  # of a head between two yields: a millisecond or more
_ENTRY_QUERIES = 256  # of a KV head: rows times query heads
_MIN_FILL = 0.75  # smallest fraction of a decode group that is not padding
_GROUP_SLOTS = 4096  # bound of a group's gathered keys, for the cache


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPart:
    """keys: None without earlier context: the fresh rows are the keys."""

    first: int
    count: int
    keys: Keys | None
    tiles: tuple[Tile, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows rows_B with `width` slots each; mask [B, 1, 1, width] hides the padding."""

    rows_B: Tensor
    keys: Keys
    width: int
    mask: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledRows:
    """Rows of sequences for `attention_ops.attend`.

    table: int64 [B, ENTRY_COLUMNS]. slots: the tensors whose addresses it has. steps: bounds of
    entries that are attended between two yields. window 0: none.
    """

    table: NDArray[np.int64]
    slots: tuple[Tensor, ...]
    steps: tuple[tuple[int, int], ...]
    window: int


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    prefill: tuple[PrefillPart, ...]
    decode: tuple[DecodePart, ...]
    rows: CompiledRows | None = None  # on the CPU, in place of `decode` and, if `plain`, `prefill`
    short: tuple[ShortPart, ...] = ()
    packed: PackedPart | None = None  # then all other parts are empty


def plan_attention(
    sequences: Sequence[SequenceRows],
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    group: int = 0,
    short_together: bool = False,
    packed: bool = False,
) -> AttentionPlan:
    """Plan the attention of a batch.

    window W: position p sees p-W+1 .. p; None: all positions up to p. dtype: of the queries. group:
    query heads of a KV head, 0 with latents. short_together: pad short sequences to groups (not
    with sinks or latents). packed: one call for all sequences (not with sinks); requires
    `supports_packed`.
    """
    is_compiled = device.type == "cpu" and dtype in COMPILED_DTYPES
    if is_compiled and group:
        return AttentionPlan((), (), compiled_rows(sequences, window, group))
    if packed:
        return AttentionPlan((), (), packed=packed_part(sequences, window, device))
    groups, others = split_short(sequences, window) if short_together else ([], sequences)
    cut = [
        (seq, tile_bounds(seq.start, seq.count, window, whole=device.type != "cpu"))
        for seq in others
        if seq.count > 1
    ]
    masks = Masks([tile for _, tiles in cut for tile in tiles], window, device)
    prefill = tuple(
        PrefillPart(
            seq.first,
            seq.count,
            None if seq.start == 0 else seq.slots_S,
            tuple(masks.add_to(tile) for tile in tiles),
        )
        for seq, tiles in cut
    )
    singles = [seq for seq in sequences if seq.count == 1]
    short = tuple(short_part(group, dtype, device) for group in groups)
    if singles and is_compiled:
        return AttentionPlan(prefill, (), compiled_rows(singles, window, _ENTRY_QUERIES), short)
    decode = tuple(
        _decode_part(group, window, dtype, device) for group in _decode_groups(singles, window)
    )
    return AttentionPlan(prefill, decode, None, short)


def attention_steps(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Steps[Tensor]:
    """Return [T, H, dim of a value]; a step is a tile, or a group of short sequences.

    The new k and v must already be in the pool. sinks_H: a score per head that counts in the
    softmax without a value.
    """
    if plan.packed is not None:
        return attend_packed(q_THd, k_TGd, v_TGd, k_pool_PGd, v_pool_PGd, plan.packed, scale)
    (T, H, d), (G, v) = q_THd.shape, v_TGd.shape[1:]
    out_THd = torch.empty(T, H, v, dtype=q_THd.dtype, device=q_THd.device)
    q_TGRd = q_THd.view(T, G, H // G, d)
    out_TGRd = out_THd.view(T, G, H // G, v)
    sinks_GR = None if sinks_H is None else sinks_H.view(G, H // G)
    for part in plan.prefill:
        rows = slice(part.first, part.first + part.count)
        k_SGd = k_TGd[rows] if part.keys is None else take(k_pool_PGd, part.keys)
        v_SGd = v_TGd[rows] if part.keys is None else take(v_pool_PGd, part.keys)
        q, out = q_TGRd[rows], out_TGRd[rows]
        yield from tile_steps(q, k_SGd, v_SGd, part.tiles, out, scale, sinks_GR)
    for short in plan.short:
        attend_short(q_TGRd, k_pool_PGd, v_pool_PGd, short, out_TGRd, scale)
        yield
    for group in plan.decode:
        B = group.rows_B.shape[0]
        q_BGRd = q_TGRd.index_select(0, group.rows_B)
        k_BGSd = take(k_pool_PGd, group.keys).view(B, group.width, G, d).transpose(1, 2)
        v_BGSd = take(v_pool_PGd, group.keys).view(B, group.width, G, v).transpose(1, 2)
        attended = _decode(q_BGRd, k_BGSd, v_BGSd, group.mask, scale, sinks_GR)
        out_TGRd.index_copy_(0, group.rows_B, attended)
        yield
    if plan.rows is not None:
        yield from row_steps(q_THd, k_pool_PGd, v_pool_PGd, plan.rows, out_THd, scale, sinks_H)
    return out_THd


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


def _decode(
    q_BGRd: Tensor,
    k_BGSd: Tensor,
    v_BGSd: Tensor,
    mask_B11S: Tensor | None,
    scale: float,
    sinks_GR: Tensor | None,
) -> Tensor:
    if sinks_GR is None:
        return functional.scaled_dot_product_attention(
            q_BGRd, k_BGSd, v_BGSd, attn_mask=mask_B11S, scale=scale
        )
    mask = None if mask_B11S is None else mask_B11S.unsqueeze(1)
    q_BGR1d = q_BGRd.unsqueeze(3)
    return attend_with_sinks(
        q_BGR1d, k_BGSd, v_BGSd, sinks_GR, mask=mask, causal=False, scale=scale
    ).squeeze(3)


def compiled_rows(
    sequences: Sequence[SequenceRows], window: int | None, group: int
) -> CompiledRows:
    """Cut sequences into entries of `attention_ops.attend`, and these into steps.

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


def _decode_groups(singles: Sequence[SequenceRows], window: int | None) -> list[list[SequenceRows]]:
    """Sort by width, longest first, and cut into groups that are padded to their longest."""
    groups: list[list[SequenceRows]] = []
    longest = 0
    for seq in sorted(singles, key=lambda seq: -_width(seq.context, window)):
        width = _width(seq.context, window)
        fits = groups and (len(groups[-1]) + 1) * longest <= _GROUP_SLOTS
        if fits and width >= _MIN_FILL * longest:
            groups[-1].append(seq)
        else:
            groups.append([seq])
            longest = width
    return groups


def _decode_part(
    group: Sequence[SequenceRows], window: int | None, dtype: torch.dtype, device: torch.device
) -> DecodePart:
    widths = [_width(seq.context, window) for seq in group]
    width = widths[0]
    rows = np.array([seq.first for seq in group])
    newest = [_newest(seq.host_keys, width) for seq, width in zip(group, widths, strict=True)]
    only = newest[0]
    if len(group) == 1 and isinstance(only, slice):
        return DecodePart(upload([rows], device)[0], only, width, None)
    arrays = [rows, np.array(widths), padded_slots(newest, width).ravel()]
    rows_B, widths_B, slots_N = upload(arrays, device)
    mask = None
    if min(widths) < width:
        hidden_BS = torch.arange(width, device=device) >= widths_B.unsqueeze(1)
        mask = torch.zeros(hidden_BS.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(hidden_BS, float("-inf")).view(len(group), 1, 1, width)
    return DecodePart(rows_B, slots_N, width, mask)


def _newest(keys: slice | NDArray[np.int64], width: int) -> slice | NDArray[np.int64]:
    if isinstance(keys, slice):
        return slice(keys.stop - width, keys.stop)
    return keys[len(keys) - width :]
