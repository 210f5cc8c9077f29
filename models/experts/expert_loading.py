"""Reading experts of a layer from any checkpoint format.

Shapes: D model dim, F expert FFN dim, E experts, e local experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kernels.experts import ClampedGate
from kernels.linear import ExpertLinears, linears
from kernels.quantization import dequantize_fp8_blocks, dequantize_mxfp4
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint, fused_weight_specs
from models.weights.loading import Loader

Copy = Callable[[Tensor, Tensor], object]
"""(source, target): copy, with conversion to the dtype of the target."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Products of local experts: gate_up D -> 2F (gate rows first), down F -> D."""

    gate_up: ExpertLinears
    down: ExpertLinears
    clamped: ClampedGate | None = None


def load_experts(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """Read these experts' tensors (slices of fused ones). Raises CheckpointError."""
    into = tuple(loader.empty(len(expert_ids), *shape) for shape in expert_shapes(spec))
    copy_experts(checkpoint, spec, layer, expert_ids, loader.copy, into)
    gate_up, down, *biases = into
    gate_up_bias, down_bias = biases or (None, None)
    return ExpertLayer(linears(gate_up, gate_up_bias), linears(down, down_bias), clamped_gate(spec))


def load_separately(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """Read each expert into memory of its own."""
    each = [load_experts(checkpoint, spec, layer, [expert], loader) for expert in ids]
    return join_layers(each) if each else load_experts(checkpoint, spec, layer, ids, loader)


def join_layers(layers: Sequence[ExpertLayer]) -> ExpertLayer:
    """Concatenate layers. Memory is shared, and freed with the last layer that uses it."""
    gate_up = [product for layer in layers for product in layer.gate_up]
    down = [product for layer in layers for product in layer.down]
    clamped = next((layer.clamped for layer in layers), None)
    return ExpertLayer(ExpertLinears(gate_up, None), ExpertLinears(down, None), clamped)


def expert_shapes(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Return one expert's shapes: gate_up [2F, D] (gate rows first), down [D, F], and biases."""
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
    copy: Copy,
    into: Sequence[Tensor],
) -> None:
    """Fill `into`, a tensor [e, *shape] for each of `expert_shapes`. Raises CheckpointError."""
    gate_up, down, *biases = into
    stored_layer = StoredLayer(checkpoint, spec, layer)
    for local, expert in enumerate(expert_ids):
        stored = stored_layer.expert(expert)
        lay_out_gate_up(stored, spec, copy, gate_up[local])
        lay_out_down(stored, spec, copy, down[local])
        if biases:
            gate_up_bias, down_bias = biases
            lay_out_gate_up_bias(stored, spec, copy, gate_up_bias[local])
            copy(stored["down_bias"], down_bias[local])


class StoredLayer:
    """A layer's experts as the checkpoint stores them. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, layer: int) -> None:
        self._checkpoint, self._spec, self._layer = checkpoint, spec, layer
        fused = fused_weight_specs(checkpoint, spec, layer)
        self._fused = None if fused is None else self._stored(fused)

    def expert(self, expert: int) -> dict[str, Tensor]:
        """Return one expert's tensors by role, over mapped pages.

        Roles: gate and up, or gate_up; down; biases; and multipliers ROLE_scale (fp8) or
        ROLE_scales (MXFP4).
        """
        if self._fused is None:
            return self._stored(layout.expert_tensors(self._spec, self._layer, expert))
        return {role: tensor[expert] for role, tensor in self._fused.items()}

    def _stored(self, weight_specs: layout.WeightSpecs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for role, weight_spec in weight_specs.items():
            found[role], scale = self._checkpoint.stored(weight_spec)
            if scale is not None:
                found[f"{role}_scale"] = scale
        return found


def lay_out_gate_up(
    stored: Mapping[str, Tensor], spec: ModelSpec, copy: Copy, into: Tensor
) -> None:
    """Lay out [2F, D], gate rows first, from one expert's stored tensors."""
    F = spec.expert_ffn_size
    if "gate" in stored:
        copy(_matrix(stored, "gate", spec), into[:F])
        copy(_matrix(stored, "up", spec), into[F:])
        return
    rows = _matrix(stored, "gate_up", spec)
    if spec.clamp is None:
        copy(rows, into)
    else:
        _deinterleave(rows, F, copy, into)


def lay_out_gate_up_bias(
    stored: Mapping[str, Tensor], spec: ModelSpec, copy: Copy, into: Tensor
) -> None:
    _deinterleave(stored["gate_up_bias"], spec.expert_ffn_size, copy, into)


def lay_out_down(stored: Mapping[str, Tensor], spec: ModelSpec, copy: Copy, into: Tensor) -> None:
    copy(_matrix(stored, "down", spec), into)


def _deinterleave(rows: Tensor, F: int, copy: Copy, into: Tensor) -> None:
    copy(rows[0::2], into[:F])
    copy(rows[1::2], into[F:])


def _matrix(stored: Mapping[str, Tensor], role: str, spec: ModelSpec) -> Tensor:
    """Return [out rows, in columns]. Clamped floats are stored transposed, MXFP4 is not."""
    if f"{role}_blocks" in stored:
        return dequantize_mxfp4(stored[f"{role}_blocks"], stored[f"{role}_scales"])
    if f"{role}_scale" in stored:
        return dequantize_fp8_blocks(stored[role], stored[f"{role}_scale"])
    return stored[role] if spec.clamp is None else stored[role].t()
