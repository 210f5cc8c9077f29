"""Reusable buffers for TCP payloads, so that their pages stay mapped."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, cast

import torch

from actors.channels.link import Views

_SMALLEST_BYTES = 4096
_KEPT_BYTES = 64 << 20  # idle buffers beyond this are freed


class Buffer:
    """A block of memory, as tensor views and as a buffer for socket calls."""

    __slots__ = ("data", "num_bytes", "views")

    def __init__(self, num_bytes: int) -> None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.num_bytes = num_bytes
        self.views = Views(memory)
        self.data = memoryview(cast(Any, memory.numpy()))


class BufferPool:
    """A pool of idle buffers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._idle_bytes = 0

    def acquire(self, num_bytes: int) -> Buffer:
        """Return a buffer of at least `num_bytes`, rounded up to 2**n or 3/4 of it."""
        size = _SMALLEST_BYTES
        while size < num_bytes:
            size *= 2
        if size > _SMALLEST_BYTES and size // 4 * 3 >= num_bytes:
            size = size // 4 * 3
        with self._lock:
            free = self._free[size]
            if free:
                self._idle_bytes -= size
                return free.pop()
        return Buffer(size)

    def release(self, buffer: Buffer) -> None:
        with self._lock:
            if self._idle_bytes + buffer.num_bytes <= _KEPT_BYTES:
                self._idle_bytes += buffer.num_bytes
                self._free[buffer.num_bytes].append(buffer)
