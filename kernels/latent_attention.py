"""Causal attention over latents: one entry per token, from which each head makes its key and value.

    entry [C] = latent [r] | rotated key [p], shared by all heads
    key of head h = up_k[h] @ latent | rotated key,      value = up_v[h] @ latent

*Expanded*: keys and values of the context are computed, then attended to. *Absorbed*: queries are
multiplied by up_k, attend to the entries, and the result is multiplied by up_v. Multiply-adds per
head, for T new tokens of a sequence of S with N (query, key) pairs:

    expanded  S r (n + v) + N (n + p + v)        absorbed  T r (n + v) + N (2r + p)

Prompts expand; decode, and short chunks behind a long cached prefix, absorb.

Shapes: T new tokens, H heads, n plain and p rotated elements of a head's key, d = n + p, v of its
value, r of a latent, C = r + p, S context, P pool slots, B decode rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionPlan, Tile, compiled_rows, row_steps, tile_steps
from kernels.linear import linear
from kernels.packed_attention import SequenceRows, take
from kernels.row_ops import COMPILED_DTYPES
from kernels.steps import Steps


@dataclasses.dataclass(frozen=True, slots=True)
class LatentUp:
    """weight [H, n + v, r]: up_k above up_v of each head."""

    weight: Tensor
    nope_dim: int

    @property
    def value_dim(self) -> int:
        return self.weight.shape[1] - self.nope_dim


def latent_attention_steps(
    q_THd: Tensor,
    latent_T1C: Tensor,
    pool_P1C: Tensor,
    up: LatentUp,
    plan: AttentionPlan,
    *,
    scale: float,
) -> Steps[Tensor]:
    """Return [T, H, v] by tiles and decode groups. New entries must already be in the pool."""
    T, H, _ = q_THd.shape
    out_THv = torch.empty(T, H, up.value_dim, dtype=q_THd.dtype, device=q_THd.device)
    for part in plan.prefill:
        rows = slice(part.first, part.first + part.count)
        entries_S1C = latent_T1C[rows] if part.keys is None else take(pool_P1C, part.keys)
        attend = _absorbed_chunk if _absorbs(part.count, entries_S1C.shape[0], up) else _expanded
        yield from attend(q_THd[rows], entries_S1C, up, part.tiles, scale, out_THv[rows])
    for group in plan.decode:
        q_B1HC = _to_entries(q_THd.index_select(0, group.rows_B), up)
        entries_B1SC = take(pool_P1C, group.keys).view(-1, 1, group.width, pool_P1C.shape[2])
        attended_B1HC = functional.scaled_dot_product_attention(
            q_B1HC, entries_B1SC, entries_B1SC, attn_mask=group.mask, scale=scale
        )
        out_THv.index_copy_(0, group.rows_B, _to_values(attended_B1HC, up))
        yield
    if plan.rows is not None:
        rows_B = torch.from_numpy(plan.rows.table[:, 0])
        q_THC = torch.zeros((T, H, pool_P1C.shape[2]), dtype=q_THd.dtype)
        q_THC[rows_B] = _to_entries(q_THd[rows_B], up).squeeze(1)
        attended_THr = torch.empty((T, H, up.weight.shape[2]), dtype=q_THd.dtype)
        yield from row_steps(q_THC, pool_P1C, pool_P1C, plan.rows, attended_THr, scale)
        out_THv[rows_B] = _to_values(attended_THr[rows_B].unsqueeze(1), up)
    return out_THv


def _absorbs(count: int, context: int, up: LatentUp) -> bool:
    """Return whether absorbing is cheaper for a chunk of `count` new tokens."""
    _, nv, r = up.weight.shape
    pairs = count * (context - count) + count * (count + 1) // 2
    return pairs * (2 * r - nv) < (context - count) * r * nv


def _expanded(
    q_THd: Tensor,
    entries_S1C: Tensor,
    up: LatentUp,
    tiles: tuple[Tile, ...],
    scale: float,
    out_THv: Tensor,
) -> Steps[None]:
    """Compute keys [S, H, d] and values [S, H, v] of all heads, then attention."""
    H, nv, r = up.weight.shape
    S, p = entries_S1C.shape[0], entries_S1C.shape[2] - r
    kv_SHnv = linear(entries_S1C[:, 0, :r], up.weight.view(H * nv, r)).view(S, H, nv)
    turned_SHp = entries_S1C[..., r:].expand(S, H, p)
    k_SHd = torch.cat((kv_SHnv[..., : up.nope_dim], turned_SHp), dim=-1)
    v_SHv = kv_SHnv[..., up.nope_dim :]
    if _is_compiled(q_THd, tiles):
        rows = compiled_rows([_whole(q_THd, S)], None, 1)
        yield from row_steps(q_THd, k_SHd, v_SHv.contiguous(), rows, out_THv, scale)
    else:
        yield from tile_steps(q_THd.unsqueeze(2), k_SHd, v_SHv, tiles, out_THv.unsqueeze(2), scale)


def _absorbed_chunk(
    q_THd: Tensor,
    entries_S1C: Tensor,
    up: LatentUp,
    tiles: tuple[Tile, ...],
    scale: float,
    out_THv: Tensor,
) -> Steps[None]:
    """Attend with the entries as keys and values of all heads (see `_to_values`)."""
    q_T1HC = _to_entries(q_THd, up)
    attended_T1HC = torch.empty_like(q_T1HC)
    if _is_compiled(q_THd, tiles):
        rows = compiled_rows([_whole(q_THd, len(entries_S1C))], None, q_THd.shape[1])
        attended_THC, q_THC = attended_T1HC.squeeze(1), q_T1HC.squeeze(1)
        yield from row_steps(q_THC, entries_S1C, entries_S1C, rows, attended_THC, scale)
        out_THv.copy_(_to_values(attended_T1HC, up))
        return
    yield from tile_steps(q_T1HC, entries_S1C, entries_S1C, tiles, attended_T1HC, scale)
    out_THv.copy_(_to_values(attended_T1HC, up))


def _is_compiled(q_THd: Tensor, tiles: tuple[Tile, ...]) -> bool:
    has_window = any(tile.k_first for tile in tiles)
    return q_THd.device.type == "cpu" and q_THd.dtype in COMPILED_DTYPES and not has_window


def _whole(q_THd: Tensor, context: int) -> SequenceRows:
    """Return the rows of q as the last ones of keys 0 .. context-1."""
    return SequenceRows(0, len(q_THd), context - len(q_THd), slice(0, context))


def _to_entries(q_BHd: Tensor, up: LatentUp) -> Tensor:
    """Return [B, 1, H, C]: queries whose product with an entry equals that with the head's key."""
    n = up.nope_dim
    q_HBr = torch.bmm(q_BHd[..., :n].transpose(0, 1), up.weight[:, :n])
    return torch.cat((q_HBr.transpose(0, 1), q_BHd[..., n:]), dim=-1).unsqueeze(1)


def _to_values(attended_B1HC: Tensor, up: LatentUp) -> Tensor:
    """Return [B, H, v] from weighted sums of entries.

    Their last p elements, the rotated key, are dropped: summing them is cheaper than attention with
    values narrower than keys.
    """
    attended_HBr = attended_B1HC[:, 0, :, : up.weight.shape[2]].transpose(0, 1)
    return torch.bmm(attended_HBr, up.weight[:, up.nope_dim :].transpose(1, 2)).transpose(0, 1)
