"""Where a prefill worker finds the experts of the layer that it computes (MoE-Prefill, AsyncEP).

    layer        0          1          2          3
    compute   |#########|##########|##########|######
    copy      |==1==|   |==2==|    |==3==|               a layer ahead, on a thread of its own
                         ^ fetch(1) waits only where the copy is slower than the compute

Layer 0 (the first with experts) is always resident, so that a pass starts at once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.linear import PlainLinear
from models.expert_loading import ExpertLayer, clamped_gate, expert_shapes
from models.moe import ExpertHalf
from models.spec import ModelSpec


class ExpertBuffer:
    """Memory for experts [0, E) of one layer, as they are moved.

    gate_up [E, 2F, D] (gate rows first), down [E, D, F]; where the family has biases, of those
    [E, 2F] and [E, D]. `layer` computes with what stands there.
    """

    def __init__(self, spec: ModelSpec, num_experts: int, dtype: torch.dtype, device: torch.device):
        self.tensors: tuple[Tensor, ...] = tuple(
            torch.empty((num_experts, *shape), dtype=dtype, device=device)
            for shape in expert_shapes(spec)
        )
        gate_up, down, *biases = self.tensors
        gate_up_bias, down_bias = biases or ([None] * num_experts, [None] * num_experts)
        self.layer = ExpertLayer(
            tuple(map(PlainLinear, gate_up, gate_up_bias)),
            tuple(map(PlainLinear, down, down_bias)),
            clamped_gate(spec),
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def part(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Views of experts [first, last), each contiguous."""
        return tuple(tensor[first:last] for tensor in self.tensors)


class ExpertStore(Protocol):
    """Used by one thread. Whatever the kind: equal weights, and so equal bits."""

    waited_s: float  # so far: what `fetch` has waited, time in which nothing was computed

    def fetch(self, layer: int) -> ExpertLayer:
        """All experts of `layer`; begins to bring the next layers in. What an earlier call
        returned must not be used any more. Raises PeerError or ChannelError that names who failed;
        never waits longer than the channel's deadline."""

    def close(self) -> None:
        """Ends threads and connections."""


class ResidentStore:
    """All experts of all layers, in the processor's own layout."""

    waited_s = 0.0

    def __init__(self, experts: ExpertHalf) -> None:
        self._experts = experts

    def fetch(self, layer: int) -> ExpertLayer:
        return self._experts.held(layer)

    def close(self) -> None:
        """Nothing to end."""


class ExpertSource(Protocol):
    """What a store that copies copies from. Used by the store's thread only."""

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        """Fills `into` with all experts of `layer`. Raises as `ExpertStore.fetch`."""

    def close(self) -> None: ...
