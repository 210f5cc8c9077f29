"""Pinned host memory as the slower tier of a cache with slots on a device.

    the cache (host)   request 3 7 ─ 7 is present: compute ─ 3 is "read": queued, compute waits
    copies             |= hint 9 =|==== 3 ====|= hint 9 … after requested experts
    compute            … |## 7 ##|  (waits)  |## 3 ##|

The cache counts an expert as present once its copy is queued, so the host never waits: the compute
does, by a mark. Requested experts are queued at once, hints a few parts at a time, since queued
copies cannot be cancelled. A slot is overwritten only after queued compute that reads it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from contracts.expert_eviction import ExpertKey
from models.experts.device_lanes import DeviceLane, Mark
from models.experts.expert_cache import HINT_URGENCY, ExpertCache
from models.experts.expert_format import CompletedRead, ComputeSlots, SlotMemory
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import ExpertLayer
from models.experts.host_experts import ExpertMemory

PART_BYTES: Final = 4 << 20  # enough for a link's full rate
MAX_HINTS_IN_FLIGHT: Final = 3  # parts that a demand may have to wait for
_QUEUE_DEPTH: Final = 1 << 20  # a request takes a few bytes
_POLL_S: Final = 1e-4
_MIN_S: Final = 1e-9


class _RowRange(NamedTuple):
    piece: int
    first: int
    last: int


@dataclasses.dataclass(slots=True)
class _PartRequest:
    key: ExpertKey
    part: int
    urgency: int
    is_skipped: bool = False
    is_issued: bool = False


class _SlotContent(NamedTuple):
    """An expert in a slot, from the mark on."""

    key: ExpertKey
    slot: int
    mark: Mark


class InSlot(NamedTuple):
    """Computable experts of a layer. slots_E int32: their slots on the device, -1: missing."""

    slots: Mapping[int, int]
    slots_E: Tensor


class DeviceTier:
    """An `ExpertTier` with the state of the slots. Single-threaded except `wake`."""

    def __init__(
        self,
        experts: ExpertMemory,
        layout: ExpertLayout,
        lane: DeviceLane,
        *,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._experts, self._lane = experts, lane
        self.num_experts, self.expert_bytes = layout.spec.num_experts, layout.num_bytes(1)
        self._ranges = _ranges(layout, part_bytes)
        self.parts = len(self._ranges)
        self._device = layout.device
        self._requests: dict[int, _PartRequest] = {}
        self._numbers = 0
        self._hints: list[Mark] = []  # of parts that may be in flight
        self._woken = threading.Event()
        self._contents: dict[int, _SlotContent] = {}  # by slot
        self._in_flight: deque[_SlotContent] = deque()
        self._reached = 0  # largest number of a copy that compute waits for
        self._slots: dict[int, dict[int, int]] = {each: {} for each in layout.spec.moe_layers}
        self._snapshots: dict[int, InSlot] = {}  # valid results of `in_slots`
        self._used: dict[int, Mark] = {}  # by slot
        self._layer_used: dict[int, Mark] = {}

    def __str__(self) -> str:
        return f"the host's memory, for {self._device}"

    @property
    def room(self) -> int:
        return _QUEUE_DEPTH - len(self._requests)

    def enqueue(self, layer: int, expert: int, part: int, urgency: int) -> int:
        self._numbers += 1
        self._requests[self._numbers] = _PartRequest(ExpertKey(layer, expert), part, urgency)
        return self._numbers

    def submit(self) -> None:
        pass

    def expedite(self, ticket: int, urgency: int) -> None:
        request = self._requests[ticket]
        request.urgency = min(request.urgency, urgency)

    def cancel(self, ticket: int) -> None:
        self._requests[ticket].is_skipped = True

    def poll_completed(self) -> Iterable[CompletedRead]:
        """Return the reads to queue now, the most urgent first; `copy` queues them."""
        waiting = [item for item in self._requests.items() if not item[1].is_issued]
        if not waiting:
            return ()
        self._hints = [mark for mark in self._hints if not self._lane.has_passed(mark)]
        room, found = MAX_HINTS_IN_FLIGHT - len(self._hints), []
        part_s = max(_MIN_S, self._lane.copied_s / max(1, self._lane.copies))  # 0: skipped
        for ticket, request in sorted(waiting, key=lambda item: (item[1].urgency, item[0])):
            if not request.is_skipped and request.urgency >= HINT_URGENCY:
                if room <= 0:
                    continue
                room -= 1
            request.is_issued = True
            found.append(CompletedRead(ticket, 0.0 if request.is_skipped else part_s))
        return found

    def copy(self, ticket: int, into: SlotMemory) -> None:
        slot, pieces = into  # a DeviceSlot
        request = self._requests[ticket]
        stored, ranges = self._experts.expert(*request.key), self._ranges[request.part]
        mark = self._lane.copy(
            [stored[piece][:, first:last] for piece, first, last in ranges],
            [pieces[piece][:, first:last] for piece, first, last in ranges],
            self._evict(slot),  # with the first part, which the others follow
        )
        if request.urgency >= HINT_URGENCY:
            self._hints.append(mark)
        if request.part == self.parts - 1:
            content = self._contents[slot] = _SlotContent(request.key, slot, mark)
            self._in_flight.append(content)

    def free(self, ticket: int) -> None:
        del self._requests[ticket]

    def wait(self, timeout_s: float) -> None:
        """Wait for `wake`; with pending hints only briefly, because a device does not notify."""
        if self._requests and timeout_s > 0.0:
            timeout_s = min(timeout_s, _POLL_S)
        self._woken.wait(timeout_s)
        self._woken.clear()

    def fileno(self) -> int:
        raise NotImplementedError("a device has no descriptor to wait for")

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._lane.drain()

    def in_slots(self, layer: int) -> InSlot:
        """Return experts that keep their slots for work queued until `mark_layer_used`."""
        self._settle_copies()
        snapshot = self._snapshots.get(layer)
        if snapshot is None:
            slots = dict(self._slots[layer])
            slots_E = torch.full((self.num_experts,), -1, dtype=torch.int32)
            if slots:
                slots_E[list(slots)] = torch.tensor(list(slots.values()), dtype=torch.int32)
            snapshot = self._snapshots[layer] = InSlot(slots, self._lane.upload(slots_E))
        return snapshot

    def mark_layer_used(self, layer: int) -> None:
        """Mark that all reads of the experts from `in_slots` are queued."""
        self._layer_used[layer] = self._lane.mark()

    def wait_for(self, slots: Iterable[int]) -> None:
        """Order following compute after the copies to the slots, until `mark_used`."""
        marks = [self._contents[slot].mark for slot in slots]
        newest = max(marks, key=lambda mark: mark.number)
        if newest.number > self._reached:
            self._lane.wait(newest)
            self._reached = newest.number

    def mark_used(self, slots: Iterable[int]) -> None:
        self._used.update(dict.fromkeys(slots, self._lane.mark()))

    def arrival_order(self, slot: int) -> int:
        """Return a number that is smaller for slots that are filled sooner; 0: filled."""
        self._settle_copies()
        content = self._contents[slot]
        return (
            0
            if self._slots[content.key.layer].get(content.key.expert) == slot
            else content.mark.number
        )

    def _settle_copies(self) -> None:
        """Record copies that have passed or that following compute waits for."""
        while self._in_flight:
            content = self._in_flight[0]
            if content.mark.number > self._reached and not self._lane.has_passed(content.mark):
                return
            self._in_flight.popleft()
            if self._contents.get(content.slot) is content:
                self._slots[content.key.layer][content.key.expert] = content.slot
                self._snapshots.pop(content.key.layer, None)

    def _evict(self, slot: int) -> Mark | None:
        """Empty a slot; return the mark after which nothing reads it."""
        marks = [self._used.pop(slot, None)]
        content = self._contents.pop(slot, None)
        if content is not None:
            layer, expert = content.key
            marks.append(self._layer_used.get(layer))
            if self._slots[layer].get(expert) == slot:
                del self._slots[layer][expert]
                self._snapshots.pop(layer, None)
        return max((mark for mark in marks if mark), key=lambda mark: mark.number, default=None)


def _ranges(layout: ExpertLayout, part_bytes: int) -> list[list[_RowRange]]:
    """Split an expert into parts: rows of its pieces in order."""
    parts: list[list[_RowRange]] = [[]]
    room = part_bytes
    for piece, shape in enumerate(layout.shapes):
        row_bytes, first = math.prod(shape[1:]) * layout.dtype.itemsize, 0
        while first < shape[0]:
            if room < row_bytes and parts[-1]:
                parts.append([])
                room = part_bytes
            last = min(shape[0], first + max(1, room // row_bytes))
            parts[-1].append(_RowRange(piece, first, last))
            room -= (last - first) * row_bytes
            first = last
    return parts


class DeviceSlot(NamedTuple):
    """pieces: [1, *shape] each, in the layout."""

    number: int
    pieces: Sequence[Tensor]


class DeviceSlots(ComputeSlots):
    """Slots of experts as computed, never packed."""

    @property
    def layer(self) -> ExpertLayer:
        """The contents of all slots, of any layers."""
        return self.buffer.layer

    def memory(self, slot: int) -> DeviceSlot:
        return DeviceSlot(slot, self.buffer.part(slot, slot + 1))


class DeviceCache:
    """A GPU's expert cache and its parts. close_host: frees the host memory behind it."""

    def __init__(
        self,
        cache: ExpertCache,
        slots: DeviceSlots,
        tier: DeviceTier,
        lane: DeviceLane,
        close_host: Callable[[], None] = lambda: None,
    ) -> None:
        self.cache, self.slots, self.tier, self.lane = cache, slots, tier, lane
        self._close_host = close_host
        self._exposed_s = 0.0

    def count_exposed(self) -> float:
        """Return the time that compute waited for copies, as reported since the last call."""
        exposed_s = self.lane.exposed_s - self._exposed_s
        self._exposed_s += exposed_s
        self.cache.traffic.waited_s += exposed_s
        return exposed_s

    def close(self) -> None:
        """Close the cache and free the host memory. May be called twice."""
        self.cache.close()
        self._close_host()
