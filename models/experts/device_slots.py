"""Slots of a cache in the memory of a device: two tensors, of which a slot is a row, so that one
kernel multiplies with whatever slots it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.linear import Product
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import ExpertLayer
from models.experts.expert_store import ExpertBuffer


class DeviceSlot(NamedTuple):
    """pieces: [1, *shape] each, as the layout has them."""

    number: int
    pieces: Sequence[Tensor]


class DeviceSlots:
    """An `ExpertSlots`."""

    def __init__(self, layout: ExpertLayout, count: int) -> None:
        self._buffer = ExpertBuffer(layout, count)
        self.num_bytes = self._buffer.num_bytes

    @property
    def layer(self) -> ExpertLayer:
        """What stands in each slot, of whatever layer it is."""
        return self._buffer.layer

    def memory(self, slot: int) -> DeviceSlot:
        return DeviceSlot(slot, self._buffer.part(slot, slot + 1))

    def products(self, slot: int) -> tuple[Product, Product]:
        return self.layer.gate_up[slot], self.layer.down[slot]


class OnDevice:
    """A `SlotForm`: experts as they are computed with, never packed."""

    def __init__(self, layout: ExpertLayout) -> None:
        assert not layout.packed
        self.spec, self._layout = layout.spec, layout

    def slots(self, count: int) -> DeviceSlots:
        return DeviceSlots(self._layout, count)
