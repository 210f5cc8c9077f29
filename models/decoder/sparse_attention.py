"""Latent attention to the tokens that an indexer selects (DeepSeek-V3.2, GLM-5).

Rows that see at most top_k tokens attend to all of them, as in `LatentAttention`.

Shapes: T tokens, H and d heads and head dim of the indexer, B rows that see more than K = top_k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionPlan
from kernels.attention_ops import CompiledRows, SequenceRows, select_tokens
from kernels.fused_ops import apply_rope
from kernels.linear import PackedLinear
from kernels.steps import Steps, map_tiles
from kernels.thread_pool import shared_pool
from models.decoder.attention import KvPool, LatentAttention, LowRankQueries, to_halves
from models.decoder.batch import AttentionBatch, AttentionMetadata, LastRows
from models.spec.model import ModelSpec
from models.weights.layout import indexer_tensors
from models.weights.loading import Loader

_EPS = 1e-6  # of the keys' norm, fixed as in `transformers`
_CALL_PRODUCTS = 1 << 26  # a few milliseconds
_STEP_ROWS = 64  # attended between two yields


class SparseLatentAttention(LatentAttention):
    """Latent attention with an indexer, or with the selection of the layer before."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        super().__init__(spec, layer, loader)
        assert spec.indexer is not None
        self._sizes, self._p = spec.indexer, self._latent.rope_dim
        self._is_shared = layer in self._sizes.shared_layers
        if self._is_shared:
            return
        weight_specs = indexer_tensors(spec, layer)
        weights = {role: loader.load(weight_spec) for role, weight_spec in weight_specs.items()}
        if self._sizes.interleaved:
            for role, heads in (("q", self._sizes.heads), ("k", 1), ("norm", 1), ("bias", 1)):
                to_halves(weights[role].view(heads, self._sizes.head_dim, -1)[:, : self._p])
        self._index_q, self._index_k = PackedLinear(weights["q"]), PackedLinear(weights["k"])
        self._norm = weights["norm"], weights["bias"]
        scale = (self._sizes.heads * self._sizes.head_dim) ** -0.5
        self._weigh = PackedLinear(weights["weights"].mul_(scale))

    @property
    def decodes(self) -> bool:
        """False: the compiled call selects no tokens."""
        return False

    def _entries(
        self, latent_T1C: Tensor, x_TD: Tensor, metadata: AttentionMetadata
    ) -> Steps[tuple[Tensor, ...]]:
        if self._is_shared:
            return (latent_T1C,)
        keys_Td = yield from map_tiles(self._index_k, x_TD)
        keys_Td = functional.layer_norm(keys_Td, (self._sizes.head_dim,), *self._norm, _EPS)
        return latent_T1C, self._rotated(keys_Td.unsqueeze(1), metadata)

    def _plan(
        self,
        x_TD: Tensor,
        batch: AttentionBatch,
        metadata: AttentionMetadata,
        kv: KvPool,
        last: LastRows | None,
    ) -> Steps[AttentionPlan]:
        plan, seen = metadata.plans[self._window], metadata.sparse
        assert seen is not None
        if not len(seen.table):
            return plan
        if not self._is_shared:
            slots_BK = yield from self._select(x_TD, metadata, kv.entries(self._layer)[1])
            batch.selection = seen.table[:, 0], slots_BK
        assert batch.selection is not None
        rows_B, slots_BK = batch.selection
        if self._is_shared and last is not None:
            rows = last.rows_R.numpy()[seen.table[:, 0]]
            slots_BK = slots_BK[torch.from_numpy(np.searchsorted(rows_B, rows))].contiguous()
        return _with_selection(plan, seen, slots_BK)

    def _select(self, x_TD: Tensor, metadata: AttentionMetadata, keys: Tensor) -> Steps[Tensor]:
        """Return the pool slots of each row's tokens, [B, K]."""
        seen, (H, d, K) = metadata.sparse, (self._sizes.heads, self._sizes.head_dim,
                                            self._sizes.top_k)  # fmt: skip
        assert seen is not None
        queries = self._queries
        assert isinstance(queries, LowRankQueries)
        q_TD = yield from map_tiles(lambda x: self._index_q(queries.low_rank(x)), x_TD)
        q_THd = self._rotated(q_TD.view(-1, H, d), metadata).float()
        weights_TH = yield from map_tiles(lambda x: self._weigh(x.float()), x_TD)
        slots_BK = torch.empty((len(seen.table), K), dtype=torch.int64)
        first = 0
        while first < len(seen.table):
            rows = max(1, _CALL_PRODUCTS // (int(seen.table[first, 2]) * H * d))
            entries, out = seen.table[first : first + rows], slots_BK[first : first + rows]
            call = entries.ctypes.data, len(entries), H, d, K, out.data_ptr()
            select_tokens(
                shared_pool(),
                keys.dtype is torch.float32,
                q_THd.data_ptr(),
                weights_TH.data_ptr(),
                keys.data_ptr(),
                *call,
            )
            first += rows
            yield
        return slots_BK

    def _rotated(self, x_THd: Tensor, metadata: AttentionMetadata) -> Tensor:
        turned = apply_rope(x_THd[..., : self._p], *metadata.angles[self._rope])
        return torch.cat((turned, x_THd[..., self._p :]), -1)


def _with_selection(plan: AttentionPlan, seen: CompiledRows, slots_BK: Tensor) -> AttentionPlan:
    """Return a plan that has the rows of `seen` too, each with its slots."""
    table, (B, K) = seen.table.copy(), slots_BK.shape
    table[:, 2], table[:, 3] = K, 0
    table[:, 4] = slots_BK.data_ptr() + 8 * K * np.arange(B)
    before = plan.rows or CompiledRows(table[:0], (), (), 0)
    first = len(before.table)
    steps = [(n, min(first + B, n + _STEP_ROWS)) for n in range(first, first + B, _STEP_ROWS)]
    rows = CompiledRows(
        np.concatenate((before.table, table)), (*before.slots, slots_BK), (*before.steps, *steps), 0
    )
    return dataclasses.replace(plan, rows=rows)


def split_at(
    sequences: Sequence[SequenceRows], top_k: int
) -> tuple[list[SequenceRows], CompiledRows]:
    """Return the rows that see at most `top_k` tokens, and entries for each of the others."""
    heads, entries, slots = list[SequenceRows](), list[tuple[int, ...]](), list[Tensor]()
    for seq in sequences:
        count = max(0, min(seq.count, top_k - seq.start))
        start, address, keys = 0, 0, seq.slots_S
        if isinstance(keys, slice):
            start, keys = keys.start, slice(keys.start, keys.start + seq.start + count)
        else:
            slots.append(keys)
            address, keys = keys.data_ptr(), keys[: seq.start + count]
        if count:
            heads.append(SequenceRows(seq.first, count, seq.start, keys))
        for row in range(count, seq.count):
            entries.append((seq.first + row, 1, seq.start + row + 1, start, address))
    table = np.array(entries, np.int64).reshape(-1, 5)
    return heads, CompiledRows(table, tuple(slots), (), 0)
