"""The complete expert set in a node's memory, mapped from a file that all workers share.

The file is the checkpoint itself if it stores experts as computed; otherwise, and for GPUs, a
converted file that is written once:

    layer 0: gate_up [E, …] | down [E, …] (| biases) | layer 1: …

`open_host_file` returns a file with a shared lock, which its mapping keeps until the memory is
freed or the process ends. An unlocked file belonged to ended servers, and is deleted when another
file is written.

    PARENT/tandem-UID/    mode 0700, owned by us, not a link
        NAME.bin          complete since it has this name
        NAME.lock         held to check, write or delete NAME.bin
        NAME.partial      being written by the holder of NAME.lock
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from contracts.errors import ResourceError
from contracts.logs import event
from contracts.machine import free_bytes
from models.experts.expert_layout import ExpertBuffer, ExpertLayout, expert_pieces
from models.experts.expert_loading import copy_experts, is_transposed
from models.spec.checkpoint_files import ROUTING
from models.weights.checkpoint import Checkpoint, expert_weight_specs
from models.weights.loading import Loader

_POLL_S = 0.1
_WHOLE, _LOCK, _PARTIAL = ".bin", ".lock", ".partial"
_PRIVATE = 0o700


def open_host_file(
    store: Path | None, name: str, size: int, write: Callable[[Path], None], *, deadline_s: float
) -> IO[bytes]:
    """Open the file NAME of `size` bytes in `store` (None: temporary) for reading and writing.

    The first process creates it with `write(path)`, others wait up to deadline_s. Map it and close
    it, or keep it open: the lock ends with the last of both. Raises ResourceError without room, or
    if others can write to the folder.
    """
    parent = store or Path(tempfile.gettempdir())
    try:
        folder = _private_folder(parent)
        with _locked(folder / f"{name}{_LOCK}", deadline_s):
            path = folder / f"{name}{_WHOLE}"
            if not path.is_file() or path.stat().st_size != size:
                path.unlink(missing_ok=True)
                _remove_unused(folder)
                partial_file = path.with_suffix(_PARTIAL)
                partial_file.unlink(missing_ok=True)
                _check_room(folder, size)
                write(partial_file)
                partial_file.rename(path)
            file = open(path, "r+b", opener=_open_no_link)  # noqa: SIM115  (an opener; returned)
            fcntl.flock(file, fcntl.LOCK_SH)  # exclusive locks are held only under NAME.lock
            return file
    except OSError as error:
        raise ResourceError(
            f"{parent}: {error.strerror}; set prefill.host_store to a folder with {size} free bytes"
        ) from None


def _check_room(folder: Path, size: int) -> None:
    free = free_bytes(folder)
    if free < size:
        raise ResourceError(
            f"{folder}: {size} bytes are needed for the experts, {free} are free; set "
            "prefill.host_store to another folder"
        )


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _private_folder(parent: Path) -> Path:
    folder = parent / f"tandem-{os.getuid()}"
    parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=_PRIVATE)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is a link or a file, not a folder"
    elif found.st_uid != os.getuid():
        wrong = f"belongs to user {found.st_uid}, not to {os.getuid()}"
    elif found.st_mode & 0o077:
        wrong = f"can be entered by others (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
    else:
        return folder
    raise ResourceError(
        f"{folder}: {wrong}; remove it, or set prefill.host_store to another folder"
    )


def _remove_unused(folder: Path) -> None:
    """Delete files that no process has mapped or is writing."""
    for path in [*folder.glob(f"*{_WHOLE}"), *folder.glob(f"*{_PARTIAL}")]:
        lock = path.with_suffix(_LOCK)
        with _try_locked(lock) as free, suppress(FileNotFoundError), path.open("rb") as file:
            if free and _try_lock(file):
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    give_up_s = time.monotonic() + deadline_s
    while True:
        with _try_locked(path) as free:
            if free:
                yield
                return
        if time.monotonic() > give_up_s:
            raise ResourceError(
                f"{path}: another process has held it for {deadline_s:g} s; raise"
                " groups.ready_timeout_s"
            )
        time.sleep(_POLL_S)


@contextmanager
def _try_locked(path: Path) -> Iterator[bool]:
    """Yield True if the lock was acquired. A deleted lock file does not count."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "r+b") as file:
        if not _try_lock(file):
            yield False
            return
        try:
            current = path.lstat().st_ino
        except FileNotFoundError:
            current = -1
        yield current == os.fstat(file.fileno()).st_ino


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


log = logging.getLogger(f"tandem.{__name__}")

_FORMAT = 1
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16"}


class HostSource:
    """An ExpertSource that also copies parts of layers."""

    _layout: ExpertLayout

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        self.copy_part(layer, 0, self._layout.spec.num_experts, into.pieces)

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        """Fill `into`, the pieces of experts [first, last). Raises CheckpointError."""
        raise NotImplementedError

    def close(self) -> None:
        """Free resources; no copy to a GPU may be in flight. Idempotent."""


class CheckpointParts(HostSource):
    """Reads, dequantises and lays out experts. keep: leave the pages that were read mapped."""

    def __init__(self, checkpoint: Checkpoint, layout: ExpertLayout, *, keep: bool = False) -> None:
        self._checkpoint, self._layout, self._keep = checkpoint, layout, keep
        self._loader = Loader(checkpoint, layout.dtype, torch.device("cpu"), None, 0)

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        experts = range(first, last)
        if self._layout.packed:
            self._pack(layer, experts, into)
        else:
            self._copy(layer, experts, into)
        if not self._keep:
            self._loader.finish_layer()

    def _pack(self, layer: int, experts: range, into: Sequence[Tensor]) -> None:
        shapes = self._layout.plain_shapes
        plain = [torch.empty((1, *shape), dtype=self._layout.dtype) for shape in shapes]
        for number, expert in enumerate(experts):
            self._copy(layer, range(expert, expert + 1), plain)
            self._layout.pack(plain, expert_pieces(into, number, len(experts)))

    def _copy(self, layer: int, experts: range, into: Sequence[Tensor]) -> None:
        copy_experts(self._checkpoint, self._layout.spec, layer, experts, self._loader.copy, into)


def open_host_source(
    folder: Path, layout: ExpertLayout, *, store: Path | None, deadline_s: float
) -> HostSource:
    """Open the experts of a checkpoint, from a shared file where the layout needs one.

    store: parent of the folder of shared files (None: the temporary folder). deadline_s: time for
    another worker to write the file. If a file that only saves packing does not fit, experts are
    packed as they are read. Raises CheckpointError; ResourceError if a required file does not fit.
    """
    checkpoint = Checkpoint(folder)
    on_cpu = layout.device.type == "cpu"
    can_map = on_cpu and _is_stored_as_computed(checkpoint, layout)
    if layout.packed or not can_map:
        try:
            return open_expert_memory(folder, layout, store=store, deadline_s=deadline_s)
        except ResourceError as error:
            if not can_map:
                raise
            event(log, "experts_packed_on_read", logging.WARNING, reason=error.message)
    return CheckpointParts(checkpoint, layout, keep=True)


def open_expert_memory(
    folder: Path, layout: ExpertLayout, *, store: Path | None, deadline_s: float
) -> ExpertMemory:
    """Map the shared file of all experts (pinned for a GPU) as `open_host_source`."""
    name = f"experts-{fingerprint(folder, str(layout.dtype), layout.digest)}"
    size = len(layout.spec.moe_layers) * layout.num_bytes(layout.spec.num_experts)
    write = partial(_write, Checkpoint(folder), layout, size)
    with open_host_file(store, name, size, write, deadline_s=deadline_s) as file:
        memory = _mapped(file, layout)
    pinned = [memory] if layout.device.type == "cuda" else []
    return ExpertMemory(_layers(memory, layout), layout, pinned)


class ExpertMemory(HostSource):
    """All experts in the node's memory, by layer. pinned: memory to unpin at `close`."""

    def __init__(
        self,
        tensors: Iterable[tuple[Tensor, ...]],
        layout: ExpertLayout,
        pinned: Sequence[Tensor] = (),
    ) -> None:
        self._layout, self._pinned = layout, pinned
        self._tensors = dict(zip(layout.spec.moe_layers, tensors, strict=True))

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        pieces = self._layout.pieces(self._tensors[layer], first, last)
        for stored, out in zip(pieces, into, strict=True):
            out.copy_(stored, non_blocking=True)

    def expert(self, layer: int, expert: int) -> Sequence[Tensor]:
        return self._layout.pieces(self._tensors[layer], expert, expert + 1)

    def close(self) -> None:
        for memory in self._pinned:
            unpin(memory)
        self._pinned = ()


def _mapped(file: IO[bytes], layout: ExpertLayout) -> Tensor:
    """Map the file as uint8, pinned for a GPU. The mapping keeps a descriptor of `file`."""
    pinned = layout.device.type == "cuda"
    access = (
        mmap.ACCESS_WRITE if pinned else mmap.ACCESS_COPY
    )  # cudaHostRegister refuses private pages
    memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=torch.uint8)
    if pinned:
        pin(memory, str(file.name))
    return memory


def _layers(memory: Tensor, layout: ExpertLayout) -> Iterator[tuple[Tensor, ...]]:
    experts = layout.spec.num_experts
    for part in torch.split(memory, layout.num_bytes(experts)):
        yield layout.views(part, experts)


def pin(memory: Tensor, name: str) -> None:
    """Pin memory for copies to a GPU. Raises ResourceError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise ResourceError(
            f"{name}: {memory.nbytes} bytes cannot be pinned for the GPU (CUDA error {int(error)});"
            " set prefill.host_store to a folder in memory, such as /dev/shm"
        )


def unpin(memory: Tensor) -> None:
    """Unpin memory before it is freed; otherwise its addresses cannot be pinned again."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _is_stored_as_computed(checkpoint: Checkpoint, layout: ExpertLayout) -> bool:
    """Return whether the experts need no conversion except packing. Transposed ones always do."""
    spec = layout.spec
    if is_transposed(spec):
        return False
    return all(
        checkpoint.entry(checkpoint.find(weight_spec)).dtype == _STORED[layout.dtype]
        for layer in spec.moe_layers
        for weight_specs in expert_weight_specs(checkpoint, spec, layer, range(spec.num_experts))
        for weight_spec in weight_specs.values()
    )


def _write(checkpoint: Checkpoint, layout: ExpertLayout, size: int, path: Path) -> None:
    parts = CheckpointParts(checkpoint, layout)
    experts = layout.spec.num_experts
    with path.open("x+b") as file:
        file.truncate(size)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        for layer, tensors in zip(layout.spec.moe_layers, _layers(memory, layout), strict=True):
            parts.copy_part(layer, 0, experts, layout.pieces(tensors, 0, experts))
        os.fsync(file.fileno())


def fingerprint(folder: Path, *layout_key: object) -> str:
    """Hash the checkpoint's files and `layout_key`, the layout of the experts."""
    weights = set(folder.glob("*.safetensors")) - {folder / ROUTING}
    files = sorted([*weights, folder / "config.json"])
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = repr((_FORMAT, str(folder.resolve()), *layout_key, stats))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
