"""Attention of prompts without earlier context in one call of torch's flash attention on a GPU.

No padding, no mask, KV heads not repeated.

    rows    | seq 0: 3 new | seq 1: 2 new |          ends  0 3 5

Shapes: T new tokens, H query heads, G KV heads, d head dim, P pool slots, B sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.device import upload

Keys = slice | Tensor  # consecutive pool slots (a view) or a list (a gather)


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch: rows first .. first+count-1 are positions start .. start+count-1.

    slots_S: pool slots of positions 0 .. start+count-1, a slice if they are consecutive; nothing on
    a device, where the batch has block tables.
    """

    first: int
    count: int
    start: int
    slots_S: Keys = dataclasses.field(default_factory=lambda: slice(0, 0))

    @property
    def context(self) -> int:
        return self.start + self.count

    def chunks(self, size: int) -> Iterator[SequenceRows]:
        """Yield the rows of each `size` positions, as a sequence of its own."""
        for start in range(self.start - self.start % size, self.context, size):
            first, last = max(self.start, start), min(self.context, start + size)
            row, keys = self.first + first - self.start, self.slots_S
            if isinstance(keys, slice):
                slots: Keys = slice(keys.start + start, keys.start + last)
            else:
                slots = keys[start:last]
            yield SequenceRows(row, last - first, first - start, slots)


def take(pool_PGd: Tensor, keys: Keys) -> Tensor:
    """Return the pool's entries at `keys`, in order."""
    return pool_PGd[keys] if isinstance(keys, slice) else pool_PGd.index_select(0, keys)


_DTYPES = (torch.bfloat16, torch.float16)
_STEP, _LARGEST = 8, 256  # head dims of the kernel


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPart:
    """ends int32 [B + 1]: bounds of each sequence's rows.

    window W: position p sees p-W+1 .. p.
    """

    ends: Tensor
    longest: int
    window: int | None


def supports_packed(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Return whether torch has the kernel."""
    fits = head_dim % _STEP == 0 and head_dim <= _LARGEST and dtype in _DTYPES
    return device.type == "cuda" and fits and torch.backends.cuda.is_flash_attention_available()


def packed_part(
    sequences: Sequence[SequenceRows], window: int | None, device: torch.device
) -> PackedPart:
    """sequences: all of a batch, in the order of their rows, without earlier context."""
    counts = [seq.count for seq in sequences if seq.count]
    ends = np.array([0, *itertools.accumulate(counts)], np.int32)
    return PackedPart(upload([ends], device)[0], max(counts), window)


def attend_packed(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, part: PackedPart, scale: float
) -> Tensor:
    """Return [T, H, d]."""
    out_THd: Tensor = torch.ops.aten._flash_attention_forward(
        q_THd,
        k_TGd,
        v_TGd,
        part.ends,
        part.ends,
        part.longest,
        part.longest,
        0.0,  # dropout
        True,  # causal, the last row at the last key
        return_debug_mask=False,
        scale=scale,
        window_size_left=None if part.window is None else part.window - 1,
        window_size_right=None if part.window is None else 0,
    )[0]
    return out_THd
