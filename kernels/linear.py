"""Products with weights, x @ weight.T + bias.

On the CPU oneDNN computes them. torch's own `linear` is slower: in float32 it uses MKL, which uses
half the vector width on other vendors' processors; in bfloat16 it reorders the weight at every
call. A `PackedLinear` keeps its weight in oneDNN's layout.

oneDNN compiles a product for each number of rows (0.4 ms, 0.4 MB) and keeps the latest 1,024 (ranks
set fewer), so numbers between 16 and 512 are rounded up here. Above, a copy with more rows costs as
much as compiling; callers with spare rows round up themselves (`rounded_up`). A row's result does
not depend on other rows: bits are equal in batches of any size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]
"""x [T, K] → x @ weight.T + bias, [T, N]."""

# (rows up to, rounded to): about a hundred sizes for an expert's two products, which ranks keep
# compiled; finer steps compile more than they save.
_STEPS = ((64, 4), (128, 8), (512, 32), (1024, 64), (4096, 128))
_LARGEST_PADDED = 512
_PACK_FOR_ROWS = 16  # a hint that does not change the layout


class PackedLinear:
    """A product whose weight [N, K] is reordered (and not kept as given), with bias [N] or None.

    Where the weight `is_packed`, its `memory` may be overwritten between calls, with another
    weight's of equal shape.
    """

    __slots__ = ("_bias", "_product", "_weight")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._bias = bias_N
        self._product = _product_of(weight_NK)
        self._weight = weight_NK
        if self._product is _onednn:
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self._weight = reorder(weight_NK, _PACK_FOR_ROWS)

    @property
    def memory(self) -> Tensor:
        """The elements of a packed weight in its layout, padding included: 1-D, no copy."""
        num_bytes = torch.ops.mkldnn._nbytes(self._weight)
        raw = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(self._weight))
        raw.owner = self._weight  # type: ignore[attr-defined]  # whose memory it is
        return torch.frombuffer(raw, dtype=self._weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    @property
    def layout(self) -> bytes:
        """Description of a packed weight by oneDNN; weights with equal ones can swap `memory`."""
        description: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(self._weight)
        return description.numpy().tobytes()

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return [T, N] in x's dtype, which must be the weight's."""
        rows = x_TK.shape[0]
        spare = _missing(rows)
        if spare == 0 or self._product is not _onednn:
            return self._product(x_TK, self._weight, self._bias)
        padded = functional.pad(x_TK, (0, 0, 0, spare))
        return self._product(padded, self._weight, self._bias)[:rows]


class PlainLinear:
    """A product whose weight is not moved, so that its memory may be overwritten between calls.

    Bits equal those of `PackedLinear`; each call reorders the weight. A single row is computed as
    two, because oneDNN computes one row in another way with other bits.
    """

    __slots__ = ("_bias", "_product", "_weight")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._weight, self._bias = weight_NK, bias_N
        self._product = _product_of(weight_NK)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return [T, N] in x's dtype, which must be the weight's."""
        rows = x_TK.shape[0]
        spare = 1 if rows == 1 else _missing(rows)
        if rows == 0 or spare == 0 or self._product is not _onednn:
            return self._product(x_TK, self._weight, self._bias)
        padded = functional.pad(x_TK, (0, 0, 0, spare))
        return self._product(padded, self._weight, self._bias)[:rows]


def is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a `PackedLinear` keeps its weight in a separate layout with `memory`."""
    reachable = hasattr(torch.ops.mkldnn, "data_ptr")
    return reachable and device.type == "cpu" and _ONEDNN.get(dtype, False)


def rounded_up(rows: int) -> int:
    """Return a probably compiled number of rows: at least `rows`, at most a quarter more."""
    step = 1 if rows <= 16 else next((step for most, step in _STEPS if rows <= most), 1)
    return rows + -rows % step


def _missing(rows: int) -> int:
    return rounded_up(rows) - rows if rows <= _LARGEST_PADDED else 0


class ExpertLinears(Sequence[Product]):
    """Products of e experts. weight_eNK: all weights; None if reordered or with biases."""

    def __init__(self, products: Sequence[Product], weight_eNK: Tensor | None) -> None:
        self._products = tuple(products)
        self.weight_eNK = weight_eNK

    def __len__(self) -> int:
        return len(self._products)

    @overload
    def __getitem__(self, expert: int) -> Product: ...
    @overload
    def __getitem__(self, expert: slice) -> Sequence[Product]: ...
    def __getitem__(self, expert: int | slice) -> Product | Sequence[Product]:
        return self._products[expert]


def linears(weight_eNK: Tensor, bias_eN: Tensor | None = None) -> ExpertLinears:
    whole = bias_eN is None and _product_of(weight_eNK) is not _onednn
    products = list(map(PackedLinear, weight_eNK, _rows(weight_eNK, bias_eN)))
    return ExpertLinears(products, weight_eNK if whole else None)


def plain_linears(weight_eNK: Tensor, bias_eN: Tensor | None = None) -> ExpertLinears:
    products = list(map(PlainLinear, weight_eNK, _rows(weight_eNK, bias_eN)))
    return ExpertLinears(products, weight_eNK if bias_eN is None else None)


def _rows(weight_eNK: Tensor, bias_eN: Tensor | None) -> Sequence[Tensor | None]:
    return [None] * len(weight_eNK) if bias_eN is None else list(bias_eN)


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return [T, N]: the product with a contiguous weight that is used once or changes."""
    return _product_of(weight_NK)(x_TK, weight_NK, None)


def _onednn(x_TK: Tensor, weight: Tensor, bias_N: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TK, weight, bias_N, "none", [], "")
    return out


def _product_of(weight_NK: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    if weight_NK.device.type == "cpu" and _ONEDNN.get(weight_NK.dtype, False):
        return _onednn
    return functional.linear


def _usable() -> dict[torch.dtype, bool]:
    """Return whether torch and the processor support oneDNN's products, by dtype."""
    mkldnn = torch.ops.mkldnn
    available = torch._C._has_mkldnn and hasattr(mkldnn, "_linear_pointwise")
    return {
        torch.float32: available,
        torch.bfloat16: available and bool(mkldnn._is_mkldnn_bf16_supported()),
    }


_ONEDNN = _usable()
