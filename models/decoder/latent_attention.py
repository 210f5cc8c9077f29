"""Multi-head latent attention of one layer (DeepSeek-V2 and V3).

The pool holds one entry of kv_rank + rope_dim elements per token, whatever the number of heads.
Shapes: T tokens, D model dim, H heads, d = nope_dim + rope_dim, C = kv_rank + rope_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.latent_attention import LatentUp, latent_attention_steps
from kernels.linear import PackedLinear
from kernels.norm_rope import apply_rope, rms_norm
from kernels.steps import Steps, map_tiles, row_tiles
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, AttentionMetadata, LastRowsMetadata
from models.spec.layer_spec import LatentSpec
from models.spec.model import ModelSpec
from models.weights.layout import attention_tensors
from models.weights.loading import Loader

_EPS = 1e-6  # of the norms of q and latent, fixed as in `transformers`


class LatentAttention:
    """Rotated rows are reordered on load, from interleaved pairs to halves, alike in q and k."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        assert spec.latent is not None
        self._latent: LatentSpec = spec.latent
        self._layer = layer
        self._H, self._d = spec.num_heads, spec.head_dim
        self._scale = spec.head_dim**-0.5 * spec.rope.softmax_factor
        self._window = spec.sliding_windows[layer]
        weight_specs = attention_tensors(spec, layer)
        weights = {role: loader.load(weight_spec) for role, weight_spec in weight_specs.items()}
        if self._latent.interleaved:
            for role, heads in (("q", self._H), ("q_b", self._H), ("kv_a", 1), ("kv_a_bias", 1)):
                if role in weights:
                    _to_halves(weights[role], heads, self._latent.rope_dim)
        self._queries = PackedLinear(weights["q"]) if "q" in weights else _LowRankQueries(weights)
        self._kv_a = PackedLinear(weights["kv_a"], weights.get("kv_a_bias"))
        self._kv_norm = weights["kv_norm"]
        self._o = PackedLinear(weights["o"], weights.get("o_bias"))
        up_HcC = weights["kv_b"].view(self._H, -1, self._latent.kv_rank)
        self._up = LatentUp(up_HcC, self._latent.nope_dim)

    def steps(
        self,
        hidden_TD: Tensor,
        x_TD: Tensor,
        batch: AttentionBatch,
        metadata: AttentionMetadata,
        kv: KvPool,
        last: LastRowsMetadata | None = None,
    ) -> Steps[None]:
        """Add attention to hidden_TD in place, and write latents. last: only for those rows."""
        latent_T1C = (yield from map_tiles(self._kv_a, x_TD)).unsqueeze(1)
        rank = self._latent.kv_rank
        latent_T1C[..., :rank] = rms_norm(latent_T1C[..., :rank], self._kv_norm, _EPS)
        latent_T1C[..., rank:] = apply_rope(latent_T1C[..., rank:], metadata.cos, metadata.sin)
        yield
        # All rows before attention: sequences may read entries of others in this batch.
        kv.write(self._layer, batch, latent_T1C)
        if last is not None:
            metadata = last.metadata
            x_TD, latent_T1C = (x.index_select(0, last.rows_R) for x in (x_TD, latent_T1C))
        n = self._latent.nope_dim
        yield
        q_TD = yield from map_tiles(self._queries, x_TD)
        q_THd = q_TD.view(-1, self._H, self._d)
        q_THd[..., n:] = apply_rope(q_THd[..., n:], metadata.cos, metadata.sin)
        yield
        (pool_P1C,) = kv.entries(self._layer)
        plan = metadata.plans[self._window]
        attended_THv = yield from latent_attention_steps(
            q_THd, latent_T1C, pool_P1C, self._up, plan, scale=self._scale
        )
        attended_TD = attended_THv.view(x_TD.shape[0], -1)
        for tile in row_tiles(attended_TD):
            yield
            hidden_TD[tile].add_(self._o(attended_TD[tile]))


class _LowRankQueries:
    """q_b @ norm(q_a @ x)."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._a = PackedLinear(weights["q_a"], weights.get("q_a_bias"))
        self._norm = weights["q_norm"]
        self._b = PackedLinear(weights["q_b"])

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._b(rms_norm(self._a(x_TD), self._norm, _EPS))


def _to_halves(weight: Tensor, heads: int, rope_dim: int) -> None:
    """Reorder the last rope_dim rows of each head in place: even ones first, then odd ones."""
    whole = weight.view(heads, weight.shape[0] // heads, *weight.shape[1:])
    rows = whole[:, whole.shape[1] - rope_dim :]
    rows.copy_(torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1))
