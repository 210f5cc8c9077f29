"""Pinned memory of the host as a cache's slower tier, its slots on a device.

    the cache (host)   want 3 7 ─ 7 is there: compute ─ 3 is "read": queued, compute waits for it
    copies             |= hint 9 =|==== 3 ====|= hint 9 … after what is wanted
    compute            … |## 7 ##|  (waits)  |## 3 ##|

For the cache an expert is there as soon as its copy is queued, so the host never waits for one: the
compute does, by a mark. What is wanted is queued at once; of hints only a few parts at a time, for
what is queued cannot be taken back. A slot is filled anew only after what was queued to be computed
with what stands there.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from contracts.expert_slots import ExpertKey
from models.experts.device_lanes import DeviceLane, Mark
from models.experts.expert_cache import HINT_URGENCY
from models.experts.expert_form import SlotMemory
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_tier import PartRead

PART_BYTES: Final = 4 << 20  # from there on a link is at its rate
HINTS_UNDER_WAY: Final = 3  # parts: as many a demand may have to wait for
_ROOM: Final = 1 << 20  # what is asked for is a few bytes here
_LOOK_S: Final = 1e-4
_LEAST_S: Final = 1e-9


class HostExperts(Protocol):
    def expert(self, layer: int, expert: int) -> Sequence[Tensor]:
        """Its pieces in the host's memory, as the layout has them."""


class _Range(NamedTuple):
    """Rows of a piece."""

    piece: int
    first: int
    last: int


class _Asked(NamedTuple):
    key: ExpertKey
    part: int
    urgency: int


class _Stay(NamedTuple):
    """An expert in a slot, from the mark on."""

    key: ExpertKey
    slot: int
    mark: Mark


class There(NamedTuple):
    """Experts of a layer that can be computed with at once. slots: of each; slots_E int32, on the
    device: the same, -1 where one is not."""

    slots: Mapping[int, int]
    slots_E: Tensor


class DeviceTier:
    """A `Tier`, used by one thread but for `wake`; and what its owner asks of slots."""

    def __init__(
        self,
        experts: HostExperts,
        layout: ExpertLayout,
        lane: DeviceLane,
        *,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._experts, self._lane = experts, lane
        self._num_experts, self.expert_bytes = layout.spec.num_experts, layout.num_bytes(1)
        self._ranges = _ranges(layout, part_bytes)
        self.parts = len(self._ranges)
        self._device = layout.device
        self._asked: dict[int, _Asked] = {}
        self._skipped: set[int] = set()
        self._given: set[int] = set()
        self._numbers = 0
        self._hints: list[Mark] = []  # of parts that may be under way
        self._woken = threading.Event()
        self._stays: dict[int, _Stay] = {}  # by slot
        self._coming: deque[_Stay] = deque()
        self._reached = 0  # by the compute, of the numbers of copies
        self._slots: dict[int, dict[int, int]] = {each: {} for each in layout.spec.moe_layers}
        self._told: dict[int, There] = {}  # what `there` has said of a layer and still holds
        self._used: dict[int, Mark] = {}  # by slot
        self._layer_used: dict[int, Mark] = {}

    def __str__(self) -> str:
        return f"the host's memory, for {self._device}"

    @property
    def room(self) -> int:
        return _ROOM - len(self._asked)

    def read(self, layer: int, expert: int, part: int, urgency: int) -> int:
        self._numbers += 1
        self._asked[self._numbers] = _Asked(ExpertKey(layer, expert), part, urgency)
        return self._numbers

    def begin(self) -> None:
        """`ended` does."""

    def hurry(self, ticket: int, urgency: int) -> None:
        asked = self._asked[ticket]
        self._asked[ticket] = asked._replace(urgency=min(asked.urgency, urgency))

    def skip(self, ticket: int) -> None:
        self._skipped.add(ticket)

    def ended(self) -> Iterable[PartRead]:
        """What may be queued now, the most urgent first; `copy` queues it."""
        waiting = [ticket for ticket in self._asked if ticket not in self._given]
        if not waiting:
            return ()
        self._hints = [mark for mark in self._hints if not self._lane.has_passed(mark)]
        room, part_s, found = HINTS_UNDER_WAY - len(self._hints), self._part_s, []
        for ticket in sorted(waiting, key=lambda each: (self._asked[each].urgency, each)):
            if ticket in self._skipped:
                found.append(PartRead(ticket, 0.0))
            elif self._asked[ticket].urgency < HINT_URGENCY:
                found.append(PartRead(ticket, part_s))
            elif room > 0:
                room -= 1
                found.append(PartRead(ticket, part_s))
        self._given.update(each.ticket for each in found)
        return found

    def copy(self, ticket: int, into: SlotMemory) -> None:
        slot, pieces = into  # a DeviceSlot
        key, part, urgency = self._asked[ticket]
        stored, ranges = self._experts.expert(*key), self._ranges[part]
        mark = self._lane.copy(
            [stored[piece][:, first:last] for piece, first, last in ranges],
            [pieces[piece][:, first:last] for piece, first, last in ranges],
            self._leaves(slot),  # with the first part, which the others follow
        )
        if urgency >= HINT_URGENCY:
            self._hints.append(mark)
        if part == self.parts - 1:
            stay = self._stays[slot] = _Stay(key, slot, mark)
            self._coming.append(stay)

    def free(self, ticket: int) -> None:
        del self._asked[ticket]
        self._given.discard(ticket)
        self._skipped.discard(ticket)

    def wait(self, timeout_s: float) -> None:
        """Hints go on as the device comes along, which it does not tell: it is looked for."""
        if self._asked and timeout_s > 0.0:
            timeout_s = min(timeout_s, _LOOK_S)
        self._woken.wait(timeout_s)
        self._woken.clear()

    def fileno(self) -> int:
        raise NotImplementedError("a device has no descriptor to wait for")

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._lane.drain()

    def there(self, layer: int) -> There:
        """What it names stays there for what is queued until the next `used_layer`."""
        self._land()
        told = self._told.get(layer)
        if told is None:
            slots = dict(self._slots[layer])
            slots_E = torch.full((self._num_experts,), -1, dtype=torch.int32)
            if slots:
                slots_E[list(slots)] = torch.tensor(list(slots.values()), dtype=torch.int32)
            told = self._told[layer] = There(slots, self._lane.upload(slots_E))
        return told

    def used_layer(self, layer: int) -> None:
        """All that reads what `there` has named is queued."""
        self._layer_used[layer] = self._lane.mark()

    def need(self, slots: Iterable[int]) -> None:
        """What is queued from here on reads them, until `used`."""
        marks = [self._stays[slot].mark for slot in slots]
        newest = max(marks, key=lambda mark: mark.number)
        if newest.number > self._reached:
            self._lane.wait(newest)
            self._reached = newest.number

    def used(self, slots: Iterable[int]) -> None:
        self._used.update(dict.fromkeys(slots, self._lane.mark()))

    def comes_at(self, slot: int) -> int:
        """Slots of smaller numbers are there sooner; 0: it is there."""
        self._land()
        stay = self._stays[slot]
        return 0 if self._slots[stay.key.layer].get(stay.key.expert) == slot else stay.mark.number

    def _land(self) -> None:
        """Takes in which copies have passed, or are waited for by what is computed next."""
        while self._coming:
            stay = self._coming[0]
            if stay.mark.number > self._reached and not self._lane.has_passed(stay.mark):
                return
            self._coming.popleft()
            if self._stays.get(stay.slot) is stay:
                self._slots[stay.key.layer][stay.key.expert] = stay.slot
                self._told.pop(stay.key.layer, None)

    def _leaves(self, slot: int) -> Mark | None:
        """What stands there is no more: after that mark nothing reads it."""
        marks = [self._used.pop(slot, None)]
        stay = self._stays.pop(slot, None)
        if stay is not None:
            layer, expert = stay.key
            marks.append(self._layer_used.get(layer))
            if self._slots[layer].get(expert) == slot:
                del self._slots[layer][expert]
                self._told.pop(layer, None)
        return max((mark for mark in marks if mark), key=lambda mark: mark.number, default=None)

    @property
    def _part_s(self) -> float:
        """To copy one, on average; hardly anything as long as nothing is known."""
        return max(_LEAST_S, self._lane.copied_s / max(1, self._lane.copies))


def _ranges(layout: ExpertLayout, part_bytes: int) -> list[list[_Range]]:
    """The parts of an expert: rows of its pieces, one after another."""
    parts: list[list[_Range]] = [[]]
    room = part_bytes
    for piece, shape in enumerate(layout.shapes):
        row_bytes, first = math.prod(shape[1:]) * layout.dtype.itemsize, 0
        while first < shape[0]:
            if room < row_bytes and parts[-1]:
                parts.append([])
                room = part_bytes
            last = min(shape[0], first + max(1, room // row_bytes))
            parts[-1].append(_Range(piece, first, last))
            room -= (last - first) * row_bytes
            first = last
    return parts
