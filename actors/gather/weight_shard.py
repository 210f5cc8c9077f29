"""A worker's part of the experts, in a memory segment that its peers read.

    segment  | page | slot 0: gate_up, down (, their biases) | slot 1 ... |
                      of experts [first, last) of one layer

Gathered mode has a slot for every layer. Hybrid mode has a window of a few, which a thread fills
from the host store: requested layers first, then those that come next in a pass.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from actors.channels.link import ALIGNMENT_BYTES
from actors.channels.shm import FLAG_BYTES, create_memfd, map_memfd
from actors.gather.device_segment import DeviceSegment, DeviceShardMemory
from contracts.errors import ChannelError
from models.experts.expert_layout import ExpertLayout

_TOO_LARGE = "use more prefill workers, a larger prefill.resident_layers, or experts=hybrid"


class PartSource(Protocol):
    """Source of experts [first, last) of a layer: the checkpoint, or a host store."""

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        """Fill `into`, the pieces of these experts in the source's layout."""


class ExpertRange:
    """Experts [first, last) of a layer in one run of bytes."""

    def __init__(self, layout: ExpertLayout, first: int, last: int) -> None:
        self.layout, self.first, self.last = layout, first, last
        self.num_bytes = layout.num_bytes(last - first)

    def pieces(self, memory: Tensor) -> list[Tensor]:
        """Return the pieces in `memory`, uint8 [num_bytes], one after the other."""
        count = self.last - self.first
        return self.layout.pieces(self.layout.views(memory, count), 0, count)


class ShardSlots:
    """The segment. `fd` may be passed to a peer; `offset_bytes` counts from its start.

    segment: on a GPU, instead of `fd`.
    """

    def __init__(self, part: ExpertRange, count: int) -> None:
        """Allocate the segment. Raises ChannelError if memory is short."""
        self._stride = -(-part.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.payload_bytes = max(count * self._stride, ALIGNMENT_BYTES)
        self.segment: DeviceSegment | None = None
        self.fd, self._first_bytes = -1, 0
        self.fill: Callable[[Callable[[], None]], None] = lambda copies: copies()
        if part.layout.device.type == "cuda":
            on_device = DeviceShardMemory(self.payload_bytes, part.layout.device)
            self.segment, self.fill = on_device.segment, on_device.fill
            memory = on_device.memory
        else:
            self.fd, self._first_bytes = (
                create_memfd(self.payload_bytes, advice=_TOO_LARGE),
                FLAG_BYTES,
            )
            memory = map_memfd(self.fd, self.payload_bytes).views.memory
        self.pieces = [
            part.pieces(memory[slot * self._stride : slot * self._stride + part.num_bytes])
            for slot in range(count)
        ]

    def offset_bytes(self, slot: int) -> int:
        return self._first_bytes + slot * self._stride

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Shard:
    """Slots by layer, used by the server's thread and by the worker's own copies.

    Call `request` once per use, `take` until the layer is loaded, `release` after copying; or
    `cancel` instead if the layer is no longer needed.
    """

    def __init__(self, layers: Sequence[int], slots: ShardSlots) -> None:
        self.slots = slots
        self._layers = list(layers)

    def request(self, layer: int) -> None:
        """Raise ChannelError for a layer that is not in the shard."""
        if layer not in self._layers:
            raise ChannelError(f"layer {layer} is not in this shard")

    def take(self, layer: int, timeout_s: float = 0.0) -> int | None:
        """Return a layer's slot, fixed until `release`; None at timeout_s. Raises ChannelError."""
        raise NotImplementedError

    def cancel(self, layer: int) -> None:
        """Withdraw a request."""

    def release(self, layer: int) -> None:
        """Allow the slot to be refilled."""

    def wait(self, layer: int, deadline_s: float) -> int:
        """Request a layer and return its slot once loaded. Raises ChannelError at the deadline."""
        self.request(layer)
        slot = self.take(layer, deadline_s)
        if slot is None:
            self.cancel(layer)
            raise ChannelError(
                f"layer {layer} was not read from the host store in {deadline_s:g} s"
            )
        return slot

    def close(self) -> None:
        self.slots.close()


class ResidentShard(Shard):
    """All layers, read at once; every layer stays."""

    def __init__(self, layers: Sequence[int], part: ExpertRange, source: PartSource) -> None:
        super().__init__(layers, ShardSlots(part, len(layers)))
        for layer, pieces in zip(layers, self.slots.pieces, strict=True):
            self.slots.fill(partial(source.copy_part, layer, part.first, part.last, pieces))

    def take(self, layer: int, timeout_s: float = 0.0) -> int:
        return self._layers.index(layer)


class WindowedShard(Shard):
    """`window` layers, filled by a thread.

    Requested layers are read first, then those after the layer taken last, in the order of a pass.
    A slot is refilled when its layer is neither requested nor in use, the least recently used
    first.
    """

    def __init__(
        self, layers: Sequence[int], part: ExpertRange, source: PartSource, window: int
    ) -> None:
        super().__init__(layers, ShardSlots(part, min(window, len(layers))))
        self._part, self._source = part, source
        self._held: dict[int, int] = {}  # layer -> slot, least recently touched first
        self._free = list(range(len(self.slots.pieces)))
        self._requested: Counter[int] = Counter()
        self._in_use: Counter[int] = Counter()
        self._ahead = list(layers[: len(self.slots.pieces)])
        self._error: str | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name="shard-window", daemon=True)
        self._thread.start()

    def request(self, layer: int) -> None:
        super().request(layer)
        with self._changed:
            self._requested[layer] += 1
            self._changed.notify_all()

    def take(self, layer: int, timeout_s: float = 0.0) -> int | None:
        with self._changed:
            self._changed.wait_for(
                lambda: layer in self._held or self._error is not None or self._closed, timeout_s
            )
            if self._error is not None:
                raise ChannelError(self._error)
            slot = self._held.pop(layer, None)
            if slot is None:
                return None
            self._held[layer] = slot
            self._forget(self._requested, layer)
            self._in_use[layer] += 1
            after = self._layers.index(layer) + 1
            count = len(self.slots.pieces) - 1
            self._ahead = (self._layers[after:] + self._layers[:after])[:count]
            self._changed.notify_all()
            return slot

    def cancel(self, layer: int) -> None:
        with self._changed:
            self._forget(self._requested, layer)
            self._changed.notify_all()

    def release(self, layer: int) -> None:
        with self._changed:
            self._forget(self._in_use, layer)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(10.0)
        super().close()

    @staticmethod
    def _forget(counts: Counter[int], layer: int) -> None:
        counts[layer] -= 1
        if counts[layer] <= 0:
            del counts[layer]

    def _fill(self) -> None:
        while (step := self._next()) is not None:
            layer, slot = step
            part, error = self._part, None
            try:
                pieces = self.slots.pieces[slot]
                self.slots.fill(
                    partial(self._source.copy_part, layer, part.first, part.last, pieces)
                )
            except Exception as problem:  # noqa: BLE001 - it is raised by every `take`
                error = f"layer {layer} cannot be read: {problem}"
            with self._changed:
                self._error = error
                self._held[layer] = slot
                self._changed.notify_all()
            if error is not None:
                return

    def _next(self) -> tuple[int, int] | None:
        """Wait for a layer to read and a slot for it. Returns None when closed."""
        with self._changed:
            while not self._closed:
                layer = self._missing()
                if layer is not None and (slot := self._slot_for(layer)) is not None:
                    return layer, slot
                self._changed.wait()
        return None

    def _missing(self) -> int | None:
        missing = [layer for layer in (*self._requested, *self._ahead) if layer not in self._held]
        return missing[0] if missing else None

    def _slot_for(self, layer: int) -> int | None:
        if self._free:
            return self._free.pop()
        ahead = () if layer in self._requested else self._ahead
        for held in self._held:
            if held not in self._requested and held not in self._in_use and held not in ahead:
                return self._held.pop(held)
        return None
