"""The expert half of a decoder: some of the routed experts of every MoE layer.

Shapes: U tokens, D model dim, F expert FFN dim, e local experts, N (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kernels.experts import expert_steps
from kernels.gpu_experts import gpu_experts, runs_on_gpu
from kernels.routing import group_by_expert
from kernels.steps import Steps, at_once, run_through
from models.experts.expert_loading import ExpertLayer, load_experts, read_apart
from models.experts.router import Routed
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint
from models.weights.loading import Loader, Progress


def expert_sum_steps(routed: Routed, held: ExpertLayer, local_of_E: Tensor) -> Steps[Tensor]:
    """[T, D] float32: each token's weighted sum over those of its experts that `held` has.

    local_of_E [E]: index of each expert in `held`, or their number (kernels/routing.py).
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


expert_sums = at_once(expert_sum_steps)


def _by_layer(
    expert_ids: Sequence[int] | Mapping[int, Sequence[int]], layers: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    if isinstance(expert_ids, Mapping):
        return {layer: tuple(expert_ids[layer]) for layer in layers}
    return dict.fromkeys(layers, tuple(expert_ids))


class ExpertHalf:
    """Experts `expert_ids` of each MoE layer (of all layers, or by layer); the local index is the
    position in that list."""

    def __init__(
        self,
        spec: ModelSpec,
        expert_ids: Sequence[int] | Mapping[int, Sequence[int]],
        layers: dict[int, ExpertLayer],
    ) -> None:
        self.spec = spec
        self.expert_ids = _by_layer(expert_ids, layers)
        self._layers = layers

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
        apart: bool = False,
    ) -> ExpertHalf:
        """Reads only these experts' tensors (slices of fused ones), of `layers` (None: of all that
        have experts). apart: each into memory of its own. Raises CheckpointError."""
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
        loader = Loader(checkpoint, dtype, torch.device(device), progress, whole)
        held = {}
        for layer in moe_layers:
            read = read_apart if apart else load_experts
            held[layer] = read(checkpoint, spec, layer, ids_of[layer], loader)
            loader.layer_done()
        return ExpertHalf(spec, expert_ids, held)

    def layers(self) -> dict[int, ExpertLayer]:
        return dict(self._layers)

    def held(self, layer: int) -> ExpertLayer:
        return self._layers[layer]

    def run(
        self,
        layer: int,
        x_UD: Tensor,
        rows_N: Tensor,
        weights_N: Tensor,
        counts_e: Sequence[int] | Tensor,
    ) -> Tensor:
        """As `steps`, without interruptions."""
        return run_through(self.steps(layer, x_UD, rows_N, weights_N, counts_e))

    def steps(
        self,
        layer: int,
        x_UD: Tensor,
        rows_N: Tensor,
        weights_N: Tensor,
        counts_e: Sequence[int] | Tensor,
    ) -> Steps[Tensor]:
        """[U, D] float32: each token's weighted sum over its pairs; zeros where it has none.

        Pairs are sorted by local expert, counts_e of each; rows_N index x_UD (a token may appear
        under several experts). Added in ascending local expert order.
        """
        counts = counts_e.tolist() if isinstance(counts_e, Tensor) else counts_e
        held = self._layers[layer]
        return expert_steps(x_UD, held.gate_up, held.down, rows_N, weights_N, counts, held.clamped)
