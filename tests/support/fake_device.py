"""A device whose copies and ids come when the dice let them, or when they are waited for."""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest
from torch import Tensor

import kernels.device
from actors.moe import dispatch
from actors.moe.remote_backend import RemoteBackend
from models.experts.device_lanes import InlineLane, Mark
from models.experts.device_tier import DeviceTier, InSlot
from models.experts.expert_format import SlotMemory
from models.experts.expert_half import ExpertHalf


def act_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as with GPUs, with CPU tensors; nothing of the host's path may run."""
    monkeypatch.setattr(kernels.device, "ACCELERATORS", frozenset({"cpu"}))
    monkeypatch.setattr(ExpertHalf, "steps", None)
    monkeypatch.setattr(dispatch, "plan_dispatch", None)
    monkeypatch.setattr(RemoteBackend, "layer_decoder", lambda self, kv: None)


class _Queued(NamedTuple):
    number: int
    stored: Sequence[Tensor]
    into: Sequence[Tensor]


class _Coming:
    def __init__(self, tensor: Tensor, looks: int) -> None:
        self._tensor, self._looks = tensor.clone(), looks

    @property
    def is_ready(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    @property
    def tensor(self) -> Tensor:
        assert self._looks < 0, "nobody has looked whether it has come"
        return self._tensor


class FakeLane(InlineLane):
    """A lane of a device on the CPU. Compute runs at once; a copy's target is spoilt from its
    queueing until it has run. stalls: nothing comes any more."""

    exposed_s = 0.0
    copied_s = 0.0

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._queue: list[_Queued] = []
        self.number = 0
        self.copies = self.waits = 0
        self.stalls = False
        self.after: Mark | None = None  # of the last copy

    def copy(self, stored: Sequence[Tensor], into: Sequence[Tensor], after: Mark | None) -> Mark:
        for target in into:
            target.fill_(float("nan"))
        self.after, mark = after, self.mark()
        self._queue.append(_Queued(mark.number, stored, into))
        return mark

    def mark(self) -> Mark:
        self.number += 1
        return Mark(self.number)

    def wait(self, copied: Mark) -> None:
        self.waits += 1
        self._until(copied.number)

    def has_passed(self, mark: Mark) -> bool:
        if self._queue and not self.stalls and self._dice.random() < 0.5:
            self._until(self._queue[0].number)
        return not self._queue or mark.number < self._queue[0].number

    def fetch(self, tensor: Tensor, *, is_complete: bool = False) -> _Coming:
        return _Coming(tensor, 1 << 60 if self.stalls else self._dice.randrange(3))

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def drain(self) -> None:
        self._until(self.number)

    def _until(self, number: int) -> None:
        while self._queue and self._queue[0].number <= number:
            copy = self._queue.pop(0)
            for source, target in zip(copy.stored, copy.into, strict=True):
                target.copy_(source)
            self.copies += 1


class WatchedTier(DeviceTier):
    """Knows which slots are read, and when: none may be filled anew before that. log: (layer,
    expert, part) in the order in which they were queued."""

    lane: FakeLane

    def watch(self, lane: FakeLane) -> None:
        self.lane = lane
        self.log: list[tuple[int, int, int]] = []
        self._last_read: dict[int, int] = {}

    def wait_for(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        super().wait_for(slots)
        self._last_read.update(dict.fromkeys(slots, self.lane.number))

    def in_slots(self, layer: int) -> InSlot:
        found = super().in_slots(layer)
        self._last_read.update(dict.fromkeys(found.slots.values(), self.lane.number))
        return found

    def copy(self, ticket: int, into: SlotMemory) -> None:
        slot = into[0]
        request = self._requests[ticket]
        super().copy(ticket, into)
        self.log.append((*request.key, request.part))
        last_read = self._last_read.pop(slot, None)
        if last_read is not None:
            after = self.lane.after
            assert after is not None, f"slot {slot} is filled while it may be read"
            assert after.number > last_read, f"slot {slot} is filled before it was read"
