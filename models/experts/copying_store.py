"""Experts of a prefill worker's current layer (MoE-Prefill, AsyncEP).

Some layers, at least the first with experts, are resident, so that a pass starts at once. The
others are copied into one of two buffers while the other one is computed with:

    layers 0 (resident) 1 2 3          one pass after another
    fetched      0     1     2     3     0     1
    buffer A    [1         ] [3         ] [2       …
    buffer B    [2               ] [1               …     copied as soon as a buffer is free

The order wraps around: at the end of a pass, the next pass's first layers are present or in flight.
On a GPU the host queues compute, the store's thread copies; they wait for each other by marks:

    compute     |####1####|####2####| |####3###     before 3: until its copy is complete (exposed)
    copies      |==2==|    |=====3====| |==4==      before 4: until the compute of 2 is complete
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from contracts.clock import monotonic_s
from contracts.errors import ChannelError, TandemError
from models.experts.device_lanes import Mark, device_lane
from models.experts.expert_layout import ExpertBuffer, ExpertLayout
from models.experts.expert_loading import ExpertLayer

_CLOSE_S = 5.0
Observe = Callable[[int, float, float], None]
"""(layer, start_s, end_s) of a copy, on the clock."""


class ExpertSource(Protocol):
    """Source of a copying store. Used by the store's thread only."""

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        """Fill `into` with all experts of `layer`. Raises as `CopyingStore.fetch`."""

    def close(self) -> None: ...


@dataclasses.dataclass(slots=True)
class _Lease:
    """A buffer, with the marks after which it is filled and no longer read."""

    buffer: ExpertBuffer
    copied: Mark | None = None
    used: Mark | None = None


class CopyingStore:
    """Experts of a layer, for one thread. Bits do not depend on which layers are resident.

    After an error, which `fetch` raises for that layer, the layer is tried again. is_streamed:
    layers are copied in and out.
    """

    def __init__(
        self,
        source: ExpertSource | None,
        resident: Mapping[int, ExpertLayer],
        layout: ExpertLayout,
        *,
        deadline_s: float,
        observe: Observe | None = None,
    ) -> None:
        """Set up a store. source: None if all layers are resident, that is, not copied.

        observe: called with copies, by either thread.
        """
        self.is_streamed = source is not None
        self._host_waited_s = 0.0
        self._source, self._resident = source, resident
        self._deadline_s = deadline_s
        self._order = [layer for layer in layout.spec.moe_layers if layer not in resident]
        self._next = 0  # position in the order to copy next
        self._expected = 0  # position in the order to fetch next
        buffers = min(2, len(self._order))
        self._free = [_Lease(ExpertBuffer(layout)) for _ in range(buffers)]
        self._lane, self._observe = device_lane(layout.device), observe
        self._queues = layout.device.type == "cuda"  # the host does not wait
        self._filled: dict[int, _Lease] = {}  # filled, or their copies are queued
        self._held: tuple[int, _Lease] | None = None  # what the last `fetch` returned
        self._awaited: tuple[int, float] | None = None  # layer, deadline
        self._woken = False
        self._copying: int | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="experts", daemon=True)
        if self._order:
            self._thread.start()

    @property
    def copied_s(self) -> float:
        return self._lane.copied_s

    @property
    def copy_s(self) -> float:
        """Mean time to copy a layer; 0: no copies."""
        return self._lane.copied_s / max(1, self._lane.copies)

    @property
    def waited_s(self) -> float:
        """Copy time that compute did not hide; on a GPU, only the GPU's waits."""
        return self._lane.exposed_s if self._queues else self._host_waited_s

    def is_ready(self, layer: int) -> bool:
        """Return whether `fetch` would return at once."""
        if layer in self._resident or layer in self._filled:
            return True
        return self._held is not None and self._held[0] == layer

    def wait_ready(self, layer: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; True: `fetch` would return at once. Raises as `fetch`."""
        with self._changed:
            return self.is_ready(layer) or self._wait_until_ready(
                layer, timeout_s, lambda: self._woken
            )

    def wake(self) -> None:
        """End a `wait_ready`. Thread-safe."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def fetch(self, layer: int) -> ExpertLayer:
        """Return all experts of `layer`, and start to copy the next layers.

        The result of an earlier `fetch` of another layer is invalid afterwards. Waits up to the
        channel's deadline; raises PeerError or ChannelError that names the failed peer.
        """
        with self._changed:
            if layer in self._resident:
                self._release_held()
                return self._resident[layer]
            if self._held is not None and self._held[0] == layer:
                return self._held[1].buffer.layer
            self._wait_until_ready(layer, self._deadline_s, lambda: False)
            lease = self._filled.pop(layer)
            assert lease.copied is not None
            self._lane.wait(lease.copied)
            self._held = (layer, lease)
            self._expected = self._after(self._expected)
            return lease.buffer.layer

    def release(self) -> None:
        """Release the fetched layer (on a GPU: once all uses are queued) for the next copy."""
        with self._changed:
            self._release_held()

    def close(self) -> None:
        """Close the store; idempotent. A copy that hangs is left to its daemon thread."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        if self._source is not None and not self._queues:
            self._source.close()  # ends a copy that waits for a peer
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._lane.drain()
        if self._source is not None and self._queues:
            self._source.close()

    def _release_held(self) -> None:
        if self._held is not None:
            _, lease = self._held
            lease.used, self._held = self._lane.mark(), None
            self._free.append(lease)
            self._changed.notify_all()

    def _wait_until_ready(self, layer: int, timeout_s: float, enough: Callable[[], bool]) -> bool:
        """Wait until the layer is present, or `enough`. Raises ChannelError at its deadline."""
        self._release_held()
        self._check_open(layer)
        if self._awaited is None or self._awaited[0] != layer:
            self._awaited = (layer, monotonic_s() + self._deadline_s)
        if layer != self._order[self._expected]:
            self._restart_at(layer)
        self._wait(lambda: self._is_resolved(layer) or enough(), layer, timeout_s)
        self._woken = False
        if self._is_resolved(layer):
            self._awaited = None
        self._raise_error(layer)
        return layer in self._filled

    def _is_resolved(self, layer: int) -> bool:
        return layer in self._filled or self._error is not None

    def _restart_at(self, layer: int) -> None:
        """Restart the order at a layer, and discard copied layers that are not needed."""
        at = self._order.index(layer)
        self._next = self._expected = at
        if self._copying is not None and self._copying != layer:
            self._wait(lambda: self._copying is None, layer, self._deadline_s)
        self._error = None
        for other in [other for other in self._filled if other != layer]:
            self._free.append(self._filled.pop(other))
        if layer in self._filled or self._copying == layer:
            self._next = self._after(at)
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], layer: int, timeout_s: float) -> None:
        """Wait up to `timeout_s`. Raises ChannelError at the deadline of the layer."""
        if ready():
            return
        assert self._awaited is not None
        start_s, deadline_s = monotonic_s(), self._awaited[1]
        with self._lane.host_wait():
            is_met = self._changed.wait_for(
                lambda: ready() or self._closing, max(0.0, min(timeout_s, deadline_s - start_s))
            )
        self._host_waited_s += monotonic_s() - start_s
        self._check_open(layer)
        if not is_met and start_s + timeout_s >= deadline_s:
            self._awaited = None
            raise ChannelError(
                f"experts of layer {layer} did not arrive within {self._deadline_s:g} s; see "
                "channel.connect_timeout_s"
            )

    def _check_open(self, layer: int) -> None:
        if self._closing:
            raise ChannelError(f"experts of layer {layer}: the store is closed")

    def _raise_error(self, layer: int) -> None:
        if layer in self._filled or self._error is None:
            return
        error, self._error = self._error, None
        self._changed.notify_all()
        if isinstance(error, TandemError):
            raise error
        raise ChannelError(f"experts of layer {layer}: {type(error).__name__}: {error}") from error

    def _after(self, at: int) -> int:
        return (at + 1) % len(self._order)

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closing or (bool(self._free) and self._error is None)
                    )
                    if self._closing:
                        return
                    lease, layer = self._free.pop(), self._order[self._next]
                    self._next, self._copying = self._after(self._next), layer
                error = self._copy(layer, lease)
                with self._changed:
                    self._copying = None
                    if error is None:
                        self._filled[layer] = lease
                    else:
                        self._error = error
                        self._free.append(lease)
                        self._next = self._order.index(layer)
                    self._changed.notify_all()

    def _copy(self, layer: int, lease: _Lease) -> BaseException | None:
        """Copy a layer; return the error, which `fetch` raises."""
        assert self._source is not None
        try:
            copies = partial(self._source.copy, layer, lease.buffer)
            observe = None if self._observe is None else partial(self._observe, layer)
            lease.copied = self._lane.run(copies, lease.used, observe)
        except BaseException as error:  # noqa: BLE001  (handed over to the thread that fetches)
            return error
        return None
