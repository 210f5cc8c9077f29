"""Formats of an expert in a cache slot, and in the file that fills it.

`ComputeFormat`: as multiplied with; no work at its use. `CheckpointFormat`: as stored (fp8 blocks,
MXFP4, bfloat16 for float32 compute); up to eight times as many experts fit, and each use converts.
Values are equal, and so bits.

`ExpertTier` is the interface of the slower tier from which slots are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from contracts.errors import CheckpointError
from kernels.linear import ConvertedLinear, Product
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import (
    StoredLayer,
    lay_out_down,
    lay_out_gate_up,
    lay_out_gate_up_bias,
)
from models.experts.expert_store import ExpertBuffer
from models.experts.host_experts import CheckpointParts
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint

SlotMemory = Sequence[Any]
"""The bytes of one expert's tensors, as memoryviews; on a device a `DeviceSlot`."""

Pieces = Callable[[int, int], Iterator[memoryview]]
"""(layer, expert) -> the contents of its slot in order, valid until the next call."""


class ExpertSlots(Protocol):
    """Memory for some experts of any layers."""

    @property
    def num_bytes(self) -> int: ...

    def memory(self, slot: int) -> SlotMemory:
        """Return views of a slot's tensors."""

    def products(self, slot: int) -> tuple[Product, Product]:
        """Return gate_up and down of the expert in a slot."""


class SlotFormat(Protocol):
    """Format of the experts in a cache."""

    @property
    def spec(self) -> ModelSpec: ...

    def slots(self, count: int) -> ExpertSlots: ...


class ExpertFormat(SlotFormat, Protocol):
    """sizes: bytes of one expert's tensors. name: identifies the format in file names."""

    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def name(self) -> str: ...

    def pieces(self, checkpoint: Checkpoint) -> Pieces:
        """Return a reader of the checkpoint's experts. Raises CheckpointError."""


class ComputeFormat:
    def __init__(self, layout: ExpertLayout) -> None:
        self.spec, self._layout = layout.spec, layout
        self.sizes = [len(piece) for piece in self.slots(1).memory(0)]
        self.name = f"{layout.dtype} {layout.digest.hex()}"

    def slots(self, count: int) -> ComputeSlots:
        return ComputeSlots(self._layout, count)

    def pieces(self, checkpoint: Checkpoint) -> Pieces:
        parts, one = CheckpointParts(checkpoint, self._layout), self.slots(1)

        def read_expert(layer: int, expert: int) -> Iterator[memoryview]:
            parts.copy_part(layer, expert, expert + 1, one.buffer.pieces)
            yield from one.memory(0)

        return read_expert


class ComputeSlots:
    def __init__(self, layout: ExpertLayout, count: int) -> None:
        self.buffer = ExpertBuffer(layout, count)
        self.num_bytes = self.buffer.num_bytes

    def memory(self, slot: int) -> SlotMemory:
        return list(map(_bytes_of, self.buffer.part(slot, slot + 1)))

    def products(self, slot: int) -> tuple[Product, Product]:
        layer = self.buffer.layer
        return layer.gate_up[slot], layer.down[slot]


class CheckpointFormat:
    """Experts as stored, all alike. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.spec, self._dtype = spec, dtype
        self._like = self._stored(StoredLayer(checkpoint, spec, spec.moe_layers[0]), 0)
        self.sizes = [tensor.nbytes for tensor in self._like.values()]
        self.name = "stored"

    def slots(self, count: int) -> CheckpointSlots:
        return CheckpointSlots(self._like, self.spec, self._dtype, count)

    def pieces(self, checkpoint: Checkpoint) -> Pieces:
        layers = {each: StoredLayer(checkpoint, self.spec, each) for each in self.spec.moe_layers}
        self._check(checkpoint, layers)

        def read_expert(layer: int, expert: int) -> Iterator[memoryview]:
            for tensor in self._stored(layers[layer], expert).values():
                yield _bytes_of(tensor.contiguous())
            checkpoint.release()

        return read_expert

    def _check(self, checkpoint: Checkpoint, layers: Mapping[int, StoredLayer]) -> None:
        like = list(map(_kind_of, self._like.items()))
        for number, layer in layers.items():
            for expert in range(self.spec.num_experts):
                if list(map(_kind_of, self._stored(layer, expert).items())) != like:
                    raise CheckpointError(
                        f"{checkpoint.folder}: expert {expert} of layer {number} is stored "
                        "differently from the first one: set experts.storage_format to false"
                    )

    def _stored(self, layer: StoredLayer, expert: int) -> dict[str, Tensor]:
        return dict(sorted(layer.expert(expert).items()))


class CheckpointSlots:
    def __init__(
        self, like: Mapping[str, Tensor], spec: ModelSpec, dtype: torch.dtype, count: int
    ) -> None:
        """like: one expert's tensors."""
        self._spec, self._dtype = spec, dtype
        self._tensors = {
            role: torch.empty((count, *tensor.shape), dtype=tensor.dtype)
            for role, tensor in like.items()
        }
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def memory(self, slot: int) -> SlotMemory:
        return [_bytes_of(tensor[slot]) for tensor in self._tensors.values()]

    def products(self, slot: int) -> tuple[Product, Product]:
        spec, dtype = self._spec, self._dtype
        stored = {role: tensor[slot] for role, tensor in self._tensors.items()}
        D, F, has_bias = spec.hidden_size, spec.expert_ffn_size, "down_bias" in stored

        def gate_up() -> tuple[Tensor, Tensor | None]:
            weight, bias = torch.empty((2 * F, D), dtype=dtype), None
            lay_out_gate_up(stored, spec, _copy, weight)
            if has_bias:
                bias = torch.empty(2 * F, dtype=dtype)
                lay_out_gate_up_bias(stored, spec, _copy, bias)
            return weight, bias

        def down() -> tuple[Tensor, Tensor | None]:
            weight = torch.empty((D, F), dtype=dtype)
            lay_out_down(stored, spec, _copy, weight)
            return weight, stored["down_bias"].to(dtype) if has_bias else None

        return ConvertedLinear(gate_up), ConvertedLinear(down)


def _copy(stored: Tensor, into: Tensor) -> None:
    into.copy_(stored)


def _kind_of(stored: tuple[str, Tensor]) -> tuple[str, torch.dtype, tuple[int, ...]]:
    role, tensor = stored
    return role, tensor.dtype, tuple(tensor.shape)


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
