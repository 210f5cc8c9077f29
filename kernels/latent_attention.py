"""Causal attention over latents: one entry per token, of which each head makes its key and value.

    entry [C] = latent [r] | turned key [p], shared by all heads
    key of head h = up_k[h] @ latent | turned key,      value = up_v[h] @ latent

Prompts *expand*: keys and values of the context are made once and used by many queries. A single
new token (decode) *absorbs*: its query goes through up_k instead, attends to the latents as they
lie, and the result goes through up_v. Expanded, a (query, key) pair costs n + p + v multiply-adds
per head, absorbed 2r + p, which is more; but to expand costs r(n + v) per key, which one query
never earns back.

Shapes: T new tokens, H heads, n plain and p turned elements of a head's key, d = n + p, v of its
value, r of a latent, C = r + p, S context, P pool slots, B decode rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionPlan, DecodePart, attend_tiles, take


@dataclasses.dataclass(frozen=True, slots=True)
class LatentUp:
    """weight [H, n + v, r]: up_k above up_v of each head."""

    weight: Tensor
    nope_dim: int

    @property
    def value_dim(self) -> int:
        return self.weight.shape[1] - self.nope_dim


def ragged_latent_attention(
    q_THd: Tensor,
    latent_T1C: Tensor,
    pool_P1C: Tensor,
    up: LatentUp,
    plan: AttentionPlan,
    *,
    scale: float,
) -> Tensor:
    """[T, H, v]. The new tokens' entries must already be in the pool."""
    T, H, _ = q_THd.shape
    out_THv = torch.empty(T, H, up.value_dim, dtype=q_THd.dtype, device=q_THd.device)
    for part in plan.prefill:
        rows = slice(part.first, part.first + part.count)
        entries_S1C = latent_T1C[rows] if part.keys is None else take(pool_P1C, part.keys)
        k_SHd, v_SHv = _expanded(entries_S1C, up)
        q_TH1d, out_TH1v = q_THd[rows].unsqueeze(2), out_THv[rows].unsqueeze(2)
        attend_tiles(q_TH1d, k_SHd, v_SHv, part.tiles, out_TH1v, scale)
    for group in plan.decode:
        attended = _absorbed(q_THd.index_select(0, group.rows_B), pool_P1C, up, group, scale)
        out_THv.index_copy_(0, group.rows_B, attended)
    return out_THv


def _expanded(entries_S1C: Tensor, up: LatentUp) -> tuple[Tensor, Tensor]:
    """Keys [S, H, d] and values [S, H, v] of all heads."""
    H, nv, r = up.weight.shape
    S, p = entries_S1C.shape[0], entries_S1C.shape[2] - r
    kv_SHnv = functional.linear(entries_S1C[:, 0, :r], up.weight.view(H * nv, r)).view(S, H, nv)
    turned_SHp = entries_S1C[..., r:].expand(S, H, p)
    k_SHd = torch.cat((kv_SHnv[..., : up.nope_dim], turned_SHp), dim=-1)
    return k_SHd, kv_SHnv[..., up.nope_dim :]


def _absorbed(
    q_BHd: Tensor, pool_P1C: Tensor, up: LatentUp, group: DecodePart, scale: float
) -> Tensor:
    """[B, H, v]: all heads share one key per token, its entry, and one value, the latent in it."""
    n, r = up.nope_dim, up.weight.shape[2]
    B, C = q_BHd.shape[0], pool_P1C.shape[2]
    q_HBr = torch.bmm(q_BHd[..., :n].transpose(0, 1), up.weight[:, :n])
    q_B1HC = torch.cat((q_HBr.transpose(0, 1), q_BHd[..., n:]), dim=-1).unsqueeze(1)
    entries_B1SC = take(pool_P1C, group.keys).view(B, 1, group.width, C)
    attended_B1Hr = functional.scaled_dot_product_attention(
        q_B1HC, entries_B1SC, entries_B1SC[..., :r], attn_mask=group.mask, scale=scale
    )
    attended_HBr = attended_B1Hr.squeeze(1).transpose(0, 1)
    return torch.bmm(attended_HBr, up.weight[:, n:].transpose(1, 2)).transpose(0, 1)
