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

from torch import Tensor

from actors.channels.link import ALIGNMENT_BYTES
from actors.channels.shm import FLAG_BYTES, create_memfd, map_memfd
from actors.gather.device_segment import DeviceSegment, DeviceShardMemory
from contracts.errors import ChannelError
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import HostSource

_TOO_LARGE = "use more prefill workers, a larger prefill.resident_layers, or experts=hybrid"


class ExpertRange:
    """Experts [first, last) of a layer in one run of bytes."""

    def __init__(self, layout: ExpertLayout, first: int, last: int) -> None:
        self.layout, self.first, self.last = layout, first, last
        self.num_bytes = layout.num_bytes(last - first)

    def pieces(self, memory: Tensor) -> list[Tensor]:
        """Return the pieces in `memory`, uint8 [num_bytes], one after the other."""
        count = self.last - self.first
        return self.layout.pieces(self.layout.views(memory, count), 0, count)


class Shard:
    """Slots by layer, used by the server's threads and by the worker's own copies.

    Call `request` once per use, `take` until the layer is loaded, `release` after copying; or
    `cancel` instead if the layer is no longer needed. A slot of a window is refilled when its layer
    is neither requested nor in use, the least recently used first.

    fd: of the segment; may be passed to a peer. segment: on a GPU, instead of `fd`. pieces: of each
    slot.
    """

    def __init__(
        self,
        layers: Sequence[int],
        part: ExpertRange,
        source: HostSource,
        window: int | None = None,
    ) -> None:
        """Allocate the segment. window: number of slots; None: all layers are read now, and stay.

        Raises ChannelError if memory is short.
        """
        self.part, self._source = part, source
        self._layers = list(layers)
        count = len(layers) if window is None else min(window, len(layers))
        stride = self._stride = -(-part.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.payload_bytes = max(count * stride, ALIGNMENT_BYTES)
        self.segment: DeviceSegment | None = None
        self.fd, self._first_bytes = -1, 0
        self._fill_slot: Callable[[Callable[[], None]], None] = lambda copies: copies()
        if part.layout.device.type == "cuda":
            on_device = DeviceShardMemory(self.payload_bytes, part.layout.device)
            self.segment, self._fill_slot = on_device.segment, on_device.fill
            memory = on_device.memory
        else:
            self.fd = create_memfd(self.payload_bytes, advice=_TOO_LARGE)
            self._first_bytes = FLAG_BYTES
            memory = map_memfd(self.fd, self.payload_bytes).views.memory
        self.pieces = [
            part.pieces(memory[slot * stride : slot * stride + part.num_bytes])
            for slot in range(count)
        ]
        self._held: dict[int, int] = {}  # layer -> slot, least recently touched first
        self._free = list(range(count))
        self._requested: Counter[int] = Counter()
        self._in_use: Counter[int] = Counter()
        self._ahead = self._layers[:count]
        self._error: str | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if window is None:
            for slot, layer in enumerate(layers):
                self._read(layer, slot)
            self._held = dict(zip(layers, range(count), strict=True))
            return
        self._thread = threading.Thread(target=self._fill, name="shard-window", daemon=True)
        self._thread.start()

    def offset_bytes(self, slot: int) -> int:
        """Return where a slot starts in the segment."""
        return self._first_bytes + slot * self._stride

    def request(self, layer: int) -> None:
        """Raise ChannelError for a layer that is not in the shard."""
        if layer not in self._layers:
            raise ChannelError(f"layer {layer} is not in this shard")
        with self._changed:
            self._requested[layer] += 1
            self._changed.notify_all()

    def take(self, layer: int, timeout_s: float = 0.0) -> int | None:
        """Return a layer's slot, fixed until `release`; None at timeout_s. Raises ChannelError."""
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
            count = len(self.pieces) - 1
            self._ahead = (self._layers[after:] + self._layers[:after])[:count]
            self._changed.notify_all()
            return slot

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

    def cancel(self, layer: int) -> None:
        """Withdraw a request."""
        with self._changed:
            self._forget(self._requested, layer)
            self._changed.notify_all()

    def release(self, layer: int) -> None:
        """Allow the slot to be refilled."""
        with self._changed:
            self._forget(self._in_use, layer)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and close the descriptor. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @staticmethod
    def _forget(counts: Counter[int], layer: int) -> None:
        counts[layer] -= 1
        if counts[layer] <= 0:
            del counts[layer]

    def _read(self, layer: int, slot: int) -> None:
        part, pieces = self.part, self.pieces[slot]
        self._fill_slot(partial(self._source.copy_part, layer, part.first, part.last, pieces))

    def _fill(self) -> None:
        while (step := self._next()) is not None:
            layer, slot = step
            error = None
            try:
                self._read(layer, slot)
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
