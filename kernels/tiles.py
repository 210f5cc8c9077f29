"""Causal attention of a prompt, in tiles of queries that skip keys they cannot see.

On the CPU a large tile is computed KV head by KV head: scores in float32 by oneDNN, softmax,
weighted values; torch's fused kernel has half that rate. Small tiles, and GPUs, use the fused
kernel.

Shapes: T new tokens, H query heads, G KV heads, R = H / G, d head dim, S context. KV heads are
never repeated in memory: R query heads share one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import linear
from kernels.sinks import attend_with_sinks
from kernels.steps import Steps

_TILE_ROWS = 128  # smaller tiles skip more but need more calls
_LONG_SCORES = 1 << 18  # of one KV head: a step of its own, a millisecond or more
_FUSED_SCORES = 1 << 15  # of one KV head; below, the fused kernel is cheaper


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
        rows = max((tile.q_last - tile.q_first for tile in masked), default=0)
        self._offset = max((tile.offset for tile in masked), default=0)
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
    """Write one sequence's attention of [T, G, R, d] to out_TGRd; large tiles by KV head."""
    largest = max(tiles, key=_scores)
    if sinks_GR is not None:
        yield from _with_sinks(q_TGRd, k_SGd, v_SGd, tiles, out_TGRd, scale, sinks_GR)
    elif q_TGRd.device.type == "cpu" and q_TGRd.shape[2] * _scores(largest) >= _FUSED_SCORES:
        yield from _head_by_head(q_TGRd, k_SGd, v_SGd, tiles, out_TGRd, scale)
    else:
        yield from _fused(q_TGRd, k_SGd, v_SGd, tiles, out_TGRd, scale)


def _scores(tile: Tile) -> int:
    return (tile.q_last - tile.q_first) * (tile.k_last - tile.k_first)


def _head_by_head(
    q_TGRd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    tiles: tuple[Tile, ...],
    out_TGRd: Tensor,
    scale: float,
) -> Steps[None]:
    """Stack the R queries of a KV head: one product per tile and head."""
    R, d = q_TGRd.shape[2:]
    k_GSd = k_SGd.transpose(0, 1).float().contiguous()
    v_GSd = v_SGd.transpose(0, 1).contiguous()
    if k_SGd.numel() >= _LONG_SCORES:
        yield
    for tile in tiles:
        rows, keys = tile.rows, tile.keys
        q_GRTd = q_TGRd[rows].permute(1, 2, 0, 3).float() * scale
        T, S = tile.q_last - tile.q_first, tile.k_last - tile.k_first
        for head, (q_RTd, k_Sd, v_Sd) in enumerate(zip(q_GRTd, k_GSd, v_GSd, strict=True)):
            scores = linear(q_RTd.reshape(R * T, d), k_Sd[keys])
            if tile.mask is not None:
                scores.view(R, T, S).add_(tile.mask)
            probs = torch.softmax(scores, dim=-1)
            attended = _weighted(probs, v_Sd[keys])
            out_TGRd[rows, head] = attended.view(R, T, -1).transpose(0, 1)
            if R * T * S >= _LONG_SCORES:
                yield
        yield


def _weighted(probs_NS: Tensor, v_Sd: Tensor) -> Tensor:
    if v_Sd.dtype is torch.float32:
        return linear(probs_NS, v_Sd.t().contiguous())
    return torch.mm(probs_NS.to(v_Sd.dtype), v_Sd)


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
