"""Causal attention over a ragged batch with keys and values in a paged pool.

A plan is made once per micro-batch and window, and used at every layer. Keys and values are read in
place: on the CPU by a compiled call (kernels/attention_ops.py), on a device by kernels over block
tables (kernels/paged_attention.py). There prompts without earlier context are one call of torch's
flash attention (kernels/packed_attention.py).

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
from kernels.packed_attention import Keys, PackedPart, SequenceRows, attend_packed, packed_part
from kernels.paged_attention import attend_paged
from kernels.pages import PagedPlan, Pages, Seen, plan_paged
from kernels.steps import Steps
from kernels.thread_pool import shared_pool

_CPU = torch.device("cpu")
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
) -> Steps[None]:
    """Write one sequence's attention of [T, G, R, d] to out_TGRd.

    KV heads are in the batch dim, the R queries of each in the head dim.
    """
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


_STEP_SCORES = 1 << 14  # of a head between two yields: a millisecond or more
_ENTRY_QUERIES = 256  # of a KV head: rows times query heads


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPart:
    """keys: None without earlier context: the fresh rows are the keys."""

    first: int
    count: int
    keys: Keys | None
    tiles: tuple[Tile, ...]


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
    """rows: on the CPU. packed: on a device, then the only part. paged: on a device."""

    prefill: tuple[PrefillPart, ...] = ()
    rows: CompiledRows | None = None
    packed: PackedPart | None = None
    paged: PagedPlan | None = None


def plan_attention(
    sequences: Sequence[SequenceRows], *, window: int | None, group: int = 0
) -> AttentionPlan:
    """Plan the attention of a batch on the CPU.

    window W: position p sees p-W+1 .. p; None: all positions up to p. group: query heads of a KV
    head, 0 with latents.
    """
    if group:
        return AttentionPlan(rows=compiled_rows(sequences, window, group))
    prompts = [seq for seq in sequences if seq.count > 1]
    singles = [seq for seq in sequences if seq.count == 1]
    rows = compiled_rows(singles, window, _ENTRY_QUERIES) if singles else None
    return AttentionPlan(prefill_parts(prompts, window, _CPU, whole=False), rows)


def plan_on_device(
    sequences: Sequence[SequenceRows],
    pages: Pages,
    seen: Seen,
    device: torch.device,
    *,
    group: int,
    packed: bool,
    expands: bool,
) -> AttentionPlan:
    """Plan the attention of a batch on a device.

    group: query heads of a KV head. packed: one call for prompts without earlier context, if the
    batch has nothing else (not with sinks); requires `supports_packed`. expands: such prompts are
    attended one by one, over keys and values of their own rows (with latents).
    """
    numbered = [(table, seq) for table, seq in enumerate(sequences) if seq.count]
    window = seen.window or None
    longest = max(seq.count for _, seq in numbered)
    packed = packed and not any(seq.start for _, seq in numbered)
    if packed and (not seen.chunked or longest <= seen.window):
        return AttentionPlan(packed=packed_part(sequences, window, device))
    fresh, others = list[SequenceRows](), list[tuple[int, SequenceRows]]()
    for table, seq in numbered:
        if expands and seq.start == 0 and seq.count > 1:
            fresh.append(seq)
        else:
            others.append((table, seq))
    paged = plan_paged(others, pages, seen, group, device) if others else None
    return AttentionPlan(prefill_parts(fresh, window, device, whole=True), paged=paged)


def prefill_parts(
    sequences: Sequence[SequenceRows], window: int | None, device: torch.device, *, whole: bool
) -> tuple[PrefillPart, ...]:
    """Return a part for each sequence. whole: as of `tile_bounds`."""
    cut = [(seq, tile_bounds(seq.start, seq.count, window, whole=whole)) for seq in sequences]
    masks = Masks([tile for _, tiles in cut for tile in tiles], window, device)
    return tuple(
        PrefillPart(
            seq.first,
            seq.count,
            None if seq.start == 0 else seq.slots_S,
            tuple(masks.add_to(tile) for tile in tiles),
        )
        for seq, tiles in cut
    )


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
    """Return [T, H, dim of a value], by entries of a compiled call or in one step.

    The new k and v must already be in the pool. sinks_H: a score per head that counts in the
    softmax without a value.
    """
    if plan.packed is not None:
        return attend_packed(q_THd, k_TGd, v_TGd, plan.packed, scale)
    (T, H, _), v = q_THd.shape, v_TGd.shape[2]
    out_THv = torch.empty(T, H, v, dtype=q_THd.dtype, device=q_THd.device)
    if plan.paged is not None:
        rows, pools = slice(plan.paged.first, plan.paged.last), (k_pool_PGd, v_pool_PGd)
        for part in plan.paged.parts:
            attend_paged(q_THd[rows], *pools, part, out_THv[rows], scale, sinks_H)
        yield
    if plan.rows is not None:
        yield from row_steps(q_THd, k_pool_PGd, v_pool_PGd, plan.rows, out_THv, scale, sinks_H)
    return out_THv


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
