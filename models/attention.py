"""Grouped-query attention of one layer: projections, norms, rope, KV pool.

`models/latent_attention.py` has another variant: a class with the same two methods.
Shapes: T tokens, D model dim, H query heads, G KV heads, d head dim.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kernels.attention import ragged_attention
from kernels.norm import rms_norm
from kernels.rope import apply_rope
from models.batch import AttentionBatch, Prepared
from models.kv_pool import KvPool
from models.layout import attention_tensors
from models.loading import Loader
from models.spec import ModelSpec


class GroupedQueryAttention:
    """Holds q, k and v as one matrix [(H + 2G) * d, D], so that they are one product."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        wants = attention_tensors(spec, layer)
        self._layer = layer
        self._H, self._G, self._d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._eps = spec.rms_norm_eps
        self._window = spec.sliding_windows[layer]
        self._qkv = loader.load(wants["q"], wants["k"], wants["v"])
        self._o = loader.load(wants["o"])
        self._qkv_bias: Tensor | None = None
        self._o_bias: Tensor | None = None
        if spec.attention_bias:
            self._qkv_bias = loader.load(wants["q_bias"], wants["k_bias"], wants["v_bias"])
            self._o_bias = loader.load(wants["o_bias"])
        self._sinks = loader.load(wants["sinks"]) if "sinks" in wants else None
        self._q_norm = loader.load(wants["q_norm"]) if spec.qk_norm else None
        self._k_norm = loader.load(wants["k_norm"]) if spec.qk_norm else None

    def add_to(
        self, hidden_TD: Tensor, x_TD: Tensor, batch: AttentionBatch, prepared: Prepared, kv: KvPool
    ) -> None:
        """Adds the attention of the normed x_TD to hidden_TD in place; K and V go to the pool."""
        T = x_TD.shape[0]
        H, G, d = self._H, self._G, self._d
        qkv = functional.linear(x_TD, self._qkv, self._qkv_bias).view(T, H + 2 * G, d)
        if self._q_norm is not None and self._k_norm is not None:
            qkv[:, :H] = rms_norm(qkv[:, :H], self._q_norm, self._eps)
            qkv[:, H : H + G] = rms_norm(qkv[:, H : H + G], self._k_norm, self._eps)
        qk = apply_rope(qkv[:, : H + G], prepared.cos, prepared.sin)
        k_TGd, v_TGd = qk[:, H:], qkv[:, H + G :]
        # All rows first, then attention: sequences may read what others of this batch write here.
        kv.write(self._layer, batch.slots_T, k_TGd, v_TGd)
        k_pool, v_pool = kv.entries(self._layer)
        plan, scale = prepared.plans[self._window], d**-0.5
        attended_THd = ragged_attention(
            qk[:, :H], k_TGd, v_TGd, k_pool, v_pool, plan, scale=scale, sinks_H=self._sinks
        )
        hidden_TD.add_(functional.linear(attended_THd.view(T, H * d), self._o, self._o_bias))
