"""Reading some experts of a layer, in whichever form a checkpoint stores them.

Shapes: D model dim, F expert FFN dim, E experts, e local experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from kernels.experts import ClampedGate
from kernels.linear import Linears, linears
from kernels.quantization import dequantize_mxfp4
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint, clamped_wants, is_fused
from models.weights.loading import Loader


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Of each local expert: gate_up D -> 2F (gate rows first), down F -> D."""

    gate_up: Linears
    down: Linears
    clamped: ClampedGate | None = None


def load_experts(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """Reads only these experts' tensors (slices of fused ones). Raises CheckpointError."""
    into = tuple(loader.empty(len(expert_ids), *shape) for shape in expert_shapes(spec))
    copy_experts(checkpoint, spec, layer, expert_ids, loader, into)
    gate_up, down, *biases = into
    gate_up_bias, down_bias = biases or (None, None)
    return ExpertLayer(linears(gate_up, gate_up_bias), linears(down, down_bias), clamped_gate(spec))


def expert_shapes(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Of one expert: gate_up [2F, D] (gate rows first), down [D, F]; where the family has biases,
    of those [2F] and [D]."""
    D, F = spec.hidden_size, spec.expert_ffn_size
    weights = ((2 * F, D), (D, F))
    return weights if spec.clamp is None else (*weights, (2 * F,), (D,))


def clamped_gate(spec: ModelSpec) -> ClampedGate | None:
    return None if spec.clamp is None else ClampedGate(spec.clamp.alpha, spec.clamp.limit)


def copy_experts(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    layer: int,
    expert_ids: Sequence[int],
    loader: Loader,
    into: Sequence[Tensor],
) -> None:
    """Fills `into`, a tensor [e, *shape] for each of `expert_shapes`. Reads only these experts'
    tensors (slices of fused ones). Raises CheckpointError."""
    if spec.clamp is not None:
        _copy_clamped(checkpoint, spec, layer, expert_ids, loader, into)
        return
    copy = _copy_fused if is_fused(checkpoint, spec, layer) else _copy_single
    copy(checkpoint, spec, layer, expert_ids, loader, into)


def _copy_single(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    layer: int,
    expert_ids: Sequence[int],
    loader: Loader,
    into: Sequence[Tensor],
) -> None:
    """From three tensors per expert."""
    F = spec.expert_ffn_size
    gate_up, down = into
    for local, expert in enumerate(expert_ids):
        wants = layout.expert_tensors(spec, layer, expert)
        loader.copy(checkpoint.load(wants["gate"]), gate_up[local, :F])
        loader.copy(checkpoint.load(wants["up"]), gate_up[local, F:])
        loader.copy(checkpoint.load(wants["down"]), down[local])


def _copy_fused(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    layer: int,
    expert_ids: Sequence[int],
    loader: Loader,
    into: Sequence[Tensor],
) -> None:
    """The same from two tensors over all experts: only the pages of ours are touched."""
    wants = layout.fused_expert_tensors(spec, layer)
    stored_gate_up = checkpoint.load(wants["gate_up"])
    stored_down = checkpoint.load(wants["down"])
    gate_up, down = into
    for local, expert in enumerate(expert_ids):
        loader.copy(stored_gate_up[expert], gate_up[local])
        loader.copy(stored_down[expert], down[local])


def _copy_clamped(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    layer: int,
    expert_ids: Sequence[int],
    loader: Loader,
    into: Sequence[Tensor],
) -> None:
    """Stored fused, with gate and up rows in turns: here they stand as elsewhere."""
    stored = {
        role: checkpoint.load(wanted)
        for role, wanted in clamped_wants(checkpoint, spec, layer).items()
    }
    gate_up, down, gate_up_bias, down_bias = into
    F = spec.expert_ffn_size
    for local, expert in enumerate(expert_ids):
        rows_F2D = _matrix(stored, "gate_up", expert)
        bias_F2 = stored["gate_up_bias"][expert]
        for first, part in ((0, slice(F)), (1, slice(F, 2 * F))):
            loader.copy(rows_F2D[first::2], gate_up[local, part])
            loader.copy(bias_F2[first::2], gate_up_bias[local, part])
        loader.copy(_matrix(stored, "down", expert), down[local])
        loader.copy(stored["down_bias"][expert], down_bias[local])


def _matrix(stored: dict[str, Tensor], role: str, expert: int) -> Tensor:
    """[rows out, columns in] of one expert, whose floats are stored transposed and MXFP4 is not."""
    if role in stored:
        return stored[role][expert].t()
    return dequantize_mxfp4(stored[f"{role}_blocks"][expert], stored[f"{role}_scales"][expert])
