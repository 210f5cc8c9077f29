"""Grouped-query attention of one layer: projections, norms, rope, KV pool.

`models/decoder/latent_attention.py` has another variant: a class with the same two methods.
Shapes: T tokens, D model dim, H query heads, G KV heads, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import attention_steps
from kernels.passes import norm_and_turn
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch, LastPrepared, Prepared
from models.decoder.kv_pool import KvPool
from models.spec.model import ModelSpec
from models.weights.layout import attention_tensors
from models.weights.loading import Loader

TILE_ROWS = 512  # that are normed and turned between two yields: a millisecond, in cache


class GroupedQueryAttention:
    """Holds q, k and v as one matrix [(H + 2G) * d, D], so that they are one product."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        wants = attention_tensors(spec, layer)
        self._layer = layer
        self._H, self._G, self._d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._eps = spec.rms_norm_eps
        self._window = spec.sliding_windows[layer]
        qkv, biased = ("q", "k", "v"), spec.attention_bias
        self._qkv = loader.linear(
            *(wants[role] for role in qkv),
            bias=[wants[f"{role}_bias"] for role in qkv] if biased else [],
        )
        self._o = loader.linear(wants["o"], bias=[wants["o_bias"]] if biased else [])
        self._sinks = loader.load(wants["sinks"]) if "sinks" in wants else None
        self._qk_norm_Hd: Tensor | None = None  # of query heads, then of KV heads
        if spec.qk_norm:
            q_norm, k_norm = loader.load(wants["q_norm"]), loader.load(wants["k_norm"])
            self._qk_norm_Hd = torch.stack([q_norm] * self._H + [k_norm] * self._G)

    def steps(
        self,
        hidden_TD: Tensor,
        x_TD: Tensor,
        batch: AttentionBatch,
        prepared: Prepared,
        kv: KvPool,
        last: LastPrepared | None = None,
    ) -> Steps[None]:
        """Adds the attention of the normed x_TD to hidden_TD in place; K and V go to the pool.
        last: of those rows alone, which are hidden_TD's then."""
        T = x_TD.shape[0]
        H, G, d = self._H, self._G, self._d
        qkv = self._qkv(x_TD).view(T, H + 2 * G, d)
        yield
        if last is None:
            qk = yield from self._turned(qkv[:, : H + G], slice(0, H + G), prepared)
            q_THd, k_TGd = qk[:, :H], qk[:, H:]
        else:
            k_TGd = yield from self._turned(qkv[:, H : H + G], slice(H, H + G), prepared)
            q_THd = qkv[:, :H].index_select(0, last.rows_R)
            q_THd = yield from self._turned(q_THd, slice(0, H), last.prepared)
        v_TGd = qkv[:, H + G :]
        yield
        # All rows first, then attention: sequences may read what others of this batch write here.
        kv.write(self._layer, batch, k_TGd, v_TGd)
        if last is not None:
            prepared = last.prepared
            k_TGd, v_TGd = (x.index_select(0, last.rows_R) for x in (k_TGd, v_TGd))
        k_pool, v_pool = kv.entries(self._layer)
        plan, scale = prepared.plans[self._window], d**-0.5
        attended_THd = yield from attention_steps(
            q_THd, k_TGd, v_TGd, k_pool, v_pool, plan, scale=scale, sinks_H=self._sinks
        )
        yield
        hidden_TD.add_(self._o(attended_THd.view(-1, H * d)))

    def _turned(self, x_THd: Tensor, heads: slice, prepared: Prepared) -> Steps[Tensor]:
        """Queries or keys of `heads` (query heads, then KV heads), normed and in their places."""
        weight_Hd = None if self._qk_norm_Hd is None else self._qk_norm_Hd[heads]
        cos, sin = prepared.cos, prepared.sin
        T = x_THd.shape[0]
        if T <= TILE_ROWS or x_THd.is_cuda:
            return norm_and_turn(x_THd, weight_Hd, self._eps, cos, sin)
        out_THd = torch.empty(x_THd.shape, dtype=x_THd.dtype)
        for start in range(0, T, TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            out_THd[tile] = norm_and_turn(x_THd[tile], weight_Hd, self._eps, cos[tile], sin[tile])
            yield
        return out_THd
