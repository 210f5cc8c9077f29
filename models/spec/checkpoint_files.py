"""Files of a checkpoint folder: names of tensors, and one .safetensors file.

The file has a header, checked against its size, and memory-mapped tensors. Format: an 8-byte
little-endian header length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data;
offsets count from the end of the header.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import CheckpointError
from models.spec.config_fields import read_json

if TYPE_CHECKING:  # processes without tensors read headers, and torch takes a second to load
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ROUTING = "routing.safetensors"  # a routing profile (models/prediction), no weights
HEAD = "lm_head.weight"
_TEXT = {"model.language_model.": "model.", "language_model.": ""}  # beside a vision model
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {  # name in torch, and bytes of an element
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in the file: `first_byte` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int


class SafetensorsFile:
    """The header is read at once, the file mapped privately on first use, and never written."""

    def __init__(self, path: Path, *, max_header_bytes: int = _MAX_HEADER_BYTES) -> None:
        self.path = path
        self.entries = _read_header(path, max_header_bytes)
        self._map: mmap.mmap | None = None

    def tensor(self, name: str) -> Tensor:
        """Return the tensor over the mapped pages, or a copy if it is not aligned."""
        import torch

        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name}: dtype {entry.dtype} is not supported")
        dtype = getattr(torch, _DTYPES[entry.dtype][0])
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        buffer, offset = self._mapped(), entry.first_byte
        if offset % dtype.itemsize:
            # torch kernels may assume aligned elements; early writers did not pad the header.
            buffer, offset = bytearray(buffer[offset : offset + entry.num_bytes]), 0
        count = entry.num_bytes // dtype.itemsize
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(entry.shape)

    def release(self) -> None:
        """Release the pages read so far; tensors over them stay valid."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _mapped(self) -> Any:
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._map


def _read_header(path: Path, max_bytes: int) -> dict[str, TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix == b"version ":
                raise CheckpointError(
                    f"{path}: a Git LFS pointer, not the weights; run `git lfs pull`"
                )
            length = int.from_bytes(prefix, "little")
            if size < 8 or length > min(size - 8, max_bytes):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file: {size} bytes, its header says"
                    f" {length}; download it again"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return _entries(path, header, size)


def _entries(path: Path, header: bytes, size: int) -> dict[str, TensorEntry]:
    try:
        tree = json.loads(header)
        tree.pop("__metadata__", None)
        entries = {name: _entry(fields, 8 + len(header)) for name, fields in tree.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: damaged safetensors header ({type(error).__name__}: {error});"
            " download it again"
        ) from None
    needed = max((e.first_byte + e.num_bytes for e in entries.values()), default=0)
    if needed > size:
        raise CheckpointError(
            f"{path}: truncated: {size} bytes of the {needed} its header promises;"
            " download it again"
        )
    return entries


def _entry(fields: dict[str, Any], data_start: int) -> TensorEntry:
    first, last = (int(offset) for offset in fields["data_offsets"])
    shape = tuple(int(size) for size in fields["shape"])
    if not 0 <= first <= last or any(size < 0 for size in shape):
        raise ValueError(f"offsets {first}, {last}, shape {list(shape)}")
    dtype = str(fields["dtype"])
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype][1] != last - first:
        raise ValueError(f"{last - first} bytes for shape {list(shape)} of {dtype}")
    return TensorEntry(dtype, shape, data_start + first, last - first)


def stored_names(folder: Path) -> Collection[str]:
    """Return the plain names of the tensors; none without weights. Raises CheckpointError."""
    names: Collection[str] = ()
    if (folder / SINGLE).is_file():
        names = SafetensorsFile(folder / SINGLE).entries.keys()
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        names = weight_map.keys() if isinstance(weight_map, dict) else ()
    return {plain_name(name) for name in names}


def plain_name(name: str) -> str:
    """Return the name that a tensor of a text model has without a vision model beside it."""
    for prefix, plain in _TEXT.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
