"""Measurement of a routing profile in three runs of a model over texts.

1   mean outputs and frequencies of experts, the first layer's experts by token, routing counts
2   least squares, and samples for training a network
3   on held-out rows: precision of each kind of prediction, by layer and rank
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.experts import group_by_expert, local_index, weighted_run
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from models.experts.expert_half import RoutedTokens
from models.prediction.routing_counts import RoutingCounter
from models.prediction.routing_profile import (
    PREDICTOR_KINDS,
    TOKEN,
    Estimator,
    EstimatorSamples,
    RoutingProfile,
    features,
    hits_by_rank,
    new_estimator,
    predict_routing,
    quasi_hidden,
    train_estimator,
)

HELD_OUT: Final = 5  # one row in HELD_OUT is held out
SAMPLE_BYTES: Final = 512 << 20  # of training samples
_RIDGE: Final = 1e-3  # of the mean diagonal
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


class LeastSquares:
    """Finds W that minimises |x W - y| over all rows."""

    def __init__(self, size: int, outputs: int) -> None:
        self._gram = torch.zeros(size, size, dtype=torch.float64)
        self._moment = torch.zeros(size, outputs, dtype=torch.float64)

    def add(self, x_TF: Tensor, y_TE: Tensor) -> None:
        x_TF = x_TF.double()
        self._gram += x_TF.T @ x_TF
        self._moment += x_TF.T @ y_TE.double()

    def solve(self) -> Tensor:
        """Return [features, outputs] float32."""
        gram = self._gram
        ridge = _RIDGE * float(gram.diagonal().mean()) + 1e-9
        result: Tensor = torch.linalg.solve(gram + ridge * torch.eye(len(gram)), self._moment)
        return result.float().contiguous()


class _Fitted(NamedTuple):
    """Least-squares maps and training samples, by layer."""

    maps: dict[int, Tensor]
    samples: dict[int, EstimatorSamples]


class ProfileBuilder:
    """progress: called with the completed fraction."""

    def __init__(
        self,
        half: AttentionHalf,
        store: CopyingStore,
        rows: Rows,
        progress: Callable[[float], None] = lambda part: None,
        counter: RoutingCounter | None = None,
    ) -> None:
        self._counter = counter
        self._half, self._store, self._progress = half, store, progress
        self._kept = [row for number, row in enumerate(rows) if number % HELD_OUT]
        self._held_out = [row for number, row in enumerate(rows) if number % HELD_OUT == 0]
        spec, experts = half.spec, half.spec.num_experts
        self._identity_E = local_index(list(range(experts)), experts)
        self._following = dict(zip(spec.moe_layers, spec.moe_layers[1:], strict=False))
        whole = 3 * len(self._kept) + len(self._held_out)  # training counts as a run
        self._done, self._whole = 0, max(1, whole)

    def profile(self) -> RoutingProfile:
        """Run the measurement. Raises as the store's `fetch`."""
        with torch.inference_mode():
            means, frequencies, tokens_VK = self._measure_means()
            known = self._fit(means)
            estimator = self._train(known.samples)
            result = RoutingProfile(means, frequencies, known.maps, estimator, tokens_VK, {})
            return dataclasses.replace(result, precision=self.precision(result, self._held_out))

    def _measure_means(self) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """Return mean outputs and frequencies by layer, and the first layer's experts by token.

        The mean output of shared experts is spread over the outputs by their weights. The counter
        gets whole paths.
        """
        spec = self._half.spec
        E, D = spec.num_experts, spec.hidden_size
        sums = {layer: torch.zeros(E, D, dtype=torch.float64) for layer in spec.moe_layers}
        uses = {layer: torch.zeros(E, dtype=torch.float64) for layer in spec.moe_layers}
        shared = {layer: torch.zeros(D, dtype=torch.float64) for layer in spec.moe_layers}
        weights = dict.fromkeys(spec.moe_layers, 1e-9)
        of_token_VE = torch.zeros(spec.vocab_size, E)
        paths: list[NDArray[np.int64]] = []  # of the batch, by layer

        def visit(activations: LayerActivations) -> None:
            ids_TK = activations.routed.topk_ids_TK
            experts_N = ids_TK.flatten().sort(stable=True).values
            sums[activations.layer].index_add_(0, experts_N, activations.y_ND.double())
            uses[activations.layer] += torch.bincount(experts_N, minlength=E)
            if activations.shared_TD is not None:
                shared[activations.layer] += activations.shared_TD.double().sum(0)
                weights[activations.layer] += float(activations.routed.topk_weights_TK.sum())
            if activations.layer == spec.moe_layers[0]:
                hot_TE = torch.zeros(len(ids_TK), E).scatter_(1, ids_TK, 1.0)
                of_token_VE.index_add_(0, activations.ids_T2[:, 0], hot_TE)
                paths.clear()
            paths.append(ids_TK.numpy())
            if self._counter is not None and len(paths) == len(spec.moe_layers):
                self._counter.add(activations.ids_T2.numpy(), np.stack(paths, 1))

        self._run(self._kept, visit)
        means = {
            layer: (
                sums[layer] / uses[layer].clamp(min=1.0).unsqueeze(1)
                + shared[layer] / weights[layer]
            ).float()
            for layer in sums
        }
        tokens = {layer: max(1.0, float(each.sum()) / spec.top_k) for layer, each in uses.items()}
        frequencies = {layer: (each / tokens[layer]).float() for layer, each in uses.items()}
        of_token_VE += 0.5 * frequencies[spec.moe_layers[0]]  # for unseen tokens
        return means, frequencies, of_token_VE.topk(spec.top_k).indices.int()

    def _fit(self, means: Mapping[int, Tensor]) -> _Fitted:
        """Fit least squares to the next router's logits, and sample them."""
        spec, half = self._half.spec, self._half
        E, D = spec.num_experts, spec.hidden_size
        fits = {layer: LeastSquares(D + E + 1, E) for layer in self._following}
        samples: dict[int, list[EstimatorSamples]] = {layer: [] for layer in self._following}
        tokens = max(1, sum(map(len, self._kept)))
        stride = -(-tokens * len(self._following) * (D + E) * 4 // SAMPLE_BYTES)
        kept: list[tuple[int, Tensor, Tensor]] = []  # of the batch's previous layer

        def visit(activations: LayerActivations) -> None:
            layer, routed = activations.layer, activations.routed
            router = half.router(layer)
            assert router is not None
            if kept:
                logits_TE = router.logits(routed.router_input).float()
                earlier, known_TF, q_TD = kept.pop()
                fits[earlier].add(known_TF, logits_TE)
                samples[earlier].append(
                    EstimatorSamples(q_TD[::stride].float().clone(), logits_TE[::stride].clone())
                )
            following = self._following.get(layer)
            if following is not None:
                q_TD = half.mlp_input(
                    following, quasi_hidden(means[layer], activations.hidden_TD, routed)
                )
                kept.append((layer, features(routed, E), q_TD))

        self._run(self._kept, visit)
        return _Fitted(
            {layer: each.solve() for layer, each in fits.items()},
            {layer: EstimatorSamples(*map(torch.cat, zip(*each, strict=True)))
             for layer, each in samples.items()},
        )  # fmt: skip

    def _train(self, samples: Mapping[int, EstimatorSamples]) -> Estimator:
        spec, runs = self._half.spec, len(self._kept)
        if not samples:  # with one MoE layer nothing is predicted
            self._done += runs
            return new_estimator(spec.hidden_size, spec.num_layers, spec.num_experts)

        def progress(part: float) -> None:
            self._progress((self._done + part * runs) / self._whole)

        is_sigmoid = spec.routing.score == "sigmoid"
        estimator = train_estimator(samples, spec.num_layers, sigmoid=is_sigmoid, progress=progress)
        self._done += runs
        return estimator

    def precision(self, known: RoutingProfile, rows: Rows) -> dict[str, Tensor]:
        """Return [L, K] by kind: the precision of each rank in these rows."""
        spec, half = self._half.spec, self._half
        kinds = (*PREDICTOR_KINDS, TOKEN)
        hits = {kind: torch.zeros(spec.num_layers, spec.top_k) for kind in kinds}
        tokens = 0
        guessed: dict[str, Tensor] = {}  # predictions of the next layer

        def visit(activations: LayerActivations) -> None:
            nonlocal tokens
            layer, routed = activations.layer, activations.routed
            if layer == spec.moe_layers[0]:
                tokens += len(activations.hidden_TD)
                guessed[TOKEN] = known.tokens_VK[activations.ids_T2[:, 0]]
            for kind, ids_TK in guessed.items():
                hits[kind][layer] += hits_by_rank(ids_TK, routed.topk_ids_TK).sum(0)
            guessed.clear()
            following = self._following.get(layer)
            if following is None:
                return
            for kind in PREDICTOR_KINDS:
                result = predict_routing(
                    half, known, kind, layer, following, activations.hidden_TD, routed
                )
                guessed[kind] = result.topk_ids_TK

        self._run(rows, visit)
        return {kind: each / max(1, tokens) for kind, each in hits.items()}

    def _run(self, rows: Rows, visit: Visit) -> None:
        for batch in batches(rows):
            self._run_batch(batch, visit)
            self._done += len(batch)
            self._progress(self._done / self._whole)

    def _run_batch(self, rows: Rows, visit: Visit) -> None:
        """Run one batch. visit: called at each MoE layer. Raises as the store's `fetch`."""
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
        shared_TD = self._half.shared(layer, routed.router_input)
        if shared_TD is not None:
            after_TD.add_(shared_TD)
        return LayerActivations(layer, ids_T2, hidden_TD, routed, y_ND, after_TD, shared_TD)
