"""Memory layout of a layer's experts that are moved as a whole.

    plain    gate_up [E, 2F, D] (gate rows first) | down [E, D, F] (| biases [E, 2F], [E, D])
    packed   the same matrices in oneDNN's layout: [E, elements] each

Packed experts are moved byte by byte into the memory that is computed with. The layout depends on
the processor and on oneDNN; `digest` identifies it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear import ExpertLinears, PackedLinear, is_packed, plain_linears
from models.experts.expert_loading import ExpertLayer, clamped_gate, expert_shapes
from models.spec.model import ModelSpec

_MATRICES = 2  # gate_up and down; the biases are never packed


class ExpertLayout:
    """packed: use the packed layout if the device and the dtype have one.

    `shapes`: of one expert's tensors. `pieces` of some experts are a flat list of contiguous
    tensors, which are copied, sent and received:

        plain:  one [e, *shape] each        packed: a matrix of each expert, then the biases [e, N]
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, packed: bool = True
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.packed = packed and is_packed(dtype, device)
        self.plain_shapes = expert_shapes(spec)
        self.shapes, self.digest = self.plain_shapes, b""
        if self.packed:
            samples = [self.new_linear(matrix) for matrix in range(_MATRICES)]
            matrices = tuple((sample.memory.numel(),) for sample in samples)
            self.shapes = (*matrices, *self.plain_shapes[_MATRICES:])
            self.digest = hashlib.sha256(b"".join(s.layout for s in samples)).digest()

    def new_linear(self, matrix: int, bias_N: Tensor | None = None) -> PackedLinear:
        """Return a packed product without a weight. matrix 0: gate_up, 1: down."""
        return PackedLinear(torch.zeros(self.plain_shapes[matrix], dtype=self.dtype), bias_N)

    def empty(self, experts: int, first: int = 0) -> tuple[Tensor, ...]:
        """Return a tensor [experts, *shape] for each of `shapes` from `first` on, on the device."""
        return tuple(self._empty((experts, *shape)) for shape in self.shapes[first:])

    def num_bytes(self, experts: int) -> int:
        return sum(self._sizes_bytes(experts))

    def views(self, memory: Tensor, experts: int) -> tuple[Tensor, ...]:
        """Return the tensors of `empty` as views of uint8 memory [num_bytes]."""
        split = torch.split(memory, self._sizes_bytes(experts))
        return tuple(
            part.view(self.dtype).view(experts, *shape)
            for part, shape in zip(split, self.shapes, strict=True)
        )

    def pieces(
        self, tensors: Sequence[Tensor | Sequence[Tensor]], first: int, last: int
    ) -> list[Tensor]:
        """Return the pieces of experts [first, last); tensors: of `empty`, or their rows."""
        parts = [tensor[first:last] for tensor in tensors]
        if not self.packed:
            return [part for part in parts if isinstance(part, Tensor)]
        biases = [part for part in parts[_MATRICES:] if isinstance(part, Tensor)]
        return [*parts[0], *parts[1], *biases]

    def pack(self, plain: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Pack one expert's tensors, [1, *shape] of `plain_shapes`, into its pieces."""
        for number, (tensor, out) in enumerate(zip(plain, into, strict=True)):
            out.copy_(PackedLinear(tensor[0]).memory if number < _MATRICES else tensor)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _sizes_bytes(self, experts: int) -> list[int]:
        return [experts * math.prod(shape) * self.dtype.itemsize for shape in self.shapes]


def expert_pieces(pieces: Sequence[Tensor], expert: int, experts: int) -> list[Tensor]:
    """Return one expert's pieces of the packed pieces of `experts`."""
    matrices, biases = pieces[: _MATRICES * experts], pieces[_MATRICES * experts :]
    return [*matrices[expert::experts], *(bias[expert : expert + 1] for bias in biases)]


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
        biases = self._layout.empty(self._experts, _MATRICES)
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
