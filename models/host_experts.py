"""The complete expert set in a node's memory: mapped from a file, so that all workers of the node
share its pages.

The file is the checkpoint itself where that stores experts as they are computed with; else, and for
GPUs, one that is made of it once:

    layer 0: gate_up [E, 2F, D] | down [E, D, F] (| biases) | layer 1: …
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from contracts.errors import ResourceError
from models.checkpoint import Checkpoint, expert_wants
from models.expert_loading import copy_experts, expert_shapes
from models.expert_store import ExpertBuffer
from models.loading import Loader
from models.spec import ModelSpec

_FORMAT = 1
_POLL_S = 0.1
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16"}


class _Parts(Protocol):
    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None: ...


class HostSource:
    """An ExpertSource; of parts of layers too."""

    def __init__(self, parts: _Parts, num_experts: int) -> None:
        self._parts, self._num_experts = parts, num_experts

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        self._parts.copy_part(layer, 0, self._num_experts, into.tensors)

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        """Fills `into`, of experts [first, last), a tensor for each of `expert_shapes`."""
        self._parts.copy_part(layer, first, last, into)

    def close(self) -> None:
        """The mapping goes with its last tensor."""


def open_host_source(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    store: Path | None,
    pinned: bool,
    deadline_s: float,
) -> HostSource:
    """store: the folder of files that had to be made (None: one in the system's folder for
    temporary files). pinned: a GPU reads it. deadline_s: for another worker to make the file.

    Raises CheckpointError, and ResourceError where there is no room for the file.
    """
    checkpoint = Checkpoint(folder)
    parts: _Parts
    if not pinned and _is_stored_as_computed(checkpoint, spec, dtype):
        parts = _MappedCheckpoint(checkpoint, spec, dtype)
    else:
        made = _make_file(checkpoint, spec, dtype, store or _default_store(), deadline_s)
        parts = _MappedFile(made, spec, dtype, pinned=pinned)
    return HostSource(parts, spec.num_experts)


class _MappedCheckpoint:
    """Stores experts as they are computed with: reading is copying."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._checkpoint, self._spec = checkpoint, spec
        self._loader = Loader(checkpoint, dtype, torch.device("cpu"), None, 0)

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        experts = range(first, last)
        copy_experts(self._checkpoint, self._spec, layer, experts, self._loader, into)


class _MappedFile:
    def __init__(self, path: Path, spec: ModelSpec, dtype: torch.dtype, *, pinned: bool) -> None:
        with path.open("r+b") as file:
            access = mmap.ACCESS_WRITE if pinned else mmap.ACCESS_COPY  # private pages are not his
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=torch.uint8)
        if pinned:
            _pin(memory, path)
        self._tensors = dict(zip(spec.moe_layers, _views(memory, spec, dtype), strict=True))

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        for stored, out in zip(self._tensors[layer], into, strict=True):
            out.copy_(stored[first:last], non_blocking=True)


def _views(memory: Tensor, spec: ModelSpec, dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    shapes = [(spec.num_experts, *shape) for shape in expert_shapes(spec)]
    first = 0
    for _ in spec.moe_layers:
        tensors = []
        for shape in shapes:
            size = math.prod(shape) * dtype.itemsize
            tensors.append(memory[first : first + size].view(dtype).view(shape))
            first += size
        yield tuple(tensors)


def _num_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    elements = sum(math.prod(shape) for shape in expert_shapes(spec))
    return len(spec.moe_layers) * spec.num_experts * elements * dtype.itemsize


def _pin(memory: Tensor, path: Path) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise ResourceError(
            f"{path}: {memory.nbytes} bytes cannot be pinned for the GPU (CUDA error {int(error)});"
            " set prefill.host_store to a folder in memory, such as /dev/shm"
        )


def _is_stored_as_computed(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> bool:
    """So that reading is copying. Clamped experts are stored with rows in turns."""
    if spec.clamp is not None:
        return False
    return all(
        checkpoint.entry(checkpoint.find(wanted)).dtype == _STORED[dtype]
        for layer in spec.moe_layers
        for wants in expert_wants(checkpoint, spec, layer, range(spec.num_experts))
        for wanted in wants.values()
    )


def _default_store() -> Path:
    return Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"


def _make_file(
    checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, store: Path, deadline_s: float
) -> Path:
    """The file of this checkpoint and dtype. Whoever comes first makes it, the others wait."""
    path = store / f"experts-{_fingerprint(checkpoint.folder, dtype)}.bin"
    size = _num_bytes(spec, dtype)
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        if store.stat().st_uid != os.getuid():
            raise ResourceError(f"{store} belongs to another user; set prefill.host_store")
        with _locked(path.with_suffix(".lock"), deadline_s):
            if not path.is_file() or path.stat().st_size != size:
                _write(checkpoint, spec, dtype, path, size)
    except OSError as error:
        raise ResourceError(
            f"{path}: {error.strerror}; set prefill.host_store to a folder with {size} free bytes"
        ) from None
    return path


def _write(
    checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, path: Path, size: int
) -> None:
    """Under another name until it is complete."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise ResourceError(
            f"{path.parent}: {size} bytes are needed for the experts, {free} are free; set "
            "prefill.host_store to another folder"
        )
    partial = path.with_suffix(".partial")
    loader = Loader(checkpoint, dtype, torch.device("cpu"), None, 0)
    with partial.open("w+b") as file:
        file.truncate(size)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        experts = range(spec.num_experts)
        for layer, tensors in zip(spec.moe_layers, _views(memory, spec, dtype), strict=True):
            copy_experts(checkpoint, spec, layer, experts, loader, tensors)
            loader.layer_done()
        os.fsync(file.fileno())
    partial.rename(path)


def _fingerprint(folder: Path, dtype: torch.dtype) -> str:
    """Changes with the checkpoint's files."""
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = repr((_FORMAT, str(folder.resolve()), str(dtype), stats))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    with path.open("w") as file:
        give_up_s = time.monotonic() + deadline_s
        while not _try_lock(file):
            if time.monotonic() > give_up_s:
                raise ResourceError(
                    f"{path}: another process has held it for {deadline_s:g} s; raise "
                    "groups.ready_timeout_s"
                )
            time.sleep(_POLL_S)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
