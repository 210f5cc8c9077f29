"""Shards in GPU memory: a worker opens those of its peers by CUDA IPC and copies from them.

    own copies     |own part|
    peers' copies           |=peer 0's part=|=peer 2's part=|     copy engines, one stream
    host           FETCH ──> DATA offset ... sleeps ...    DONE   messages; no kernel waits

The stream is the copying store's, behind the compute that reads the buffer. A slot is released once
its copy has completed, and a part counts only if its peer was not ending by then, as the driver may
free the memory of a killed process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.channels.cuda import has_passed, new_stream, recorded, require_cupy, wait_for_stream
from actors.channels.ipc import device_bytes
from contracts.errors import ChannelError

_FILL_S = 60.0  # time for a layer to arrive from the host store


class DeviceSegment:
    """Memory that parts are copied from, on the current stream.

    handle: with which other processes open it, if it is ours.
    """

    def __init__(self, pointer: int, num_bytes: int, handle: bytes = b"") -> None:
        self.pointer, self.num_bytes, self.handle = pointer, num_bytes, handle
        self._runtime: Any = require_cupy("ipc").cuda.runtime
        self._done: torch.cuda.Event | None = None

    @property
    def is_copied(self) -> bool:
        """True once the last copy has completed."""
        return self._done is None or has_passed(self._done)

    def copy(self, offset: int, into: Sequence[Tensor]) -> None:
        """Queue the copy of pieces that lie one after the other from `offset` on."""
        stream = torch.cuda.current_stream(into[0].device)
        source, kind = self.pointer + offset, self._runtime.memcpyDefault
        for piece in into:
            size = piece.nbytes
            self._runtime.memcpyAsync(piece.data_ptr(), source, size, kind, stream.cuda_stream)
            source += size
        self._done = recorded(stream)


def open_segment(handle: bytes, num_bytes: int, device: torch.device) -> DeviceSegment:
    """Open the memory of a peer on a GPU of this node. Raises ChannelError."""
    runtime = require_cupy("ipc").cuda.runtime
    try:
        with torch.cuda.device(device):
            pointer = runtime.ipcOpenMemHandle(handle)
    except RuntimeError as error:
        raise ChannelError(f"its GPU memory cannot be opened: {error}") from None
    segment = DeviceSegment(pointer, num_bytes)
    weakref.finalize(segment, runtime.ipcCloseMemHandle, pointer).atexit = False
    return segment


class DeviceShardMemory:
    """Memory of an own shard. It stays until the process ends: peers may be copying from it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate it. Raises ChannelError."""
        runtime = require_cupy("ipc").cuda.runtime
        try:
            with torch.cuda.device(device):
                pointer = runtime.malloc(num_bytes)
                self.memory = device_bytes(pointer, num_bytes, lambda _: None)
                handle = runtime.ipcGetMemHandle(pointer)
        except RuntimeError as error:
            raise ChannelError(f"no device memory for {num_bytes} bytes: {error}") from None
        self.segment = DeviceSegment(pointer, num_bytes, handle)
        self._filling = new_stream(device)

    def fill(self, copies: Callable[[], None]) -> None:
        """Run copies on a stream of their own, and wait for them. Raises ChannelError."""
        with torch.cuda.stream(self._filling):
            copies()
        wait_for_stream(self._filling, _FILL_S, "copy of a layer from the host")
