"""Sources of the experts of a prefill worker's current layer (MoE-Prefill, AsyncEP).

    layer        0          1          2          3
    compute   |#########|##########|##########|######
    copy      |==1==|   |==2==|    |==3==|               a layer ahead, on a thread of its own
                         ^ fetch(1) waits only if the copy is slower than the compute

Layer 0 (the first with experts) is always resident, so that a pass starts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.linear import ExpertLinears, plain_linears
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import ExpertLayer, clamped_gate


class ExpertBuffer:
    """Memory for all experts of one layer, or for some of any layers; `layer` computes with it."""

    def __init__(self, layout: ExpertLayout, experts: int | None = None) -> None:
        """experts: None: all experts of a layer."""
        self._layout, self._experts = layout, experts or layout.spec.num_experts
        self._tensors: list[Tensor | Sequence[Tensor]]
        gate_up, down = self._packed() if layout.packed else self._plain()
        self.layer = ExpertLayer(gate_up, down, clamped_gate(layout.spec))

    def _packed(self) -> list[ExpertLinears]:
        """Make gate_up and down in memory of the packed layout."""
        biases = self._layout.empty_biases(self._experts)
        of_experts: Sequence[Sequence[Tensor | None]] = [list(bias_EN) for bias_EN in biases]
        both = [
            [self._layout.new_linear(matrix, bias_N) for bias_N in bias_EN]
            for matrix, bias_EN in enumerate(of_experts or [[None] * self._experts] * 2)
        ]
        self._tensors = [*([product.memory for product in each] for each in both), *biases]
        return [ExpertLinears(each, None) for each in both]

    def _plain(self) -> list[ExpertLinears]:
        gate_up, down, *biases = self._layout.empty(self._experts)
        self._tensors = [gate_up, down, *biases]
        gate_up_bias, down_bias = biases or (None, None)
        return [plain_linears(gate_up, gate_up_bias), plain_linears(down, down_bias)]

    @property
    def num_bytes(self) -> int:
        return self._layout.num_bytes(self._experts)

    @property
    def pieces(self) -> list[Tensor]:
        return self.part(0, self._experts)

    def part(self, first: int, last: int) -> list[Tensor]:
        """Return views of the pieces of experts [first, last)."""
        return self._layout.pieces(self._tensors, first, last)


class ResidentStore:
    """All experts of all layers in the processor's own layout; methods as of a CopyingStore."""

    is_streamed = False
    copy_s = waited_s = 0.0

    def __init__(self, experts: ExpertHalf) -> None:
        self._experts = experts

    def is_ready(self, layer: int) -> bool:
        return True

    def wait_ready(self, layer: int, timeout_s: float) -> bool:
        return True

    def fetch(self, layer: int) -> ExpertLayer:
        return self._experts.layer_experts(layer)

    def close(self) -> None:
        """Do nothing: all layers stay resident."""

    release = wake = close


class ExpertSource(Protocol):
    """Source of a copying store. Used by the store's thread only."""

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        """Fill `into` with all experts of `layer`. Raises as `ExpertStore.fetch`."""

    def close(self) -> None: ...
