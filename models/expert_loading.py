"""Reading some experts of a layer, in whichever form a checkpoint stores them.

Shapes: D model dim, F expert FFN dim, E experts, e local experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from kernels.experts import ClampedGate
from kernels.linear import Product, linears
from kernels.quantization import dequantize_mxfp4
from models import layout
from models.checkpoint import Checkpoint, clamped_wants, is_fused
from models.loading import Loader
from models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Of each local expert: gate_up D -> 2F (gate rows first), down F -> D."""

    gate_up: tuple[Product, ...]
    down: tuple[Product, ...]
    clamped: ClampedGate | None = None


def load_experts(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """Reads only these experts' tensors (slices of fused ones). Raises CheckpointError."""
    if spec.clamp is not None:
        return _load_clamped(checkpoint, spec, layer, expert_ids, loader)
    load = _load_fused if is_fused(checkpoint, spec, layer) else _load_single
    return load(checkpoint, spec, layer, expert_ids, loader)


def _empty_layer(spec: ModelSpec, num_local: int, loader: Loader) -> tuple[Tensor, Tensor]:
    D, F = spec.hidden_size, spec.expert_ffn_size
    return loader.empty(num_local, 2 * F, D), loader.empty(num_local, D, F)


def _load_single(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """From three tensors per expert."""
    F = spec.expert_ffn_size
    gate_up, down = _empty_layer(spec, len(expert_ids), loader)
    for local, expert in enumerate(expert_ids):
        wants = layout.expert_tensors(spec, layer, expert)
        loader.copy(checkpoint.load(wants["gate"]), gate_up[local, :F])
        loader.copy(checkpoint.load(wants["up"]), gate_up[local, F:])
        loader.copy(checkpoint.load(wants["down"]), down[local])
    return ExpertLayer(linears(gate_up), linears(down))


def _load_fused(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """The same from two tensors over all experts: only the pages of ours are touched."""
    wants = layout.fused_expert_tensors(spec, layer)
    stored_gate_up = checkpoint.load(wants["gate_up"])
    stored_down = checkpoint.load(wants["down"])
    gate_up, down = _empty_layer(spec, len(expert_ids), loader)
    for local, expert in enumerate(expert_ids):
        loader.copy(stored_gate_up[expert], gate_up[local])
        loader.copy(stored_down[expert], down[local])
    return ExpertLayer(linears(gate_up), linears(down))


def _load_clamped(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """Stored fused, with gate and up rows in turns: here they stand as elsewhere."""
    assert spec.clamp is not None
    stored = {
        role: checkpoint.load(wanted)
        for role, wanted in clamped_wants(checkpoint, spec, layer).items()
    }
    gate_up, down = _empty_layer(spec, len(expert_ids), loader)
    gate_up_bias = loader.empty(len(expert_ids), gate_up.shape[1])
    down_bias = loader.empty(len(expert_ids), spec.hidden_size)
    F = spec.expert_ffn_size
    for local, expert in enumerate(expert_ids):
        rows_F2D = _matrix(stored, "gate_up", expert)
        bias_F2 = stored["gate_up_bias"][expert]
        for first, part in ((0, slice(F)), (1, slice(F, 2 * F))):
            loader.copy(rows_F2D[first::2], gate_up[local, part])
            loader.copy(bias_F2[first::2], gate_up_bias[local, part])
        loader.copy(_matrix(stored, "down", expert), down[local])
        loader.copy(stored["down_bias"][expert], down_bias[local])
    clamped = ClampedGate(spec.clamp.alpha, spec.clamp.limit)
    return ExpertLayer(linears(gate_up, gate_up_bias), linears(down, down_bias), clamped)


def _matrix(stored: dict[str, Tensor], role: str, expert: int) -> Tensor:
    """[rows out, columns in] of one expert, whose floats are stored transposed and MXFP4 is not."""
    if role in stored:
        return stored[role][expert].t()
    return dequantize_mxfp4(stored[f"{role}_blocks"][expert], stored[f"{role}_scales"][expert])
