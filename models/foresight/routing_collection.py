"""Makes a routing profile: a model is run over texts, three times.

1  mean outputs and frequencies of experts        2  least squares, by then with d_l known
3  on rows that were held out: how precise each kind of guess is, by layer and rank
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.experts import weighted_run
from kernels.routing import group_by_expert, local_index
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from models.experts.expert_store import ExpertStore
from models.experts.router import Routed
from models.foresight.foresight import KINDS, Kind, features, foretold, hits_by_rank
from models.foresight.routing_profile import RoutingProfile

BATCH_TOKENS: Final = 2048
HELD_OUT: Final = 4  # one row of so many
_RIDGE: Final = 1e-3  # of the mean diagonal
_BLOCK: Final = 16

Visit = Callable[[int, Tensor, Routed, Tensor], None]
"""(layer, residual before the experts, routing, pairs' outputs by expert) of a batch."""


class Collection:
    """progress: told the part that is done."""

    def __init__(
        self,
        half: AttentionHalf,
        store: ExpertStore,
        rows: Sequence[Sequence[int]],
        progress: Callable[[float], None] = lambda part: None,
    ) -> None:
        """rows: token ids of each text."""
        self._half, self._store, self._progress = half, store, progress
        self._kept = [row for number, row in enumerate(rows) if number % HELD_OUT]
        self._held_out = [row for number, row in enumerate(rows) if number % HELD_OUT == 0]
        spec = half.spec
        self._identity_E = local_index(list(range(spec.num_experts)), spec.num_experts)
        whole = 2 * len(self._kept) + len(self._held_out)
        self._done, self._whole = 0, max(1, whole)

    def profile(self) -> RoutingProfile:
        """Raises as the store's `fetch`."""
        with torch.inference_mode():
            means, frequencies = self._means()
            found = RoutingProfile(means, frequencies, self._maps(), {})
            return dataclasses.replace(found, precision=self._precision(found))

    def _means(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        spec = self._half.spec
        E, D = spec.num_experts, spec.hidden_size
        sums = {layer: torch.zeros(E, D, dtype=torch.float64) for layer in spec.moe_layers}
        uses = {layer: torch.zeros(E, dtype=torch.float64) for layer in spec.moe_layers}

        def visit(layer: int, hidden_TD: Tensor, routed: Routed, y_ND: Tensor) -> None:
            experts_N = routed.topk_ids_TK.flatten().sort(stable=True).values
            sums[layer].index_add_(0, experts_N, y_ND.double())
            uses[layer] += torch.bincount(experts_N, minlength=E)

        self._run(self._kept, visit)
        means = {layer: (sums[layer] / uses[layer].clamp(min=1.0).unsqueeze(1)).float()
                 for layer in sums}  # fmt: skip
        tokens = {layer: max(1.0, float(each.sum()) / spec.top_k) for layer, each in uses.items()}
        return means, {layer: (each / tokens[layer]).float() for layer, each in uses.items()}

    def _maps(self) -> dict[int, Tensor]:
        """W with features W nearest to the next router's logits."""
        spec, half = self._half.spec, self._half
        size = spec.hidden_size + spec.num_experts + 1
        layers, double = spec.moe_layers[:-1], torch.float64
        grams = {layer: torch.zeros(size, size, dtype=double) for layer in layers}
        moments = {layer: torch.zeros(size, spec.num_experts, dtype=double) for layer in layers}
        before: list[tuple[int, Tensor]] = []  # the layer before in this batch, and its features

        def visit(layer: int, hidden_TD: Tensor, routed: Routed, y_ND: Tensor) -> None:
            router = half.router(layer)
            assert router is not None
            if before:
                earlier, known = before.pop()
                grams[earlier] += known.T @ known
                moments[earlier] += known.T @ router.logits(routed.x_TD).double()
            if layer in grams:
                before.append((layer, features(routed, spec.num_experts).double()))

        self._run(self._kept, visit)
        return {layer: _solved(grams[layer], moments[layer]) for layer in grams}

    def _precision(self, known: RoutingProfile) -> dict[str, Tensor]:
        spec, half = self._half.spec, self._half
        hits = {kind: torch.zeros(spec.num_layers, spec.top_k) for kind in KINDS}
        tokens = 0
        before: list[dict[Kind, Tensor]] = []
        following = dict(zip(spec.moe_layers, spec.moe_layers[1:], strict=False))

        def visit(layer: int, hidden_TD: Tensor, routed: Routed, y_ND: Tensor) -> None:
            nonlocal tokens
            if layer == spec.moe_layers[0]:
                tokens += len(hidden_TD)
            for kind, ids_TK in before.pop().items() if before else ():
                hits[kind][layer] += hits_by_rank(ids_TK, routed.topk_ids_TK).sum(0)
            after = following.get(layer)
            if after is not None:
                before.append(
                    {
                        kind: foretold(
                            half, known, kind, layer, after, hidden_TD, routed
                        ).topk_ids_TK
                        for kind in KINDS
                    }
                )

        self._run(self._held_out, visit)
        return {str(kind): each / max(1, tokens) for kind, each in hits.items()}

    def _run(self, rows: Sequence[Sequence[int]], visit: Visit) -> None:
        for batch in _batches(rows):
            self._run_batch(batch, visit)
            self._done += len(batch)
            self._progress(self._done / self._whole)

    def _run_batch(self, rows: Sequence[Sequence[int]], visit: Visit) -> None:
        half, spec = self._half, self._half.spec
        slices, first = [], 0
        for row in rows:
            last = first + -(-len(row) // _BLOCK)
            slices.append(SequenceSlice(list(row), 0, range(first, last)))
            first = last
        kv = KvPool(spec, first, _BLOCK, half.dtype, half.device)
        inputs = AttentionBatch.build(slices, block_tokens=_BLOCK, device=half.device)
        hidden_TD = half.embed(inputs)
        for layer in range(spec.num_layers):
            attended = half.attend(layer, hidden_TD, inputs, kv)
            hidden_TD, routed = attended.hidden_TD, attended.routed
            if routed is not None:
                hidden_TD = self._experts(layer, hidden_TD, routed, visit)

    def _experts(self, layer: int, hidden_TD: Tensor, routed: Routed, visit: Visit) -> Tensor:
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
        visit(layer, hidden_TD, routed, y_ND)
        out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32)
        out_TD.index_add_(0, rows_N, y_ND.float() * weights_N.unsqueeze(1))
        hidden_TD.add_(out_TD)
        shared_TD = self._half.shared(layer, routed.x_TD)
        return hidden_TD if shared_TD is None else hidden_TD.add_(shared_TD)


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
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


def _solved(gram: Tensor, moment: Tensor) -> Tensor:
    """[features, E] float32."""
    ridge = _RIDGE * float(gram.diagonal().mean()) + 1e-9
    found: Tensor = torch.linalg.solve(gram + ridge * torch.eye(len(gram)), moment)
    return found.float().contiguous()
