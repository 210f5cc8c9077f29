"""Texts through a model with streamed experts, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.experts import weighted_run
from kernels.routing import group_by_expert, local_index
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from models.experts.expert_store import ExpertStore
from models.experts.router import RoutedTokens

BATCH_TOKENS: Final = 2048
_BLOCK: Final = 16

Rows = Sequence[Sequence[int]]
"""Token ids of each text."""


class LayerActivations(NamedTuple):
    """Activations of a batch at a layer.

    ids_T2: token ids and previous ones (-1: none). hidden_TD, after_TD: the residual before and
    after the experts. y_ND: outputs of the pairs, by expert. shared_TD: of shared experts.
    """

    layer: int
    ids_T2: Tensor
    hidden_TD: Tensor
    routed: RoutedTokens
    y_ND: Tensor
    after_TD: Tensor
    shared_TD: Tensor | None


Visit = Callable[[LayerActivations], None]


class TextRunner:
    """Runs batches. Raises as the store's `fetch`."""

    def __init__(self, half: AttentionHalf, store: ExpertStore) -> None:
        self._half, self._store = half, store
        experts = half.spec.num_experts
        self._identity_E = local_index(list(range(experts)), experts)

    def run(self, rows: Rows, visit: Visit) -> None:
        """Run one batch. visit: called at each MoE layer."""
        half, spec = self._half, self._half.spec
        slices, first = [], 0
        for row in rows:
            last = first + -(-len(row) // _BLOCK)
            slices.append(SequenceSlice(list(row), 0, range(first, last)))
            first = last
        kv = KvPool(spec, first, _BLOCK, half.dtype, half.device)
        inputs = AttentionBatch.build(slices, block_tokens=_BLOCK, device=half.device)
        hidden_TD = half.embed(inputs)
        ids_T2 = torch.tensor([pair for row in rows for pair in zip(row, [-1, *row], strict=False)])
        for layer in range(spec.num_layers):
            attended = half.attend(layer, hidden_TD, inputs, kv)
            hidden_TD, routed = attended.hidden_TD, attended.routed
            if routed is not None:
                activations = self._experts(layer, ids_T2, hidden_TD, routed)
                visit(activations)
                hidden_TD = activations.after_TD

    def _experts(
        self, layer: int, ids_T2: Tensor, hidden_TD: Tensor, routed: RoutedTokens
    ) -> LayerActivations:
        ids_TK, weights_TK = routed.topk_ids_TK, routed.topk_weights_TK
        rows_N, weights_N, counts = group_by_expert(
            ids_TK, weights_TK, self._identity_E, len(self._identity_E)
        )
        held = self._store.fetch(layer)
        active = [expert for expert, count in enumerate(counts) if count]
        y_ND = weighted_run(
            routed.x_TD.index_select(0, rows_N),
            [held.gate_up[expert] for expert in active],
            [held.down[expert] for expert in active],
            [counts[expert] for expert in active],
            torch.ones_like(weights_N),
            held.clamped,
        )
        out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32)
        out_TD.index_add_(0, rows_N, y_ND.float() * weights_N.unsqueeze(1))
        after_TD = (hidden_TD + out_TD).to(hidden_TD.dtype)
        shared_TD = self._half.shared(layer, routed.x_TD)
        if shared_TD is not None:
            after_TD.add_(shared_TD)
        return LayerActivations(layer, ids_T2, hidden_TD, routed, y_ND, after_TD, shared_TD)


def batches(rows: Rows) -> Iterator[list[Sequence[int]]]:
    """Yield batches of whole texts with about BATCH_TOKENS tokens each."""
    batch: list[Sequence[int]] = []
    tokens = 0
    for row in rows:
        if batch and tokens + len(row) > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row)
    if batch:
        yield batch
