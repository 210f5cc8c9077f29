"""Reading experts of a layer from any checkpoint format.

Shapes: D model dim, F expert FFN dim, E experts, e local experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kernels.device import runs_on_device
from kernels.experts import ClampedGate
from kernels.linear import ExpertLinears, PackedLinear, Product, linears
from kernels.quantization import FP8_BLOCK, dequantize, dequantize_mxfp4
from kernels.stored import RawWeight, Storage, StoredWeight
from kernels.stored_experts import StoredLinear
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint, fused_weight_specs
from models.weights.loading import Loader

Copy = Callable[[Tensor, Tensor], object]
"""(source, target): copy, with conversion to the dtype of the target."""

W = TypeVar("W")


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Products of local experts: gate_up D -> 2F (gate rows first), down F -> D."""

    gate_up: ExpertLinears
    down: ExpertLinears
    clamped: ClampedGate | None = None

    def locate(self) -> None:
        """Make the tables of a device's experts, which the first request need not wait for."""
        _ = self.gate_up.table, self.down.table


def load_experts(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer:
    """Read these experts' tensors (slices of fused ones). Raises CheckpointError."""
    if loader.keeps_stored and expert_ids:
        held = _load_stored(checkpoint, spec, layer, expert_ids, loader)
        if held is not None:
            return held
    into = tuple(loader.empty(len(expert_ids), *shape) for shape in expert_shapes(spec))
    copy_experts(checkpoint, spec, layer, expert_ids, loader.copy, into)
    gate_up, down, *biases = into
    gate_up_bias, down_bias = biases or (None, None)
    return ExpertLayer(linears(gate_up, gate_up_bias), linears(down, down_bias), clamped_gate(spec))


def _load_stored(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: Sequence[int], loader: Loader
) -> ExpertLayer | None:
    """Read these experts as they are stored, if products can read all of them."""
    stored_layer = StoredLayer(checkpoint, spec, layer)
    found: list[Sequence[Product]] = []
    for expert in expert_ids:
        products = _stored_products(stored_layer.expert(expert), spec, loader)
        if products is None:
            return None
        found.append(products)
        loader.count(layout.expert_elements(spec) * loader.dtype.itemsize)
    gate_up, down = (ExpertLinears(each, None) for each in zip(*found, strict=True))
    return ExpertLayer(gate_up, down, clamped_gate(spec))


def _stored_products(
    stored: Mapping[str, Tensor], spec: ModelSpec, loader: Loader
) -> Sequence[Product] | None:
    """Return an expert's gate_up and down as they are stored, on the loader's device."""
    biases = stored_biases(stored, spec, loader.dtype)
    if not runs_on_device(loader.device):
        weights = stored_weights(stored, spec, loader.dtype)
        if weights is None:
            return None
        each = zip(weights, biases, strict=True)
        return [PackedLinear.of_panels(weight, loader.dtype, bias_N) for weight, bias_N in each]
    raw = _pair_of(stored, spec, loader.dtype, RawWeight.checked)
    if raw is None:
        return None
    return [
        StoredLinear(
            weight.storage,
            loader.keep(weight.codes),
            None if weight.scales is None else loader.keep(weight.scales),
            None if bias_N is None else loader.keep(bias_N),
        )
        for weight, bias_N in zip(raw, biases, strict=True)
    ]


def load_slices(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, worker: int, workers: int, loader: Loader
) -> ExpertLayer:
    """Read a worker's run of the FFN dim of all experts, dequantised.

    The biases of down are zeros on all workers but the first, so that the sum over workers has them
    once. Raises CheckpointError.
    """
    F = spec.expert_ffn_size
    run = slice(F * worker // workers, F * (worker + 1) // workers)
    whole = tuple(loader.empty(1, *shape) for shape in expert_shapes(spec))
    gate_ups, downs = list[PackedLinear](), list[PackedLinear]()
    for expert in range(spec.num_experts):
        copy_experts(checkpoint, spec, layer, [expert], loader.copy, whole)
        gate_up, down, *biases = (tensor[0] for tensor in whole)
        gate_up_bias, down_bias = biases or (None, None)
        bias_N = None if gate_up_bias is None else _both(gate_up_bias, run)
        gate_ups.append(PackedLinear(_both(gate_up, run), bias_N))
        bias_N = None if down_bias is None else down_bias * (worker == 0)
        downs.append(PackedLinear(down[:, run].clone().contiguous(), bias_N))
    both = ExpertLinears(gate_ups, None), ExpertLinears(downs, None)
    return ExpertLayer(*both, clamped_gate(spec))


def _both(gate_up: Tensor, run: slice) -> Tensor:
    """Return a run of the gate rows, then that of the up rows."""
    return torch.cat([rows[run] for rows in gate_up.chunk(2)])


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
        if "gate" in stored:
            for role, rows in zip(("gate", "up"), gate_up[local].chunk(2), strict=True):
                copy(_matrix(stored, role, spec), rows)
        elif spec.clamp is None:
            copy(_matrix(stored, "gate_up", spec), gate_up[local])
        else:
            _deinterleave(_matrix(stored, "gate_up", spec), copy, gate_up[local])
        copy(_matrix(stored, "down", spec), down[local])
        if biases:
            _deinterleave(stored["gate_up_bias"], copy, biases[0][local])
            copy(stored["down_bias"], biases[1][local])


class StoredLayer:
    """A layer's experts as the checkpoint stores them. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, layer: int) -> None:
        self._checkpoint, self._spec, self.number = checkpoint, spec, layer
        fused = fused_weight_specs(checkpoint, spec, layer)
        self._fused = None if fused is None else self._stored(fused)

    def expert(self, expert: int) -> dict[str, Tensor]:
        """Return one expert's tensors by role, over mapped pages.

        Roles: gate and up, or gate_up; down; biases; and multipliers ROLE_scale (fp8, int8) or
        ROLE_scales (MXFP4).
        """
        if self._fused is None:
            return self._stored(layout.expert_tensors(self._spec, self.number, expert))
        return {role: tensor[expert] for role, tensor in self._fused.items()}

    def _stored(self, weight_specs: layout.WeightSpecs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for role, weight_spec in weight_specs.items():
            found[role], scale = self._checkpoint.stored(weight_spec)
            if scale is not None:
                found[f"{role}_scale"] = scale
        return found


def stored_weights(
    stored: Mapping[str, Tensor], spec: ModelSpec, dtype: torch.dtype
) -> tuple[StoredWeight, StoredWeight] | None:
    """Return an expert's gate_up and down in panels as they are stored.

    None: rows of `dtype` are not multiplied with such weights, or they are no smaller.
    """
    return _pair_of(stored, spec, dtype, RawWeight.packed)


def _pair_of(
    stored: Mapping[str, Tensor], spec: ModelSpec, dtype: torch.dtype, use: Callable[[RawWeight], W]
) -> tuple[W, W] | None:
    """Return what `use` makes of an expert's gate_up and down; None as of `stored_weights`."""
    whole = slice(None)
    if "gate" in stored:
        gate_up = [("gate", whole), ("up", whole)]
    elif spec.clamp is None:
        gate_up = [("gate_up", whole)]
    else:
        gate_up = [("gate_up", slice(0, None, 2)), ("gate_up", slice(1, None, 2))]
    try:
        weights = [_raw_weight(stored, rows, spec, dtype) for rows in (gate_up, [("down", whole)])]
        found = [weight for weight in weights if weight is not None]
        is_uniform = len({weight.storage for weight in found}) == 1
        if len(found) < len(weights) or not is_uniform:
            return None
        return use(found[0]), use(found[1])
    except ValueError:  # an unusual scale
        return None


def _raw_weight(
    stored: Mapping[str, Tensor],
    parts: Sequence[tuple[str, slice]],
    spec: ModelSpec,
    dtype: torch.dtype,
) -> RawWeight | None:
    """Return rows of roles, one after the other. Raises ValueError."""
    if all(f"{role}_blocks" in stored for role, _ in parts):
        blocks, exponents = (
            torch.cat([stored[f"{role}_{part}"][rows] for role, rows in parts])
            for part in ("blocks", "scales")
        )
        return RawWeight(Storage.MXFP4, blocks, exponents)
    if any(f"{role}_blocks" in stored for role, _ in parts):
        return None
    if all(f"{role}_scale" in stored for role, _ in parts):
        kinds = {stored[role].dtype for role, _ in parts}
        if len(kinds) > 1:
            return None
        weight_NK = torch.cat([stored[role][rows].view(torch.uint8) for role, rows in parts])
        scale_NS = torch.cat(
            [_row_scales(stored[role], stored[f"{role}_scale"])[rows] for role, rows in parts]
        )
        if torch.int8 in kinds:
            return RawWeight(Storage.INT8, weight_NK.view(torch.int8), scale_NS)
        return RawWeight(Storage.FP8, weight_NK, scale_NS)
    matrices = [stored[role].t() if is_transposed(spec) else stored[role] for role, _ in parts]
    are_narrow = all(matrix.dtype is torch.bfloat16 for matrix in matrices)
    if dtype is not torch.float32 or not are_narrow:
        return None
    rows_of = zip(matrices, parts, strict=True)
    return RawWeight(Storage.BFLOAT16, torch.cat([matrix[rows] for matrix, (_, rows) in rows_of]))


def _row_scales(weight_NK: Tensor, scale: Tensor) -> Tensor:
    """Return the scales of each row's blocks of FP8_BLOCK inputs. Raises ValueError."""
    (N, K), scale = weight_NK.shape, scale.to(torch.float32)
    if weight_NK.dtype is not torch.int8:
        return scale.repeat_interleave(FP8_BLOCK, 0)[:N]
    if scale.shape[1] == 1:
        return scale.expand(N, -(-K // FP8_BLOCK))
    blocks, rest = divmod(K // scale.shape[1], FP8_BLOCK)
    if rest:
        raise ValueError(f"the groups of int8 are no multiples of {FP8_BLOCK}")
    return scale.repeat_interleave(blocks, 1)


def stored_biases(
    stored: Mapping[str, Tensor], spec: ModelSpec, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return an expert's biases of gate_up (gate first) and down in `dtype`, if it has any."""
    if "down_bias" not in stored:
        return None, None
    gate_up = torch.empty(2 * spec.expert_ffn_size, dtype=dtype)
    _deinterleave(stored["gate_up_bias"], lambda bias, into: into.copy_(bias), gate_up)
    return gate_up, stored["down_bias"].to(dtype, copy=True)


def _deinterleave(rows: Tensor, copy: Copy, into: Tensor) -> None:
    """Copy rows of gate and up in turn to gate rows, then up rows."""
    for first, half in enumerate(into.chunk(2)):
        copy(rows[first::2], half)


def _matrix(stored: Mapping[str, Tensor], role: str, spec: ModelSpec) -> Tensor:
    """Return [out rows, in columns]."""
    if f"{role}_blocks" in stored:
        return dequantize_mxfp4(stored[f"{role}_blocks"], stored[f"{role}_scales"])
    if f"{role}_scale" in stored:
        return dequantize(stored[role], stored[f"{role}_scale"])
    return stored[role].t() if is_transposed(spec) else stored[role]


def is_transposed(spec: ModelSpec) -> bool:
    """Return whether floats are stored [in rows, out columns]; MXFP4 is not."""
    names = spec.family.experts
    return names is None or names.transposed
