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

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionPlan
from kernels.attention_ops import SequenceRows, compiled_rows, row_steps
from kernels.compiled import LANES
from kernels.linear import PackedLinear, has_panels, linear
from kernels.paged_attention import attend_paged
from kernels.panels import multiply_heads
from kernels.steps import Steps, map_tiles
from kernels.thread_pool import shared_pool


class LatentUp:
    """Products with weight [H, n + v, r]: up_k above up_v of each head.

    With panels, expanding and up_v share those of one matrix, in which each head's n and v are
    padded to whole panels. Panels of up_k transposed, for queries, are kept beside them.
    """

    def __init__(self, weight_Hcr: Tensor, nope_dim: int) -> None:
        self.num_heads, height, self.rank = weight_Hcr.shape
        self.nope_dim, self.value_dim = nope_dim, height - nope_dim
        self.has_panels = has_panels(weight_Hcr.dtype, weight_Hcr.device)
        self._value_row = nope_dim
        if not self.has_panels:
            self._weight_Hcr = weight_Hcr
            return
        up_k, up_v = map(_in_panels, (weight_Hcr[:, :nope_dim], weight_Hcr[:, nope_dim:]))
        self._value_row = up_k.shape[1]
        self._expand = PackedLinear(torch.cat((up_k, up_v), dim=1).flatten(0, 1))
        turned = _in_panels(weight_Hcr[:, :nope_dim].transpose(1, 2))
        self._to_entries = PackedLinear(turned.flatten(0, 1))

    @property
    def panels(self) -> tuple[int, int, int, int]:
        """Addresses of the first head's up_k and up_v, each followed by the bytes of a head."""
        k_bytes, v_bytes = (
            each.memory.nbytes // self.num_heads for each in (self._to_entries, self._expand)
        )
        row_bytes = v_bytes * self.num_heads // self._expand.shape[0]
        v_address = self._expand.addresses[0] + self._value_row * row_bytes
        return self._to_entries.addresses[0], k_bytes, v_address, v_bytes

    def expanded(self, latent_Sr: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """Return plain keys [S, H, n] and values [S, H, v], computed tile by tile."""
        S, H, v_row = len(latent_Sr), self.num_heads, self._value_row
        if self.has_panels:
            kv_SHc = (yield from map_tiles(self._expand, latent_Sr)).view(S, H, -1)
        else:
            kv_SHc = linear(latent_Sr, self._weight_Hcr.flatten(0, 1)).view(S, H, -1)
        return kv_SHc[..., : self.nope_dim], kv_SHc[..., v_row : v_row + self.value_dim]

    def to_entries(self, q_BHd: Tensor) -> Tensor:
        """Return [B, H, C]: queries whose product with an entry equals that with the key."""
        n, (B, H, d), r = self.nope_dim, q_BHd.shape, self.rank
        if self.has_panels:
            q_BHC = q_BHd.new_empty((B, H, r + d - n))
            q_BHC[..., r:] = q_BHd[..., n:]
            self._multiply(q_BHd, *self.panels[:2], q_BHC, (n, r))
            return q_BHC
        q_HBr = torch.bmm(q_BHd[..., :n].transpose(0, 1), self._weight_Hcr[:, :n])
        return torch.cat((q_HBr.transpose(0, 1), q_BHd[..., n:]), dim=-1)

    def to_values(self, attended_BHC: Tensor) -> Tensor:
        """Return [B, H, v] from weighted sums of entries, of which the first r elements count."""
        r = self.rank
        if self.has_panels:
            out_BHv = attended_BHC.new_empty((len(attended_BHC), self.num_heads, self.value_dim))
            self._multiply(attended_BHC, *self.panels[2:], out_BHv, (r, self.value_dim))
            return out_BHv
        attended_HBr = attended_BHC[..., :r].transpose(0, 1)
        up_v_Hrv = self._weight_Hcr[:, self.nope_dim :].transpose(1, 2)
        return torch.bmm(attended_HBr, up_v_Hrv).transpose(0, 1)

    def _multiply(
        self, x_BHk: Tensor, panels: int, head_bytes: int, out_BHn: Tensor, sizes: tuple[int, int]
    ) -> None:
        """Write products of the first K elements of each head to the first N of `out`."""
        kind, size = self._expand.kind, x_BHk.element_size()
        assert kind is not None
        assert x_BHk.stride(2) == 1
        x_row, x_head, row, head = (
            stride * size for each in (x_BHk, out_BHn) for stride in each.stride()[:2]
        )
        x, out = (x_BHk.data_ptr(), x_row, x_head), (out_BHn.data_ptr(), row, head)
        counts = len(x_BHk), *sizes, self.num_heads
        multiply_heads(shared_pool(), kind, *x, panels, head_bytes, *out, *counts)


def _in_panels(weight_Hcr: Tensor) -> Tensor:
    """Pad the rows of each head with zeros to whole panels."""
    return functional.pad(weight_Hcr, (0, 0, 0, -weight_Hcr.shape[1] % LANES))


def latent_attention_steps(
    q_THd: Tensor,
    latent_T1C: Tensor,
    pool_P1C: Tensor,
    up: LatentUp,
    plan: AttentionPlan,
    *,
    scale: float,
) -> Steps[Tensor]:
    """Return [T, H, v]. New entries must already be in the pool."""
    T, H, _ = q_THd.shape
    out_THv = torch.empty(T, H, up.value_dim, dtype=q_THd.dtype, device=q_THd.device)
    if plan.paged is not None:
        rows = slice(plan.paged.first, plan.paged.last)
        q_NHC = up.to_entries(q_THd[rows])
        attended_NHr = q_NHC.new_empty((len(q_NHC), H, up.rank))
        for tiles in plan.paged.parts:
            attend_paged(q_NHC, pool_P1C, pool_P1C, tiles, attended_NHr, scale)
        out_THv[rows] = up.to_values(attended_NHr)
        yield
    for seq in plan.prefill:
        rows, keys = slice(seq.first, seq.first + seq.count), seq.slots_S
        if not seq.start:
            entries_S1C = latent_T1C[rows]
        elif isinstance(keys, slice):
            entries_S1C = pool_P1C[keys]
        else:
            entries_S1C = pool_P1C.index_select(0, keys)
        attend = _absorbed if _absorbs(seq.count, len(entries_S1C), up) else _expanded
        yield from attend(q_THd[rows], entries_S1C, up, scale, out_THv[rows])
    if plan.rows is not None:
        rows_B = torch.from_numpy(plan.rows.table[:, 0])
        q_THC = torch.zeros((T, H, pool_P1C.shape[2]), dtype=q_THd.dtype)
        q_THC[rows_B] = up.to_entries(q_THd[rows_B])
        attended_THr = torch.empty((T, H, up.rank), dtype=q_THd.dtype)
        yield from row_steps(q_THC, pool_P1C, pool_P1C, plan.rows, attended_THr, scale)
        out_THv[rows_B] = up.to_values(attended_THr[rows_B])
    return out_THv


def _absorbs(count: int, context: int, up: LatentUp) -> bool:
    """Return whether absorbing is cheaper for a chunk of `count` new tokens."""
    nv, r = up.nope_dim + up.value_dim, up.rank
    pairs = count * (context - count) + count * (count + 1) // 2
    return pairs * (2 * r - nv) < (context - count) * r * nv


def _expanded(
    q_THd: Tensor, entries_S1C: Tensor, up: LatentUp, scale: float, out_THv: Tensor
) -> Steps[None]:
    """Compute keys [S, H, d] and values [S, H, v] of all heads, then attention."""
    r = up.rank
    k_SHn, v_SHv = yield from up.expanded(entries_S1C[:, 0, :r])
    k_SHd = torch.cat((k_SHn, entries_S1C[..., r:].expand(-1, up.num_heads, -1)), dim=-1)
    yield from _chunk_steps(q_THd, k_SHd, v_SHv, out_THv, scale)


def _absorbed(
    q_THd: Tensor, entries_S1C: Tensor, up: LatentUp, scale: float, out_THv: Tensor
) -> Steps[None]:
    """Attend with the entries as keys and values of all heads.

    Summing their last p elements too is cheaper than values narrower than keys.
    """
    q_THC = up.to_entries(q_THd)
    attended_THC = torch.empty_like(q_THC)
    yield from _chunk_steps(q_THC, entries_S1C, entries_S1C, attended_THC, scale)
    out_THv.copy_(up.to_values(attended_THC))


def _chunk_steps(
    q_THd: Tensor, k_SGd: Tensor, v_SGv: Tensor, out_THv: Tensor, scale: float
) -> Steps[None]:
    """Write attention of rows that are the last ones of the keys; on a device, all of them."""
    (T, H, _), (S, G, _) = q_THd.shape, k_SGd.shape
    if q_THd.device.type == "cpu":
        rows = compiled_rows([SequenceRows(0, T, S - T, slice(0, S))], None, H // G)
        yield from row_steps(q_THd, k_SGd, v_SGv.contiguous(), rows, out_THv, scale)
        return
    q_GRTd = q_THd.view(T, G, H // G, -1).permute(1, 2, 0, 3)
    k_GRSd, v_GRSv = (
        each.transpose(0, 1).unsqueeze(1).expand(-1, H // G, -1, -1) for each in (k_SGd, v_SGv)
    )
    attended_GRTv = functional.scaled_dot_product_attention(
        q_GRTd, k_GRSd, v_GRSv, is_causal=True, scale=scale
    )
    out_THv.copy_(attended_GRTv.permute(2, 0, 1, 3).flatten(1, 2))
    yield
