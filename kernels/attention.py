"""Causal attention over a ragged batch with keys and values in a paged pool.

A plan is made once per micro-batch and window, and used at every layer. Sequences with one new
token (decode) are attended together, padded to groups of similar context, and so are short ones
(kernels/short_attention.py); all others one by one.

Shapes: T new tokens, H query heads, G KV heads, R = H / G, d head dim, S context, P pool slots. KV
heads are never repeated in memory: R query heads share one through a stride-0 view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.packed_attention import PackedPart, attend_packed, packed_part
from kernels.rows import Keys, SequenceRows, padded_slots, take
from kernels.short_attention import ShortPart, attend_short, short_part, split_short
from kernels.sinks import attend_with_sinks
from kernels.steps import Steps
from kernels.tiles import Masks, Tile, tile_bounds, tile_steps

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
class AttentionPlan:
    prefill: tuple[PrefillPart, ...]
    decode: tuple[DecodePart, ...]
    short: tuple[ShortPart, ...] = ()
    packed: PackedPart | None = None  # then all other parts are empty


def plan_attention(
    sequences: Sequence[SequenceRows],
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    short_together: bool = False,
    packed: bool = False,
) -> AttentionPlan:
    """Plan the attention of a batch.

    window W: position p sees p-W+1 .. p; None: all positions up to p. dtype: of the queries.
    short_together: pad short sequences to groups (not with sinks or latents). packed: one call for
    all sequences (not with sinks); requires `supports_packed`.
    """
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
    decode = tuple(
        _decode_part(group, window, dtype, device) for group in _decode_groups(singles, window)
    )
    short = tuple(short_part(group, dtype, device) for group in groups)
    return AttentionPlan(prefill, decode, short)


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
    """Return [T, H, d]; a step is a tile, or a group of short sequences.

    The new k and v must already be in the pool. sinks_H: a score per head that counts in the
    softmax without a value.
    """
    if plan.packed is not None:
        return attend_packed(q_THd, k_TGd, v_TGd, k_pool_PGd, v_pool_PGd, plan.packed, scale)
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
        q, out = q_TGRd[rows], out_TGRd[rows]
        yield from tile_steps(q, k_SGd, v_SGd, part.tiles, out, scale, sinks_GR)
    for short in plan.short:
        attend_short(q_TGRd, k_pool_PGd, v_pool_PGd, short, out_TGRd, scale)
        yield
    for group in plan.decode:
        B = group.rows_B.shape[0]
        q_BGRd = q_TGRd.index_select(0, group.rows_B)
        k_BGSd = take(k_pool_PGd, group.keys).view(B, group.width, G, d).transpose(1, 2)
        v_BGSd = take(v_pool_PGd, group.keys).view(B, group.width, G, d).transpose(1, 2)
        attended = _decode(q_BGRd, k_BGSd, v_BGSd, group.mask, scale, sinks_GR)
        out_TGRd.index_copy_(0, group.rows_B, attended)
        yield
    return out_THd


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


def _width(seq: SequenceRows, window: int | None) -> int:
    return seq.context if window is None else min(seq.context, window)


def _decode_groups(singles: Sequence[SequenceRows], window: int | None) -> list[list[SequenceRows]]:
    """Sort by width, longest first, and cut into groups that are padded to their longest."""
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
    slots_BS = padded_slots(newest, width)
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
