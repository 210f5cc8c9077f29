"""Formats of an expert in a cache slot, and in the file that fills it.

`ComputeFormat`: as multiplied with elsewhere. `CheckpointFormat`: as stored (fp8 blocks, MXFP4,
bfloat16 for float32 compute), which products unpack (kernels/stored.py); up to eight times as many
experts fit. Values are equal, and so bits.

`ExpertTier` is the interface of the slower tier from which slots are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from contracts.errors import CheckpointError
from kernels.linear import PackedLinear, Product, has_panels
from kernels.stored import LAYOUTS, StoredWeight
from models.experts.expert_layout import ExpertBuffer, ExpertLayout
from models.experts.expert_loading import StoredLayer, stored_biases, stored_weights
from models.experts.host_experts import CheckpointParts
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint

SlotMemory = Sequence[Any]
"""The bytes of one expert's tensors, as memoryviews; on a device a `DeviceSlot`."""

Pieces = Callable[[int, int], Iterator[memoryview]]
"""(layer, expert) -> the contents of its slot in order, valid until the next call."""


class ComputeFormat:
    """sizes: bytes of one expert's tensors. name: identifies the format in file names."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.spec, self._layout = layout.spec, layout
        self.sizes = [len(piece) for piece in self.slots(1).memory(0)]
        self.name = f"{layout.dtype} {layout.digest.hex()}"

    def slots(self, count: int) -> ComputeSlots:
        return ComputeSlots(self._layout, count)

    def pieces(self, checkpoint: Checkpoint) -> Pieces:
        """Return a reader of the checkpoint's experts. Raises CheckpointError."""
        parts, one = CheckpointParts(checkpoint, self._layout), self.slots(1)

        def read_expert(layer: int, expert: int) -> Iterator[memoryview]:
            parts.copy_part(layer, expert, expert + 1, one.buffer.pieces)
            yield from one.memory(0)

        return read_expert


class ComputeSlots:
    """Memory for `count` experts of any layers."""

    def __init__(self, layout: ExpertLayout, count: int) -> None:
        self.count, self.buffer = count, ExpertBuffer(layout, count)
        self.num_bytes = self.buffer.num_bytes

    def memory(self, slot: int) -> SlotMemory:
        """Return views of a slot's tensors."""
        return list(map(_bytes_of, self.buffer.part(slot, slot + 1)))

    def products(self, slot: int) -> tuple[Product, Product]:
        """Return gate_up and down of the expert in a slot."""
        layer = self.buffer.layer
        return layer.gate_up[slot], layer.down[slot]


class CheckpointFormat:
    """Experts in panels as they are stored, all alike. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.spec, self._dtype = spec, dtype
        self._folder = checkpoint.folder
        first = StoredLayer(checkpoint, spec, spec.moe_layers[0])
        self._kinds, self._like = _kinds_of(first.expert(0)), self._packed(first, 0)
        storage = self._like.weights[0].storage
        self.sizes = [tensor.nbytes for tensor in self._like.tensors]
        self.name = f"stored {storage.name} {LAYOUTS[storage]} {dtype} {self.sizes}"

    def slots(self, count: int) -> CheckpointSlots:
        return CheckpointSlots(self._like, self._dtype, count)

    def pieces(self, checkpoint: Checkpoint) -> Pieces:
        layers = {each: StoredLayer(checkpoint, self.spec, each) for each in self.spec.moe_layers}
        for number, layer in layers.items():
            for expert in range(self.spec.num_experts):
                if _kinds_of(layer.expert(expert)) != self._kinds:
                    raise self._differs(number, expert)

        def read_expert(layer: int, expert: int) -> Iterator[memoryview]:
            yield from map(_bytes_of, self._packed(layers[layer], expert).tensors)
            checkpoint.release()

        return read_expert

    def _packed(self, layer: StoredLayer, expert: int) -> PackedExpert:
        stored = layer.expert(expert)
        weights = stored_weights(stored, self.spec, self._dtype)
        if weights is None:
            raise self._differs(layer.number, expert)
        biases = stored_biases(stored, self.spec, self._dtype)
        return PackedExpert(weights, [bias_N for bias_N in biases if bias_N is not None])

    def _differs(self, layer: int, expert: int) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: expert {expert} of layer {layer} is stored differently from the "
            "first one, or cannot be used as stored: set experts.storage_format to false"
        )


class PackedExpert(NamedTuple):
    """An expert's gate_up and down as stored, and its biases."""

    weights: tuple[StoredWeight, StoredWeight]
    biases: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [*(weight.panels for weight in self.weights), *self.biases]


class CheckpointSlots:
    def __init__(self, like: PackedExpert, dtype: torch.dtype, count: int) -> None:
        """like: any expert."""
        self.count, self._weights, self._dtype = count, like.weights, dtype
        self._tensors = [
            torch.empty((count, *tensor.shape), dtype=tensor.dtype) for tensor in like.tensors
        ]
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)

    def memory(self, slot: int) -> SlotMemory:
        return [_bytes_of(tensor[slot]) for tensor in self._tensors]

    def products(self, slot: int) -> tuple[Product, Product]:
        held = [tensor[slot] for tensor in self._tensors]
        biases: Sequence[Tensor | None] = held[len(self._weights) :] or [None, None]
        gate_up, down = (
            PackedLinear.of_panels(weight._replace(panels=panels), self._dtype, bias_N)
            for weight, panels, bias_N in zip(self._weights, held, biases, strict=False)
        )
        return gate_up, down


ExpertFormat = ComputeFormat | CheckpointFormat
ExpertSlots = ComputeSlots | CheckpointSlots


def slot_format(checkpoint: Checkpoint, layout: ExpertLayout, stored: bool | None) -> ExpertFormat:
    """Return the format of cached experts. stored: None: as stored if bits are equal.

    Raises CheckpointError.
    """
    spec, dtype = layout.spec, layout.dtype
    if stored is False or layout.device.type != "cpu":
        return ComputeFormat(layout)
    first = StoredLayer(checkpoint, spec, spec.moe_layers[0]).expert(0)
    is_usable = stored or has_panels(dtype, layout.device)
    if not is_usable or stored_weights(first, spec, dtype) is None:
        return ComputeFormat(layout)
    return CheckpointFormat(checkpoint, spec, dtype)


def _kinds_of(stored: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return sorted((role, tensor.dtype, tensor.shape) for role, tensor in stored.items())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class CompletedRead(NamedTuple):
    """seconds: duration; 0: skipped. error: reason of a failure, or empty."""

    ticket: int
    seconds: float
    error: str = ""


class ExpertTier(Protocol):
    """Reads experts in `parts` beside the owner's thread; `room` is what it accepts now."""

    @property
    def parts(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def room(self) -> int: ...

    def enqueue(self, layer: int, expert: int, part: int, urgency: int) -> int:
        """Enqueue a read for the next `submit`; more urgent ones go first. Returns a ticket."""

    def submit(self) -> None:
        """Start the enqueued reads."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` would return at once."""

    def expedite(self, ticket: int, urgency: int) -> None:
        """Raise the urgency of a read."""

    def cancel(self, ticket: int) -> None:
        """Cancel a read that has not started."""

    def poll_completed(self) -> Iterable[CompletedRead]:
        """Return reads completed since the last call. Raises ChannelError if the tier failed."""

    def copy(self, ticket: int, into: SlotMemory) -> None:
        """Copy the bytes of a completed read to its slot."""

    def free(self, ticket: int) -> None:
        """Release the ticket of a completed read."""

    def wait(self, timeout_s: float) -> None:
        """Wait for a completed read or `wake`."""

    def wake(self) -> None:
        """End a `wait`. Thread-safe."""

    def close(self) -> None: ...
