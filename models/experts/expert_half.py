"""Routers, and the expert half of a decoder: some of the routed experts of every MoE layer.

Shapes: T or U tokens, D model dim, F expert FFN dim, E experts, e local experts, K top-k, N (token,
expert) pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kernels.experts import GroupLimit, RoutingRule, add_at_once, expert_steps, group_by_expert
from kernels.gpu_experts import gpu_experts, runs_on_gpu
from kernels.linear import ExpertLinears, PackedLinear
from kernels.steps import LIGHT_ROWS, Steps, add_tiled, row_tiles
from models.experts.expert_eviction import ExpertKey
from models.experts.expert_loading import (
    ExpertLayer,
    join_layers,
    load_experts,
    load_separately,
    load_slices,
)
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint
from models.weights.loading import Loader, Progress


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Input of the experts: x_TD in the model dtype, ids int64, weights float32.

    plain_TD: the router's input, if x_TD is that times the weights.
    """

    x_TD: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    plain_TD: Tensor | None = None

    @property
    def router_input(self) -> Tensor:
        """Input of the router and of shared experts."""
        return self.x_TD if self.plain_TD is None else self.plain_TD


class ExpertRouter:
    """The router of one layer."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        weight_specs = layout.router_tensors(spec, layer)
        router = loader.load(weight_specs["router"])
        self._dtype = router.dtype
        self._scores = PackedLinear(
            router, loader.load(weight_specs["bias"]) if "bias" in weight_specs else None
        )
        correction = weight_specs.get("correction")
        self.experts = spec.num_experts
        self.top_k = spec.top_k
        routing = spec.routing
        self.weighs_input = spec.family.weighs_input
        self._rule = RoutingRule(
            spec.num_experts,
            spec.top_k,
            normalize=routing.normalize,
            sigmoid=routing.score == "sigmoid",
            rounds=spec.family.rounds_topk_weights,
            limit=GroupLimit(routing.groups, routing.kept_groups, routing.best_of_group),
            bias_E=None if correction is None else loader.load(correction).flatten(),
            scale=routing.scale,
            jitter=routing.jitter if routing.score == "sparsemixer" else None,
        )

    def __call__(self, x_TD: Tensor) -> RoutedTokens:
        return self._applied(self.choose(x_TD, self.logits(x_TD)))

    def steps(self, x_TD: Tensor) -> Steps[RoutedTokens]:
        """Route tile by tile."""
        chosen: list[RoutedTokens] = []
        for tile in row_tiles(x_TD, LIGHT_ROWS):
            if chosen:
                yield
            chosen.append(self.choose(x_TD[tile], self.logits(x_TD[tile])))
        if len(chosen) == 1:
            return self._applied(chosen[0])
        ids_TK = torch.cat([part.topk_ids_TK for part in chosen])
        weights_TK = torch.cat([part.topk_weights_TK for part in chosen])
        return self._applied(RoutedTokens(x_TD, ids_TK, weights_TK))

    def _applied(self, routed: RoutedTokens) -> RoutedTokens:
        """Multiply the input of one expert per token by its weight, where the model does that."""
        if not self.weighs_input:
            return routed
        x_TD, weights_T1 = routed.x_TD, routed.topk_weights_TK
        return RoutedTokens(
            x_TD * weights_T1.to(x_TD.dtype), routed.topk_ids_TK, torch.ones_like(weights_T1), x_TD
        )

    @property
    def decode_fields(self) -> tuple[int, ...] | None:
        """The router's fields of `attend_layer`, or None."""
        if self._scores.kind is None:
            return None
        rule = self._rule.fields.ctypes.data, self.top_k, self.weighs_input
        return self._scores.kind, *self._scores.addresses, *rule

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return [T, E]."""
        return self._scores(x_TD.to(self._dtype))

    def choose(self, x_TD: Tensor, logits_TE: Tensor) -> RoutedTokens:
        """Return the experts of x_TD and their weights by the family's rule."""
        return RoutedTokens(x_TD, *self._rule.choose(logits_TE))

    def weigh(self, x_TD: Tensor, ids_TK: Tensor) -> RoutedTokens:
        """Return given experts with their router weights for x_TD."""
        weights_TK = self._rule.weigh(self.logits(x_TD), ids_TK)
        return self._applied(RoutedTokens(x_TD, ids_TK, weights_TK))


def expert_sum_steps(routed: RoutedTokens, held: ExpertLayer, local_of_E: Tensor) -> Steps[Tensor]:
    """Return [T, D] float32: each token's weighted sum over its experts in `held`.

    local_of_E [E]: index of each expert in `held`, or their number (kernels/experts.py).
    """
    ids_TK, weights_TK = routed.topk_ids_TK, routed.topk_weights_TK
    if runs_on_gpu(routed.x_TD, held.gate_up, local_of_E):
        return gpu_experts(
            routed.x_TD, local_of_E[ids_TK], weights_TK, held.gate_up, held.down, held.clamped
        )
    rows_N, weights_N, counts = group_by_expert(ids_TK, weights_TK, local_of_E, len(held.gate_up))
    return (
        yield from expert_steps(
            routed.x_TD, held.gate_up, held.down, rows_N, weights_N, counts, held.clamped
        )
    )


def add_expert_sums(
    hidden_TD: Tensor, routed: RoutedTokens, held: ExpertLayer, local_of_E: Tensor
) -> Steps[None]:
    """Add `expert_sum_steps` to hidden_TD in place, for few rows in one compiled call."""
    ids_TK, weights_TK = routed.topk_ids_TK.contiguous(), routed.topk_weights_TK.contiguous()
    experts = held.gate_up, held.down, held.clamped
    if not add_at_once(hidden_TD, routed.x_TD, ids_TK, weights_TK, local_of_E, *experts):
        sums_TD = yield from expert_sum_steps(routed, held, local_of_E)
        yield from add_tiled(hidden_TD, sums_TD)


def _by_layer(
    expert_ids: Sequence[int] | Mapping[int, Sequence[int]], layers: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    if isinstance(expert_ids, Mapping):
        return {layer: tuple(expert_ids[layer]) for layer in layers}
    return dict.fromkeys(layers, tuple(expert_ids))


class ExpertHalf:
    """Experts `expert_ids`, for all layers or by layer; local indices are list positions."""

    def __init__(
        self,
        spec: ModelSpec,
        expert_ids: Sequence[int] | Mapping[int, Sequence[int]],
        layers: dict[int, ExpertLayer],
    ) -> None:
        self.spec = spec
        self.expert_ids = _by_layer(expert_ids, layers)
        self._layers = layers
        for held in layers.values():
            held.locate()

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        spec: ModelSpec,
        expert_ids: Sequence[int] | Mapping[int, Sequence[int]],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        layers: Sequence[int] | None = None,
        separate: bool = False,
        storage_format: bool | None = None,
    ) -> ExpertHalf:
        """Read these experts' tensors (slices of fused ones) of `layers` (None: all MoE layers).

        separate: each expert in memory of its own. storage_format: True: in the checkpoint's format
        where products can read it; None: only on CPUs. Raises CheckpointError.
        """
        moe_layers = spec.moe_layers if layers is None else layers
        ids_of = _by_layer(expert_ids, moe_layers)
        for ids in ids_of.values():
            wrong = [expert for expert in ids if not 0 <= expert < spec.num_experts]
            if wrong or len(set(ids)) != len(ids):
                raise ValueError(
                    f"expert_ids must be distinct and below {spec.num_experts}, got {list(ids)}"
                )
        elements = sum(map(len, ids_of.values())) * layout.expert_elements(spec)
        whole = elements * dtype.itemsize
        target = torch.device(device)
        loader = Loader(checkpoint, dtype, target, progress, whole, storage_format=storage_format)
        held = {}
        for layer in moe_layers:
            read = load_separately if separate else load_experts
            held[layer] = read(checkpoint, spec, layer, ids_of[layer], loader)
            loader.finish_layer()
        return ExpertHalf(spec, expert_ids, held)

    @staticmethod
    def load_slices(
        checkpoint: Checkpoint, spec: ModelSpec, worker: int, workers: int, dtype: torch.dtype
    ) -> ExpertHalf:
        """Read a worker's part of the FFN dim of all experts. Raises CheckpointError."""
        loader, held = Loader(checkpoint, dtype, torch.device("cpu"), None, 0), {}
        for layer in spec.moe_layers:
            held[layer] = load_slices(checkpoint, spec, layer, worker, workers, loader)
            loader.finish_layer()
        return ExpertHalf(spec, range(spec.num_experts), held)

    def layers(self) -> dict[int, ExpertLayer]:
        return dict(self._layers)

    def layer_experts(self, layer: int) -> ExpertLayer:
        return self._layers[layer]

    def steps(
        self,
        layer: int,
        x_UD: Tensor,
        rows_N: Tensor,
        weights_N: Tensor,
        counts_e: Sequence[int] | Tensor,
    ) -> Steps[Tensor]:
        """Return [U, D] float32: each token's weighted sum over its pairs, zeros without pairs.

        Pairs are sorted by local expert, counts_e of each; rows_N index x_UD (a token may appear
        under several experts). Added in ascending local expert order.
        """
        counts = counts_e.tolist() if isinstance(counts_e, Tensor) else counts_e
        held = self._layers[layer]
        return expert_steps(x_UD, held.gate_up, held.down, rows_N, weights_N, counts, held.clamped)

    def device_steps(
        self, layer: int, x_CD: Tensor, pairs_CM: Tensor, counts_e: Tensor
    ) -> Steps[Tensor]:
        """Return the same as `steps` in one step, without host reads.

        pairs_CM int32 [C, 2K]: each row's local experts, the number of experts if elsewhere; then
        the bits of their weights. counts_e int32: pairs of each expert. Added in the order of K.
        """
        held = self._layers[layer]
        local_CK, bits_CK = pairs_CM.chunk(2, dim=1)
        products = held.gate_up, held.down, held.clamped
        return gpu_experts(x_CD, local_CK, bits_CK.view(torch.float32), *products, counts_e)
        yield


def missing_experts(half: ExpertHalf, ids_of: Mapping[int, Sequence[int]]) -> list[ExpertKey]:
    """Return the experts of `ids_of`, by layer, that `half` lacks."""
    return [
        ExpertKey(layer, expert)
        for layer, ids in ids_of.items()
        for expert in ids
        if expert not in half.expert_ids[layer]
    ]


def assemble_half(
    half: ExpertHalf, ids_of: Mapping[int, Sequence[int]], loaded: Mapping[ExpertKey, ExpertLayer]
) -> ExpertHalf:
    """Build the half of `ids_of` from the experts of `half` and its `missing_experts`, loaded."""

    def find(layer: int, expert: int) -> ExpertLayer:
        return loaded.get(ExpertKey(layer, expert)) or _extract_expert(half, layer, expert)

    layers = {
        layer: join_layers([find(layer, expert) for expert in ids]) for layer, ids in ids_of.items()
    }
    return ExpertHalf(half.spec, ids_of, layers)


def _extract_expert(half: ExpertHalf, layer: int, expert: int) -> ExpertLayer:
    """Return one expert of `half` by itself."""
    local, held = half.expert_ids[layer].index(expert), half.layer_experts(layer)
    gate_up, down = (ExpertLinears([each[local]], None) for each in (held.gate_up, held.down))
    return ExpertLayer(gate_up, down, held.clamped)
