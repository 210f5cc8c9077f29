"""Causal attention over a ragged batch whose keys and values lie in a paged pool.

A plan is made once per micro-batch and window, and used at every layer. Sequences with one new
token (decode) are attended together, padded to groups of similar context; the others one by one.

Shapes: T new tokens, H query heads, G KV heads, R = H / G, d head dim, S context, P pool slots.
KV heads are never repeated in memory: R query heads share one through a stride-0 view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.sinks import attend_with_sinks

_TILE_ROWS = 128  # a tile skips the keys it cannot see; smaller ones cost more calls
_MIN_FILL = 0.75  # a decode group is cut where padding would exceed a quarter
_GROUP_SLOTS = 4096  # and where its gathered keys would leave the cache

Keys = slice | Tensor  # pool slots: a run of them (a view, no copy) or a list (a gather)


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch: rows first .. first+count-1 are positions start .. start+count-1.

    slots_S: pool slots of positions 0 .. start+count-1 (a slice where they are consecutive).
    """

    first: int
    count: int
    start: int
    slots_S: Keys

    @property
    def context(self) -> int:
        return self.start + self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Query rows q_first..q_last against context positions k_first..k_last.

    Row i stands at key offset + i of the tile. mask [rows, keys] is additive; a causal tile is a
    plain lower triangle and needs none.
    """

    q_first: int
    q_last: int
    k_first: int
    k_last: int
    offset: int
    causal: bool
    mask: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPart:
    """keys None: the sequence has no earlier context, the fresh rows are its keys."""

    first: int
    count: int
    keys: Keys | None
    tiles: tuple[Tile, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePart:
    """rows_B of the batch, each against `width` slots; mask [B, 1, 1, width] hides the padding."""

    rows_B: Tensor
    keys: Keys
    width: int
    mask: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    prefill: tuple[PrefillPart, ...]
    decode: tuple[DecodePart, ...]


def plan_attention(
    sequences: Sequence[SequenceRows],
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """window W: position p sees p-W+1 .. p. None: all up to p. dtype: that of the queries."""
    cut = [
        (seq, _tile_bounds(seq, window, whole=device.type != "cpu"))
        for seq in sequences
        if seq.count > 1
    ]
    masks = _Masks([tile for _, tiles in cut for tile in tiles], window, dtype, device)
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
    groups = _decode_groups(singles, window)
    decode = tuple(_decode_part(group, window, dtype, device) for group in groups)
    return AttentionPlan(prefill, decode)


def ragged_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[T, H, d]. The new k and v must already be in the pool. sinks_H: a score of each head that
    counts in the softmax, with no value."""
    T, H, d = q_THd.shape
    G = k_TGd.shape[1]
    out_THd = torch.empty(T, H, d, dtype=q_THd.dtype, device=q_THd.device)
    q_TGRd = q_THd.view(T, G, H // G, d)
    out_TGRd = out_THd.view(T, G, H // G, d)
    sinks_GR = None if sinks_H is None else sinks_H.view(G, H // G)
    for part in plan.prefill:
        rows = slice(part.first, part.first + part.count)
        k_SGd = k_TGd[rows] if part.keys is None else take(k_pool_PGd, part.keys)
        v_SGd = v_TGd[rows] if part.keys is None else take(v_pool_PGd, part.keys)
        attend_tiles(q_TGRd[rows], k_SGd, v_SGd, part.tiles, out_TGRd[rows], scale, sinks_GR)
    for group in plan.decode:
        B = group.rows_B.shape[0]
        q_BGRd = q_TGRd.index_select(0, group.rows_B)
        k_BGSd = take(k_pool_PGd, group.keys).view(B, group.width, G, d).transpose(1, 2)
        v_BGSd = take(v_pool_PGd, group.keys).view(B, group.width, G, d).transpose(1, 2)
        attended = _decode(q_BGRd, k_BGSd, v_BGSd, group.mask, scale, sinks_GR)
        out_TGRd.index_copy_(0, group.rows_B, attended)
    return out_THd


def attend_tiles(
    q_TGRd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    tiles: tuple[Tile, ...],
    out_TGRd: Tensor,
    scale: float,
    sinks_GR: Tensor | None = None,
) -> None:
    """Attention of one sequence's queries [T, G, R, d], tile by tile, into out_TGRd.

    KV heads stand in the batch dim, the R queries of each in the head dim.
    """
    R = q_TGRd.shape[2]
    q_GRTd = q_TGRd.permute(1, 2, 0, 3)
    out_GRTd = out_TGRd.permute(1, 2, 0, 3)
    k_GRSd = k_SGd.transpose(0, 1).unsqueeze(1).expand(-1, R, -1, -1)
    v_GRSd = v_SGd.transpose(0, 1).unsqueeze(1).expand(-1, R, -1, -1)
    for tile in tiles:
        rows, keys = slice(tile.q_first, tile.q_last), slice(tile.k_first, tile.k_last)
        if sinks_GR is not None:
            out_GRTd[:, :, rows] = attend_with_sinks(
                q_GRTd[:, :, rows],
                k_GRSd[:, 0, keys],
                v_GRSd[:, 0, keys],
                sinks_GR,
                mask=tile.mask,
                causal=tile.causal,
                scale=scale,
            )
            continue
        out_GRTd[:, :, rows] = functional.scaled_dot_product_attention(
            q_GRTd[:, :, rows],
            k_GRSd[:, :, keys],
            v_GRSd[:, :, keys],
            attn_mask=tile.mask,
            is_causal=tile.causal,
            scale=scale,
        )


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


def take(pool_PGd: Tensor, keys: Keys) -> Tensor:
    """The entries of the pool at `keys`, in order."""
    return pool_PGd[keys] if isinstance(keys, slice) else pool_PGd.index_select(0, keys)


def _tile_bounds(seq: SequenceRows, window: int | None, *, whole: bool) -> list[Tile]:
    """Tiles without masks. whole: a fresh sequence is one tile (a fused kernel skips inside)."""
    full = window is None or window >= seq.count
    if seq.start == 0 and full and (whole or seq.count <= _TILE_ROWS):
        return [Tile(0, seq.count, 0, seq.count, offset=0, causal=True)]
    tiles = []
    for q_first in range(0, seq.count, _TILE_ROWS):
        q_last = min(q_first + _TILE_ROWS, seq.count)
        oldest = seq.start + q_first
        k_first = 0 if window is None else max(0, oldest - window + 1)
        k_last = seq.start + q_last
        tiles.append(Tile(q_first, q_last, k_first, k_last, offset=oldest - k_first, causal=False))
    return tiles


class _Masks:
    """One additive mask for all tiles: what row i sees at key j depends on offset + i - j only, so
    a tile's mask is a view of the one with the largest offset, further to the right.

        offset 3, the largest     0 0 0 0 - -      offset 1      | 0 0 - - |
                                  0 0 0 0 0 -                    | 0 0 0 - |
    """

    def __init__(
        self, tiles: Sequence[Tile], window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        masked = [tile for tile in tiles if not tile.causal]
        rows = max((tile.q_last - tile.q_first for tile in masked), default=0)
        self._offset = max((tile.offset for tile in masked), default=0)
        distance = torch.arange(rows).unsqueeze(1) + self._offset
        distance = distance - torch.arange(self._offset + rows)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        self._mask = mask.to(device)

    def add_to(self, tile: Tile) -> Tile:
        if tile.causal:
            return tile
        first = self._offset - tile.offset
        keys = tile.k_last - tile.k_first
        rows = tile.q_last - tile.q_first
        return dataclasses.replace(tile, mask=self._mask[:rows, first : first + keys])


def _width(seq: SequenceRows, window: int | None) -> int:
    return seq.context if window is None else min(seq.context, window)


def _decode_groups(singles: Sequence[SequenceRows], window: int | None) -> list[list[SequenceRows]]:
    """Sorted by width, longest first, and cut into groups that are padded to their longest."""
    groups: list[list[SequenceRows]] = []
    longest = 0
    for seq in sorted(singles, key=lambda seq: -_width(seq, window)):
        width = _width(seq, window)
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
    widths = [_width(seq, window) for seq in group]
    width = widths[0]
    rows_B = torch.tensor([seq.first for seq in group], device=device)
    newest = [_newest(seq.slots_S, width) for seq, width in zip(group, widths, strict=True)]
    only = newest[0]
    if len(group) == 1 and isinstance(only, slice):
        return DecodePart(rows_B, only, width, None)
    slots_BS = torch.zeros(len(group), width, dtype=torch.int64)
    for row, keys in enumerate(newest):
        slots = torch.arange(keys.start, keys.stop) if isinstance(keys, slice) else keys
        slots_BS[row, : widths[row]] = slots
    mask = None
    if min(widths) < width:
        hidden_BS = torch.arange(width) >= torch.tensor(widths).unsqueeze(1)
        mask = torch.zeros(len(group), width).masked_fill_(hidden_BS, float("-inf"))
        mask = mask.to(device=device, dtype=dtype).view(len(group), 1, 1, width)
    return DecodePart(rows_B, slots_BS.flatten().to(device), width, mask)


def _newest(keys: Keys, width: int) -> Keys:
    if isinstance(keys, slice):
        return slice(keys.stop - width, keys.stop)
    return keys[keys.shape[0] - width :]
