"""Rows of a sequence in a ragged batch, and pool slots of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Keys = slice | Tensor  # consecutive pool slots (a view) or a list (a gather)


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch: rows first .. first+count-1 are positions start .. start+count-1.

    slots_S: pool slots of positions 0 .. start+count-1, a slice if they are consecutive.
    """

    first: int
    count: int
    start: int
    slots_S: Keys

    @property
    def context(self) -> int:
        return self.start + self.count


def take(pool_PGd: Tensor, keys: Keys) -> Tensor:
    """Return the pool's entries at `keys`, in order."""
    return pool_PGd[keys] if isinstance(keys, slice) else pool_PGd.index_select(0, keys)


def padded_slots(keys_B: Sequence[Keys], width: int) -> Tensor:
    """Return [B, width] int64 on the CPU: each sequence's slots, then zeros."""
    slots_BS = np.zeros((len(keys_B), width), dtype=np.int64)
    for slots_S, keys in zip(slots_BS, keys_B, strict=True):
        if isinstance(keys, slice):
            slots_S[: keys.stop - keys.start] = np.arange(keys.start, keys.stop)
        else:
            slots_S[: len(keys)] = keys.numpy(force=True)
    return torch.from_numpy(slots_BS)
