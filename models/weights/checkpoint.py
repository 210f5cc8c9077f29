"""A Hugging Face checkpoint folder: checked tensor index, and memory-mapped reads.

Only safetensors are read: never a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from contracts.errors import CheckpointError
from kernels.quantization import FP8_BLOCK, MXFP4_GROUP, dequantize, unpack_int8
from models.spec.checkpoint_files import INDEX, SINGLE, SafetensorsFile, TensorEntry, plain_name
from models.spec.config_fields import read_json
from models.spec.model import ModelSpec, read_spec
from models.weights import layout
from models.weights.layout import WeightSpec, WeightSpecs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LOADABLE = ("F32", "BF16", "F16")
_FP8, _INT8 = "F8_E4M3", "I8"
_SCALES = {_FP8: "_scale_inv", _INT8: "_scale"}
_PACKED = "_packed"  # four int8, which 128 is added to, in an int32


class Checkpoint:
    """The tensors of `folder`, by the headers of all shards. Raises CheckpointError.

    Those of a text model beside a vision model have the names that they have without it, and packed
    int8 weights those of unpacked ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, SafetensorsFile] = {}
        self._stored_name: dict[str, str] = {}
        single = folder / SINGLE
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; give a Hugging Face folder")
        if single.is_file():
            file = SafetensorsFile(single)
            self._file_of = dict.fromkeys(file.entries, file)
        elif (folder / INDEX).is_file():
            self._open_shards(folder / INDEX)
        else:
            raise _no_weights(folder)
        for name in list(self._file_of):
            plain = plain_name(name)
            if plain.endswith(f".weight{_PACKED}"):
                plain = plain.removesuffix(_PACKED)
            if plain == name:
                continue
            if plain in self._file_of:
                raise CheckpointError(f"{folder}: {name} and {plain} are both stored; keep one")
            self._file_of[plain], self._stored_name[plain] = self._file_of.pop(name), name

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def entry(self, name: str) -> TensorEntry:
        """Return the header entry of a tensor that exists."""
        return self._file_of[name].entries[self._stored_name.get(name, name)]

    def get(self, name: str) -> Tensor:
        """Return a read-only tensor over mapped pages; copy what outlives `release`."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return self._file_of[name].tensor(self._stored_name.get(name, name))

    def find(self, weight_spec: WeightSpec) -> str:
        """Return the name under which `weight_spec` is stored. Raises CheckpointError."""
        for name in weight_spec.names:
            if name in self._file_of:
                self._check(name, weight_spec)
                return name
        raise CheckpointError(
            f"{self.folder}: tensor {weight_spec.names[0]} is missing from the checkpoint; expected"
            f" shape {list(weight_spec.shape)}: is the download complete, does config.json "
            "belong to it?"
        )

    def load(self, weight_spec: WeightSpec) -> Tensor:
        """Return the tensor as `get`, or a dequantised float32 copy of fp8 or int8."""
        stored, scale = self.stored(weight_spec)
        return stored if scale is None else dequantize(stored, scale)

    def stored(self, weight_spec: WeightSpec) -> tuple[Tensor, Tensor | None]:
        """Return the tensor as `get`, and the scales of fp8 or int8, or None."""
        name = self.find(weight_spec)
        stored, scale = self.get(name), self.scale_name(name)
        if self._is_packed(name):
            stored = unpack_int8(stored, weight_spec.shape[1])
        return stored, None if scale is None else self.get(scale)

    def scale_name(self, name: str) -> str | None:
        """Return the name of the scales of an existing tensor, or None."""
        suffix = _SCALES.get(_INT8 if self._is_packed(name) else self.entry(name).dtype)
        return None if suffix is None else name + suffix

    def _is_packed(self, name: str) -> bool:
        return self._stored_name.get(name, name).endswith(_PACKED)

    def release(self) -> None:
        """Release the pages read so far, so that resident memory stays bounded."""
        for file in set(self._file_of.values()):
            file.release()

    def _check(self, name: str, weight_spec: WeightSpec) -> None:
        entry = self.entry(name)
        path = self._file_of[name].path
        shape, dtype = weight_spec.shape, entry.dtype
        if self._is_packed(name):
            shape = *shape[:-1], -(-shape[-1] // 4)
            dtype = _INT8 if dtype == "I32" else f"packed {dtype}"
        if entry.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(entry.shape)}, config.json implies"
                f" {list(shape)}; use the config.json that belongs to these weights"
            )
        if dtype in _SCALES and len(entry.shape) == 2 and not weight_spec.packed:
            self._check_scales(name, weight_spec.shape)
        elif dtype not in (("U8",) if weight_spec.packed else _LOADABLE):
            floats = "F32, BF16, F16, F8_E4M3 and I8 matrices"
            supported = "U8 (MXFP4)" if weight_spec.packed else floats
            raise CheckpointError(
                f"{path}: tensor {name} is stored as {dtype}; supported: {supported}"
            )

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a matrix has scales: fp8 for each block, int8 for groups of equal size."""
        scale = self.scale_name(name)
        assert scale is not None
        sizes = tuple(-(-size // FP8_BLOCK) for size in shape)
        if scale == name + _SCALES[_INT8]:
            groups = self.entry(scale).shape[-1:] if self.has(scale) else (1,)
            sizes = shape[0], groups[0] if groups and groups[0] and shape[1] % groups[0] == 0 else 1
        entry = self.entry(self.find(WeightSpec((scale,), sizes)))
        if entry.dtype not in _LOADABLE:
            raise CheckpointError(
                f"{self.folder}: tensor {scale} is stored as {entry.dtype}; supported: "
                + ", ".join(_LOADABLE)
            )

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty; download it again")
        files: dict[str, SafetensorsFile] = {}
        for shard in sorted({str(shard) for shard in weight_map.values()}):
            path = self.folder / shard
            if Path(shard).name != shard:
                raise CheckpointError(f"{index}: weight_map names {shard}: not a plain file name")
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, but {INDEX} names it; download that shard")
            files[shard] = SafetensorsFile(path)
        for name, shard in weight_map.items():
            file = files[str(shard)]
            if name not in file.entries:
                raise CheckpointError(
                    f"{file.path}: tensor {name} is missing from the shard that {INDEX} names"
                )
            self._file_of[name] = file


def check_checkpoint(folder: Path) -> ModelSpec:
    """Return the spec of a folder after checking that it holds exactly the needed tensors.

    Names, shapes and dtypes are checked; only config.json, the index and shard headers are read.
    Raises CheckpointError: one line that names file, tensor or field, and the remedy.
    """
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder)
    read = {checkpoint.find(weight_spec) for weight_spec in layout.attention_half_tensors(spec)}
    for layer in spec.moe_layers:
        for weight_specs in expert_weight_specs(checkpoint, spec, layer, range(spec.num_experts)):
            read.update(checkpoint.find(weight_spec) for weight_spec in weight_specs.values())
    scales = {scale for name in read if (scale := checkpoint.scale_name(name)) is not None}
    refuse_unread(folder, spec, checkpoint.names, read | scales)
    return spec


def expert_weight_specs(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert_ids: range
) -> list[WeightSpecs]:
    """Return the tensors that must exist for `expert_ids` of a layer, in its stored format."""
    fused = fused_weight_specs(checkpoint, spec, layer)
    if fused is not None:
        return [fused]
    return [layout.expert_tensors(spec, layer, expert) for expert in expert_ids]


def fused_weight_specs(checkpoint: Checkpoint, spec: ModelSpec, layer: int) -> WeightSpecs | None:
    """Return the tensors over all experts, or None if stored singly. Raises CheckpointError."""
    names = spec.family.experts
    if names is not None:
        fused = layout.fused_expert_tensors(spec, layer)
        is_fused = names.gate is None or any(map(checkpoint.has, fused["gate_up"].names))
        return fused if is_fused else None
    packed = layout.packed_expert_tensors(spec, layer)
    if not any(checkpoint.has(packed[role].names[0]) for role in ("gate_up_blocks", "down_blocks")):
        return layout.clamped_expert_tensors(spec, layer)
    if spec.hidden_size % MXFP4_GROUP or spec.expert_ffn_size % MXFP4_GROUP:
        raise CheckpointError(
            f"{checkpoint.folder}: hidden_size={spec.hidden_size} and intermediate_size="
            f"{spec.expert_ffn_size} must be multiples of {MXFP4_GROUP} for MXFP4 experts"
        )
    return packed


def resolve_dtype(spec: ModelSpec, dtype: Literal["auto", "bfloat16", "float32"]) -> torch.dtype:
    """Return the compute dtype. auto: as stored, but float32 for float16 (bfloat16 would round)."""
    import torch

    return torch.bfloat16 if element_bytes(spec, dtype) == 2 else torch.float32


def element_bytes(spec: ModelSpec, dtype: Literal["auto", "bfloat16", "float32"]) -> int:
    """Return the bytes of an element of `resolve_dtype`."""
    chosen = spec.dtype if dtype == "auto" else dtype
    return 2 if chosen == "bfloat16" else 4


def _no_weights(folder: Path) -> CheckpointError:
    loose = sorted(path.name for path in folder.glob("*.safetensors"))
    if loose:
        return CheckpointError(
            f"{folder}: {len(loose)} .safetensors files but neither {SINGLE} nor {INDEX};"
            f" download {INDEX} too"
        )
    pickles = sorted(
        path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in folder.glob(suffix)
    )
    if pickles:
        return CheckpointError(
            f"{folder}: only pickled weights ({pickles[0]}), which are not read because loading"
            " them can run code; use the safetensors version of this checkpoint"
        )
    return CheckpointError(f"{folder}: no weights: neither {SINGLE} nor {INDEX} is there")


_INVERSE_FREQUENCIES = (r"(^|\.)rotary_emb\.inv_freq$",)  # computed from config.json
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def refuse_unread(
    folder: Path, spec: ModelSpec, stored: Collection[str], read: Collection[str]
) -> None:
    """Raise CheckpointError for stored tensors that are not read."""
    unread = sorted(
        name for name in stored if name not in read and not _is_ignorable(spec, name, read)
    )
    if unread:
        others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise CheckpointError(
            f"{folder}: tensor {unread[0]}{others} in the checkpoint is not part of the"
            f" {spec.architecture} that config.json describes, and answers would be wrong;"
            " use the config.json that belongs to these weights"
        )


def _is_ignorable(spec: ModelSpec, name: str, read: Collection[str]) -> bool:
    if name.endswith("weight_shape") and f"{name.removesuffix('_shape')}_scale" in read:
        return True  # of packed int8
    if any(re.search(names, name) for names in (*_INVERSE_FREQUENCIES, *spec.family.ignored)):
        return True
    layer = _LAYER.match(name)
    beyond = layer is not None and int(layer[1]) >= spec.num_layers
    return beyond and spec.family.has_prediction_layers
