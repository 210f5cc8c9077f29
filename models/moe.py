"""The expert half of a decoder: some of the routed experts of every MoE layer.

Shapes: U tokens, D model dim, F expert FFN dim, e local experts, N (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.experts import grouped_experts
from models import layout
from models.checkpoint import Checkpoint, is_fused
from models.layout import Wanted
from models.loading import Loader, Progress, total_bytes
from models.spec import ModelSpec


class ExpertHalf:
    """Experts `expert_ids` of each MoE layer; the local index is the position in that list."""

    def __init__(
        self,
        spec: ModelSpec,
        expert_ids: Sequence[int],
        gate_up: dict[int, Tensor],
        down: dict[int, Tensor],
    ) -> None:
        self.spec = spec
        self.expert_ids = tuple(expert_ids)
        self._gate_up = gate_up
        self._down = down

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        spec: ModelSpec,
        expert_ids: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> ExpertHalf:
        """Reads only these experts' tensors (slices of fused ones). Raises CheckpointError."""
        wrong = [expert for expert in expert_ids if not 0 <= expert < spec.num_experts]
        if wrong or len(set(expert_ids)) != len(expert_ids):
            raise ValueError(
                f"expert_ids must be distinct and below {spec.num_experts}, got {list(expert_ids)}"
            )
        whole = total_bytes(_wants(spec, expert_ids), dtype)
        loader = Loader(checkpoint, dtype, torch.device(device), progress, whole)
        gate_up, down = {}, {}
        for layer in spec.moe_layers:
            load = _load_fused if is_fused(checkpoint, spec, layer) else _load_single
            gate_up[layer], down[layer] = load(checkpoint, spec, layer, expert_ids, loader)
            loader.layer_done()
        return ExpertHalf(spec, expert_ids, gate_up, down)

    def run(
        self,
        layer: int,
        x_UD: Tensor,
        rows_N: Tensor,
        weights_N: Tensor,
        counts_e: Sequence[int] | Tensor,
    ) -> Tensor:
        """[U, D] float32: each token's weighted sum over its pairs; zeros where it has none.

        Pairs are sorted by local expert, counts_e of each; rows_N index x_UD (a token may appear
        under several experts). Added in ascending local expert order.
        """
        counts = counts_e.tolist() if isinstance(counts_e, Tensor) else counts_e
        return grouped_experts(
            x_UD, self._gate_up[layer], self._down[layer], rows_N, weights_N, counts
        )


def _wants(spec: ModelSpec, expert_ids: Sequence[int]) -> Iterator[Wanted]:
    for layer in spec.moe_layers:
        for expert in expert_ids:
            yield from layout.expert_tensors(spec, layer, expert).values()


def _empty_layer(spec: ModelSpec, num_local: int, loader: Loader) -> tuple[Tensor, Tensor]:
    D, F = spec.hidden_size, spec.expert_ffn_size
    return loader.empty(num_local, 2 * F, D), loader.empty(num_local, D, F)


def _load_single(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> tuple[Tensor, Tensor]:
    """gate_up [e, 2F, D] and down [e, D, F] from three tensors per expert."""
    F = spec.expert_ffn_size
    gate_up, down = _empty_layer(spec, len(expert_ids), loader)
    for local, expert in enumerate(expert_ids):
        wants = layout.expert_tensors(spec, layer, expert)
        loader.copy(checkpoint.load(wants["gate"]), gate_up[local, :F])
        loader.copy(checkpoint.load(wants["up"]), gate_up[local, F:])
        loader.copy(checkpoint.load(wants["down"]), down[local])
    return gate_up, down


def _load_fused(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> tuple[Tensor, Tensor]:
    """The same from two tensors over all experts: only the pages of ours are touched."""
    wants = layout.fused_expert_tensors(spec, layer)
    stored_gate_up = checkpoint.load(wants["gate_up"])
    stored_down = checkpoint.load(wants["down"])
    gate_up, down = _empty_layer(spec, len(expert_ids), loader)
    for local, expert in enumerate(expert_ids):
        loader.copy(stored_gate_up[expert], gate_up[local])
        loader.copy(stored_down[expert], down[local])
    return gate_up, down
