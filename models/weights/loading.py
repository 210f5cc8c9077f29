"""Copying of checkpoint tensors into a rank's memory, with progress.

A rank's peak memory is its own weights plus the mapped pages of one layer, which are released after
each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

import torch
from torch import Tensor

from contracts.clock import Clock, monotonic_s
from kernels.device import runs_on_device
from kernels.linear import PackedLinear, has_panels
from models.weights.layout import WeightSpec

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes to load) after each layer."""


class TensorSource(Protocol):
    """Source of a model's tensors, such as a checkpoint."""

    def load(self, weight_spec: WeightSpec) -> Tensor: ...

    def release(self) -> None:
        """Release memory after all loaded tensors have been copied."""


class Loader:
    """Copies tensors of one source to `dtype` and `device`, and counts their bytes."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        total_bytes: int,
        *,
        storage_format: bool | None = False,
    ) -> None:
        """Set up a loader. storage_format: keep experts as stored; None: on CPUs with panels."""
        on_device = storage_format is True and runs_on_device(device)
        self.keeps_stored = (storage_format is not False and has_panels(dtype, device)) or on_device
        self._source = source
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._total_bytes = total_bytes
        self._loaded_bytes = 0

    def load(self, *parts: WeightSpec) -> Tensor:
        """Return the parts concatenated in dim 0 as one new tensor."""
        num_rows = sum(part.shape[0] for part in parts)
        whole = self.empty(num_rows, *parts[0].shape[1:], float32=parts[0].float32)
        first = 0
        for part in parts:
            rows = whole[first : first + part.shape[0]]
            self.copy(self._source.load(part), rows)
            if part.plus_one:
                rows.add_(1)
            first += part.shape[0]
        return whole

    def linear(self, *parts: WeightSpec, bias: Sequence[WeightSpec] = ()) -> PackedLinear:
        """Return the product with the concatenated parts and biases."""
        return PackedLinear(self.load(*parts), self.load(*bias) if bias else None)

    def copy(self, stored: Tensor, out: Tensor) -> None:
        self._fill(stored, out)
        self.count(out.nbytes)

    def keep(self, stored: Tensor) -> Tensor:
        """Return a copy on the device in the dtype that it is stored in, which is not counted."""
        out = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        self._fill(stored, out)
        return out

    def _fill(self, stored: Tensor, out: Tensor) -> None:
        out.copy_(stored)

    def count(self, num_bytes: int) -> None:
        """Record bytes of `dtype` that were loaded."""
        self._loaded_bytes += num_bytes

    def empty(self, *shape: int, float32: bool = False) -> Tensor:
        dtype = torch.float32 if float32 else self.dtype
        return torch.empty(shape, dtype=dtype, device=self.device)

    def finish_layer(self) -> None:
        self._source.release()
        if self._progress is not None:
            self._progress(self._loaded_bytes, self._total_bytes)


def progress_line(
    label: str, stream: TextIO, *, clock: Clock = monotonic_s, every_s: float = 0.5
) -> Progress:
    """Return a Progress that rewrites one line of `stream`, at most every `every_s` seconds.

    A stream that is no terminal gets whole lines, ten times less often.
    """
    is_terminal = stream.isatty()
    every_s = every_s if is_terminal else 10 * every_s
    last_s = clock() - every_s

    def show(loaded_bytes: int, whole_bytes: int) -> None:
        nonlocal last_s
        done = loaded_bytes >= whole_bytes
        if not done and clock() - last_s < every_s:
            return
        last_s = clock()
        fraction = loaded_bytes / whole_bytes if whole_bytes else 1.0
        unit, size = ("GB", 1e9) if whole_bytes >= 1e9 else ("MB", 1e6)
        loaded, whole = loaded_bytes / size, whole_bytes / size
        line = f"{label}: {loaded:.1f} of {whole:.1f} {unit} loaded ({fraction:.0%})"
        stream.write(f"\r{line}" if is_terminal else line)
        stream.write("\n" if done or not is_terminal else "")
        stream.flush()

    return show
