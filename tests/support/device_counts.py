"""Counts of what a device would do, for code that runs on meta tensors.

A launch is an operation with a result on the device that is neither a view nor an allocation. A
copy crosses devices. A host read makes the host wait for the device: it is answered with made-up
numbers, so that code which reads can be counted too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_ALLOCATIONS = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::lift_fresh",
}  # fmt: skip
# Their results have sizes that depend on values, which CUDA's kernels read on the host.
_READS = {
    "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::repeat_interleave",
    "aten::unique_dim", "aten::_unique2",
}  # fmt: skip


class LaunchedKernels:
    """Stands for kernels/triton_kernels.py: each call is a launch and computes nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def gated(self, h_NF2: Tensor, count: Tensor | None = None) -> Tensor:
        self.launches += 1
        return h_NF2[:, : h_NF2.shape[1] // 2]

    def gather_rows(self, x_TD: Tensor, rows_N: Tensor, count: Tensor | None = None) -> Tensor:
        self.launches += 1
        return x_TD.new_empty((len(rows_N), x_TD.shape[1]))

    def pack_rows(self, *_: Any) -> None:
        self.launches += 1

    add_rows = weighted_sums = pack_rows


class DeviceCounts(TorchDispatchMode):
    """launches, copies, host_reads: counted while the mode is entered.

    values: what integers that are read on the host are taken modulo.
    """

    def __init__(self, values: int = 2) -> None:
        super().__init__()
        self.launches = self.copies = self.host_reads = 0
        self._values = values

    @contextmanager
    def beside(self, kernels: LaunchedKernels | None) -> Iterator[None]:
        """Count launches of these kernels as well."""
        before = 0 if kernels is None else kernels.launches
        with self:
            yield
        self.launches += 0 if kernels is None else kernels.launches - before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        is_copy = name in ("aten::_to_copy", "aten::copy_")
        if any(each.is_meta for each in given):
            target = torch.device(kwargs.get("device") or given[0].device)
            if name == "aten::_local_scalar_dense" or name in _READS or target.type == "cpu":
                self.host_reads += 1
                return (
                    1 if name == "aten::_local_scalar_dense" else self._made(func, *args, **kwargs)
                )
        result = func(*args, **kwargs)
        made = [each for each in tree_iter(result) if isinstance(each, Tensor) and each.is_meta]
        if made and not func.is_view:
            crosses = is_copy and not all(each.is_meta for each in given)
            self.copies += crosses
            self.launches += not crosses and name not in _ALLOCATIONS
        return result

    def _made(self, func: Any, first: Tensor, *_: Any, dtype: Any = None, **__: Any) -> Tensor:
        """Return numbers for a copy to the host; for others, a result of the largest size."""
        if func._schema.name not in _READS:
            numbers = torch.arange(first.numel()) % self._values
            return numbers.to(dtype or first.dtype).view(first.shape)
        return torch.empty(first.numel(), dtype=torch.int64, device="meta")
