"""Products with weights, x @ weight.T + bias.

On the CPU weights of float32 and bfloat16 are kept in panels (kernels/panels.py), or in oneDNN's
layout where matrix units make it faster. torch's own `linear` is slower:
it uses MKL, which uses half the vector width on other vendors' processors, and reorders bfloat16
weights at every call. With either layout a row's bits do not depend on the rows beside it.

oneDNN compiles a product for each number of rows (0.4 ms, 0.4 MB) and keeps the latest 1,024 (ranks
set fewer), so numbers between 16 and 512 are rounded up here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels import (
    attention_ops,
    delta_rule,
    direct_calls,
    layer_ops,
    panels,
    row_ops,
    thread_pool,
)
from kernels.compiled import LANES, code_folder, compile_on_disk, processor_has
from kernels.stored import Storage, StoredWeight
from kernels.stored_experts import ExpertTable, StoredLinear, expert_table
from kernels.thread_pool import shared_pool

Product = Callable[[Tensor], Tensor]
"""x [T, K] → x @ weight.T + bias, [T, N]."""

# (rows up to, rounded to): about a hundred sizes for an expert's two products, which ranks keep
# compiled; finer steps compile more than they save.
_STEPS = ((64, 4), (128, 8), (512, 32), (1024, 64), (4096, 128))
_LARGEST_PADDED = 512
_PACK_FOR_ROWS = 16  # a hint that does not change the layout


@functools.cache
def compile_kernels() -> None:
    """Compile the CPU's kernels, or read them from disk: once, before any request needs them."""
    compile_on_disk(_call_kernels)


def _call_kernels() -> None:
    thread_pool.compile_parts()
    panels.multiply(*[0] * 9)
    panels.multiply_heads(*[0] * 14)
    panels.run_mlp(*[0] * 10)
    panels.run_experts(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)
    panels.add_weighted(*[0] * 7)
    row_ops.group_pairs(*[0] * 9)
    row_ops.rms_norm(True, 0, 0, 0, 0, 0, 0, 0.0, False)
    row_ops.norm_and_rope(True, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
    row_ops.layer_norm(True, 0, 0, 0, 0, 0, 0, 0.0)
    row_ops.write_rows(*[0] * 7)
    delta_rule.advance(*[0] * 7)
    attention_ops.select_tokens(0, True, *[0] * 9)
    row_ops.sigmoid(0, 0)
    nothing = np.zeros(layer_ops.LAYER_FIELDS, np.int64)
    row_ops.choose_experts(True, nothing.ctypes.data, 0, 0, 0, False, 0, 0)
    attention_ops.attend(0, True, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0.0, 0)
    layer_ops.attend_layer(0, nothing.ctypes.data, nothing.ctypes.data)
    layer_ops.add_experts(0, nothing.ctypes.data)
    layer_ops.sum_experts(0, nothing.ctypes.data)
    layer_ops.decode_layers(*[0] * 8)
    layer_ops.finish_rows(0, nothing.ctypes.data, *[0] * 5)
    tables = np.zeros(direct_calls.CALLER_FIELDS, np.int64)
    tables[6] = nothing.ctypes.data
    direct_calls.decode_remote_layers(0, tables.ctypes.data, 0, 0, 0, False, 0, 0)
    direct_calls.serve_calls(*[0] * 11)


class PackedLinear:
    """A product whose weight [N, K] is reordered (and not kept as given), with bias [N] or None.

    Where the weight `is_packed`, its `memory` may be overwritten between calls, with another
    weight's of equal shape.
    """

    __slots__ = ("_bias", "_product", "_weight", "kind", "shape")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._bias = bias_N
        self._product = _product_of(weight_NK)
        self.shape = tuple(weight_NK.shape)
        self.kind = _kind(weight_NK.dtype, weight_NK.device)  # of panels; None: other layouts
        self._weight = weight_NK
        if self.kind is not None:
            compile_kernels()
            self._weight = panels.pack_panels(weight_NK)
        elif self._product is _onednn:
            self._weight = _reordered(weight_NK)

    @staticmethod
    def of_panels(weight: StoredWeight, dtype: torch.dtype, bias_N: Tensor | None) -> PackedLinear:
        """Return the product with a stored weight, for rows of a dtype that has panels."""
        compile_kernels()
        product = PackedLinear.__new__(PackedLinear)
        product._bias, product._weight = bias_N, weight.panels
        product._product, product.shape = functional.linear, weight.shape
        arithmetic = panels.arithmetic_of(dtype)
        assert arithmetic is not None
        product.kind = panels.kind_of(arithmetic, weight.storage)
        return product

    @property
    def memory(self) -> Tensor:
        """The elements of a packed weight in its layout, padding included: 1-D, no copy."""
        if self.kind is not None:
            return self._weight
        num_bytes = torch.ops.mkldnn._nbytes(self._weight)
        raw = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(self._weight))
        raw.owner = self._weight  # type: ignore[attr-defined]  # whose memory it is
        return torch.frombuffer(raw, dtype=self._weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    @property
    def stored(self) -> StoredLinear | None:
        """The weight as it was given; None: it is reordered."""
        if self.kind is not None or self._product is _onednn:
            return None
        return StoredLinear(Storage.PLAIN, self._weight, None, self._bias)

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the panels and of the bias; 0: no bias."""
        return self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    @property
    def layout(self) -> bytes:
        """Description of a packed weight; weights with equal ones can swap `memory`."""
        if self.kind is not None:
            return f"panels of {LANES}, {self.kind}, {self._weight.dtype}, {self.shape}".encode()
        description: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(self._weight)
        return description.numpy().tobytes()

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return [T, N] in x's dtype, which must be the weight's."""
        if self.kind is not None:
            return self._multiply(x_TK.contiguous(), self.kind)
        if self._product is _onednn:
            return _padded_onednn(x_TK, self._weight, self._bias)
        return self._product(x_TK, self._weight, self._bias)

    def _multiply(self, x_TK: Tensor, kind: int) -> Tensor:
        (N, K), T = self.shape, x_TK.shape[0]
        out_TN = torch.empty((T, N), dtype=x_TK.dtype)
        x, out = x_TK.data_ptr(), out_TN.data_ptr()
        panels.multiply(shared_pool(), kind, x, *self.addresses, out, T, K, N)
        return out_TN


class PlainLinear:
    """A product whose weight [N, K] and bias [N] or None are not moved, and packed at each use.

    Their memory may be overwritten between calls. Bits equal those of `PackedLinear`.
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self._weight, self._bias = weight_NK, bias_N

    def packed(self) -> PackedLinear:
        return PackedLinear(self._weight, self._bias)

    @property
    def stored(self) -> StoredLinear:
        return StoredLinear(Storage.PLAIN, self._weight, None, self._bias)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return [T, N] in x's dtype, which must be the weight's."""
        return self.packed()(x_TK)


def is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a `PackedLinear` keeps its weight in a separate layout with `memory`."""
    reachable = hasattr(torch.ops.mkldnn, "data_ptr")
    if _kind(dtype, device) is not None:
        return True
    return reachable and device.type == "cpu" and _ONEDNN.get(dtype, False)


def has_panels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a `PackedLinear` keeps its weight in panels."""
    return _kind(dtype, device) is not None


def rounded_up(rows: int) -> int:
    """Return a probably compiled number of rows: at least `rows`, at most a quarter more."""
    step = 1 if rows <= 16 else next((step for most, step in _STEPS if rows <= most), 1)
    return rows + -rows % step


def _missing(rows: int) -> int:
    return rounded_up(rows) - rows if rows <= _LARGEST_PADDED else 0


class ExpertLinears(Sequence[Product]):
    """Products of e experts. weight_eNK, bias_eN: of all; weight_eNK is None if reordered."""

    def __init__(
        self, products: Sequence[Product], weight_eNK: Tensor | None, bias_eN: Tensor | None = None
    ) -> None:
        self._products = tuple(products)
        self.weight_eNK, self.bias_eN = weight_eNK, bias_eN
        self._addresses: NDArray[np.int64] | None = None
        self._table: ExpertTable | None = None
        kinds = {getattr(product, "kind", None) for product in self._products}
        self._kind = kinds.pop() if len(kinds) == 1 else None

    @property
    def kind(self) -> int | None:
        """Kind of the products, if they all have panels of one kind."""
        return self._kind

    @property
    def out_features(self) -> int:
        """N of the products, which must be packed."""
        return self._products[0].shape[0]  # type: ignore[attr-defined, no-any-return]

    @property
    def addresses(self) -> NDArray[np.int64]:
        """[e, 2]: `PackedLinear.addresses` of each product, which must have panels."""
        if self._addresses is None:
            each = [product.addresses for product in self._products]  # type: ignore[attr-defined]
            self._addresses = np.array(each, dtype=np.int64)
        return self._addresses

    @property
    def table(self) -> ExpertTable | None:
        """Places of the weights on a device, or None if one kernel cannot read them."""
        if self._table is None:
            self._table = expert_table(self._products)
        return self._table

    def __len__(self) -> int:
        return len(self._products)

    @overload
    def __getitem__(self, expert: int) -> Product: ...
    @overload
    def __getitem__(self, expert: slice) -> Sequence[Product]: ...
    def __getitem__(self, expert: int | slice) -> Product | Sequence[Product]:
        return self._products[expert]


def linears(weight_eNK: Tensor, bias_eN: Tensor | None = None) -> ExpertLinears:
    whole = not is_packed(weight_eNK.dtype, weight_eNK.device)
    products = list(map(PackedLinear, weight_eNK, _rows(weight_eNK, bias_eN)))
    return ExpertLinears(products, weight_eNK if whole else None, bias_eN if whole else None)


def plain_linears(weight_eNK: Tensor, bias_eN: Tensor | None = None) -> ExpertLinears:
    """Return products of weights that are not moved, so that their memory may be overwritten."""
    products = list(map(PlainLinear, weight_eNK, _rows(weight_eNK, bias_eN)))
    return ExpertLinears(products, weight_eNK, bias_eN)


def _rows(weight_eNK: Tensor, bias_eN: Tensor | None) -> Sequence[Tensor | None]:
    return [None] * len(weight_eNK) if bias_eN is None else list(bias_eN)


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return [T, N]: the product with a contiguous weight that is used once or changes."""
    return _product_of(weight_NK)(x_TK, weight_NK, None)


def _onednn(x_TK: Tensor, weight: Tensor, bias_N: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TK, weight, bias_N, "none", [], "")
    return out


def _padded_onednn(x_TK: Tensor, weight: Tensor, bias_N: Tensor | None) -> Tensor:
    rows = x_TK.shape[0]
    spare = _missing(rows)
    padded = functional.pad(x_TK, (0, 0, 0, spare)) if spare else x_TK
    return _onednn(padded, weight, bias_N)[:rows]


def _reordered(weight_NK: Tensor) -> Tensor:
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, _PACK_FOR_ROWS)
    return reordered


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


def _kind(dtype: torch.dtype, device: torch.device) -> int | None:
    """Return the kind of products with panels of numbers of a dtype, or None."""
    if device.type != "cpu" or uses_matrix_units(dtype):
        return None
    arithmetic = panels.arithmetic_of(dtype)
    return None if arithmetic is None else panels.kind_of(arithmetic)


HAS_MATRIX_UNITS = processor_has("amx-bf16") and _ONEDNN[torch.bfloat16]


# --- choice between oneDNN and panels
#
# Measured once for each processor and version of the code: the first process that needs it keeps
# the answer beside the compiled code, and all others of the machine read it, so that ranks agree on
# bits.

_MEASURED_ROWS = (1, 2, 3, 4, 7, 8, 16, 33, 64)
_MEASURED_SHAPE = (1024, 1024)  # of the weight
_REPEATS = 15
CHOICE_FILE = "products-bfloat16"


@functools.cache
def uses_matrix_units(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies weights of a dtype, measured with matrix units only."""
    if dtype is not torch.bfloat16 or not HAS_MATRIX_UNITS:
        return False
    return decide(code_folder(), _measure)


def decided(folder: Path | None) -> bool | None:
    """Return the answer kept in a folder: whether oneDNN multiplies; None: not measured."""
    with contextlib.suppress(OSError):
        if folder is not None:
            return (folder / CHOICE_FILE).read_text(encoding="utf-8") == "onednn"
    return None


def decide(folder: Path | None, measure: Callable[[], bool]) -> bool:
    """Return the answer kept in a folder, or measure and keep it. Without a folder: False."""
    found = decided(folder)
    if folder is None or found is not None:
        return bool(found)
    answer = "onednn" if measure() else "panels"
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8") as written:
            written.write(answer)
            written.flush()
            with contextlib.suppress(FileExistsError):  # another process was first: its answer
                os.link(written.name, folder / CHOICE_FILE)
    except OSError:
        return False
    return bool(decided(folder))


def _measure() -> bool:
    (N, K), dtype = _MEASURED_SHAPE, torch.bfloat16
    generator, rows = torch.Generator().manual_seed(0), max(_MEASURED_ROWS)
    weight_NK, x_TK = (torch.randn(n, K, generator=generator).to(dtype) for n in (N, rows))
    stored = StoredWeight(panels.pack_panels(weight_NK), (N, K), Storage.PLAIN)
    onednn = functools.partial(_padded_onednn, weight=_reordered(weight_NK), bias_N=None)
    return is_better(onednn, PackedLinear.of_panels(stored, dtype, None), x_TK)


def is_better(onednn: Product, in_panels: Product, x_TK: Tensor) -> bool:
    """Return whether oneDNN's product is faster for every number of rows, with a row's own bits."""
    whole = onednn(x_TK)
    return all(torch.equal(onednn(x_TK[:rows]), whole[:rows]) for rows in _MEASURED_ROWS) and all(
        first < second
        for first, second in zip(times_s(onednn, x_TK), times_s(in_panels, x_TK), strict=True)
    )


def times_s(product: Product, x_TK: Tensor) -> Sequence[float]:
    """Return the shortest time of a product by number of rows."""
    found = []
    for rows in _MEASURED_ROWS:
        x, spent_s = x_TK[:rows], []
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            product(x)
            spent_s.append(time.perf_counter() - start_s)
        found.append(min(spent_s))
    return found
