"""Counts of what a device would do, for code that runs on meta tensors.

A launch is an operation with a result on the device that is neither a view nor an allocation. A
copy crosses devices. A host read makes the host wait for the device: a copy to the host is answered
with made-up numbers and counted; operations whose results have data-dependent sizes raise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kernels.linear import ExpertLinears

_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::lift_fresh")


class LaunchedKernels:
    """Stands for modules of triton's kernels: each call is a launch and computes nothing."""

    launches = 0

    def gated(self, h_NF2: Tensor, count: Tensor | None = None) -> Tensor:
        self.launches += 1
        return h_NF2[:, : h_NF2.shape[1] // 2]

    def gather_rows(self, x_TD: Tensor, rows_N: Tensor, count: Tensor | None = None) -> Tensor:
        self.launches += 1
        return x_TD.new_empty((len(rows_N), x_TD.shape[1]))

    def grouped_products(self, x_NK: Tensor, linear_e: ExpertLinears, ends_e: Tensor) -> Tensor:
        self.launches += 1
        assert linear_e.table is not None
        return x_NK.new_empty((len(x_NK), linear_e.out_features))

    def pack_rows(self, *_: Any) -> None:
        self.launches += 1

    add_rows = weighted_sums = pack_rows

    def attend(self, *_: Any) -> None:
        self.launches += 1

    combine = attend


class DeviceCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """launches, copies, host_reads, bytes of the largest new tensor: while the mode is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.copies = self.host_reads = self.largest = 0

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
        if name == "aten::_to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.host_reads += given[0].is_meta
            if given[0].is_meta:
                return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        result = func(*args, **kwargs)
        made = [each for each in tree_iter(result) if isinstance(each, Tensor) and each.is_meta]
        if made and not func.is_view:
            if not func._schema.is_mutable:
                self.largest = max(self.largest, *(each.nbytes for each in made))
            crosses = name in ("aten::_to_copy", "aten::copy_") and any(t.is_cpu for t in given)
            self.copies += crosses
            self.launches += not crosses and name not in _ALLOCATIONS
        return result
