"""Counts of what a device would do, for code that runs on meta tensors.

A launch is an operation with a result on the device that is neither a view nor an allocation. A
copy crosses devices. A host read makes the host wait for the device: it is answered with made-up
numbers, so that code which reads can be counted too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
_ALLOCATIONS = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::_reshape_alias", "aten::lift_fresh", "aten::resize_",
}  # fmt: skip
# Their results have sizes that depend on values, or CUDA's kernel reads them on the host.
_READS = {
    "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::repeat_interleave",
    "aten::unique_dim", "aten::_unique2",
}  # fmt: skip


class DeviceCounts(TorchDispatchMode):
    """launches, copies, host_reads: counted while the mode is entered.

    largest_bytes: of one new tensor. values: what integers read on the host are taken modulo.
    """

    def __init__(self, values: int = 2) -> None:
        super().__init__()
        self.launches = self.copies = self.host_reads = self.largest_bytes = 0
        self.log: list[str] = []
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each.is_meta for each in given]
        if any(on_device):
            if name == "aten::_local_scalar_dense":
                self._read(name)
                return 1
            if name in _READS:
                self._read(name)
                return self._answer(name, *given)
            target = torch.device(kwargs.get("device") or "meta")
            if name == "aten::_to_copy" and target.type == "cpu":
                self._read(name)
                return self._made(given[0].shape, kwargs.get("dtype") or given[0].dtype)
            if name == "aten::copy_" and not given[0].is_meta:
                self._read(name)
                return given[0].copy_(self._made(given[1].shape, given[0].dtype))
        result = func(*args, **kwargs)
        made = [each for each in tree_iter(result) if isinstance(each, Tensor) and each.is_meta]
        if not made or func.is_view:
            return result
        crossing = name in ("aten::_to_copy", "aten::copy_") and not all(on_device)
        if crossing:
            self.copies += 1
            self.log.append(f"copy {name}")
        elif name not in _ALLOCATIONS:
            self.launches += 1
            self.log.append(name)
        if not any(one is other for one in made for other in given):
            self.largest_bytes = max(self.largest_bytes, *(each.nbytes for each in made))
        return result

    def _read(self, name: str) -> None:
        self.host_reads += 1
        self.log.append(f"read {name}")

    def _made(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        numbers = torch.arange(torch.Size(shape).numel())
        return (numbers % self._values).to(dtype).view(tuple(shape))

    def _answer(self, name: str, first: Tensor, *others: Tensor) -> Tensor:
        """Return a tensor of the largest size that the result may have."""
        rows = int(1e3) if name == "aten::bincount" else first.numel()
        return torch.empty(rows, dtype=torch.int64, device="meta")
