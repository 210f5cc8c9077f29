"""Weights of a device's experts, each in memory of its own, as computed with or as stored.

              codes [N, K]                                            scales
    MXFP4     uint8 [N, K / 32, 16], two a byte, lower half first     uint8 exponents [N, K / 32]
    fp8       uint8                                                   float32 [N, ceil(K / 128)]
    int8      int8                                                    float32 [N, ceil(K / 128)]
    others    the numbers                                             none

One kernel computes the products of all experts (kernels/triton_kernels.py). It finds an expert by
its offset from the first one, and unpacks tiles of a weight in registers: to the numbers of
kernels/quantization.py, rounded to the dtype of the rows. `StoredLinear` is its reference.

Shapes: e experts, N outputs, K inputs, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quantization import FP8_BLOCK, dequantize_mxfp4
from kernels.stored import Storage

_ROWS: Final = 256  # that the reference unpacks at a time
_ALIGNED_BYTES: Final = 16


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredLinear:
    """A product with a weight [N, K] as it is stored, and its bias [N], or None."""

    storage: Storage
    codes: Tensor
    scales: Tensor | None
    bias_N: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        N, K = self.codes.flatten(1).shape
        return N, 2 * K if self.storage is Storage.MXFP4 else K

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for weights that one kernel computes with."""
        return self.storage, self.codes.dtype, self.shape, self.bias_N is None

    def unpacked(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight."""
        storage, codes, scales = self.storage, self.codes[rows], self.scales
        if scales is None:
            return codes.to(dtype)
        if storage is Storage.MXFP4:
            return dequantize_mxfp4(codes, scales[rows]).to(dtype)
        numbers = codes.view(torch.float8_e4m3fn) if storage is Storage.FP8 else codes
        scales_NK = scales[rows].repeat_interleave(FP8_BLOCK, 1)[:, : codes.shape[1]]
        return (numbers.float() * scales_NK).to(dtype)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return [T, N] in x's dtype. A few rows of the weight are unpacked at a time."""
        found = []
        for first in range(0, self.shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            bias = None if self.bias_N is None else self.bias_N[rows]
            found.append(functional.linear(x_TK, self.unpacked(rows, x_TK.dtype), bias))
        return torch.cat(found, 1)


class ExpertTable(NamedTuple):
    """Places of e weights of one kind.

    first: the first expert's. offsets_3e int64: each expert's codes, scales and bias, in elements
    from those of the first. is_aligned: codes are multiples of 16 bytes apart.
    """

    first: StoredLinear
    offsets_3e: Tensor
    is_aligned: bool


def expert_table(products: Sequence[object]) -> ExpertTable | None:
    """Return the table of products on one device, or None if they are not of one kind."""
    stored = (getattr(each, "stored", each) for each in products)
    weights = [each for each in stored if isinstance(each, StoredLinear)]
    if not weights or len(weights) < len(products) or len({each.form for each in weights}) > 1:
        return None
    if not all(each.codes.is_contiguous() for each in weights):
        return None
    lines = [
        _offsets([each.codes for each in weights]),
        _offsets([each.scales for each in weights]),
        _offsets([each.bias_N for each in weights]),
    ]
    steps = [offset * weights[0].codes.element_size() for offset in lines[0]]
    offsets_3e = torch.tensor(lines, dtype=torch.int64).to(weights[0].codes.device)
    return ExpertTable(weights[0], offsets_3e, all(step % _ALIGNED_BYTES == 0 for step in steps))


def _offsets(tensors: Sequence[Tensor | None]) -> list[int]:
    first = tensors[0]
    if first is None:
        return [0] * len(tensors)
    size = first.element_size()
    return [(each.data_ptr() - first.data_ptr()) // size for each in tensors if each is not None]
