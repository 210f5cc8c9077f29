"""The safetensors file of a routing profile.

It contains *predictors* (routing_profile.py), *counts* of tokens by expert (routing_counts.py), or
both, with the fingerprint of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from contracts.errors import CheckpointError
from models.spec.checkpoint_files import ROUTING, SafetensorsFile

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT: Final = "checkpoint"
"""[32] uint8: `checkpoint_digest` of the folder."""
MAKE_ONE: Final = "make one with `tandem profile --routing`"
_MAX_HEADER_BYTES: Final = 4 << 20
_DTYPES = {"float32": "F32", "uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64"}


def checkpoint_digest(folder: Path) -> bytes:
    """Hash the checkpoint's config, and the headers and sizes of its files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(set(folder.glob("*.safetensors")) - {folder / ROUTING}):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            digest.update(file.read(min(length, path.stat().st_size)))
    return digest.digest()


def open_profile(path: Path, folder: Path) -> SafetensorsFile:
    """Open a profile of the checkpoint in `folder`. Raises CheckpointError."""
    file = SafetensorsFile(path, max_header_bytes=_MAX_HEADER_BYTES)
    if CHECKPOINT not in file.entries:
        raise CheckpointError(f"{path}: not a routing profile; {MAKE_ONE}")
    check_fingerprint(file, CHECKPOINT, checkpoint_digest(folder), folder)
    return file


def has_predictor(file: SafetensorsFile) -> bool:
    """Return whether the profile has predictors, which always include frequencies."""
    return any(name.startswith("frequency.") for name in file.entries)


def check_fingerprint(file: SafetensorsFile, name: str, digest: bytes, folder: Path) -> None:
    """Raise CheckpointError unless the file has this digest under `name`."""
    entry = file.entries.get(name)
    is_digest = entry is not None and entry.dtype == "U8" and entry.num_bytes == len(digest)
    if not is_digest or bytes(file.tensor(name).tolist()) != digest:
        raise CheckpointError(
            f"{file.path}: a routing profile of another {name} than that of {folder}; {MAKE_ONE}"
        )


def checked_tensor(
    file: SafetensorsFile, name: str, dtype: str, shape: Sequence[int | None], limit: int = 0
) -> Tensor:
    """Return a copy of a tensor; shape None: up to `limit`. Raises CheckpointError otherwise."""
    entry = file.entries.get(name)
    if (
        entry is None
        or entry.dtype != dtype
        or len(entry.shape) != len(shape)
        or any(
            found > limit if size is None else found != size
            for found, size in zip(entry.shape, shape, strict=True)
        )
    ):
        found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        expected = [f"at most {limit}" if size is None else size for size in shape]
        raise CheckpointError(
            f"{file.path}: {name}: {found}, expected {dtype} {expected}; {MAKE_ONE}"
        )
    return file.tensor(name).clone()


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the file atomically. Raises CheckpointError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        try:
            beside.write_bytes(b"".join(_safetensors(arrays)))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def _safetensors(arrays: Mapping[str, NDArray[Any]]) -> list[bytes]:
    """Return a file's bytes: length of the header, header, tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "tandem routing profile"}}
    parts: list[bytes] = []
    first = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [first, first + len(data)],
        }
        parts.append(data)
        first += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]
