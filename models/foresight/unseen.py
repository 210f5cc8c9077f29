"""Token ids that a profile has not seen: the nearest one that it has speaks for them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

_AT_ONCE: Final = 256  # unseen ids; of so many, similarities to all others are in memory


class Nearest:
    """By the cosine of input embeddings (Speculative MoE, Section 3.3); of equals the lowest id."""

    def __init__(self, embedding_VD: Tensor) -> None:
        self._embedding_VD = embedding_VD

    def profiled(self, ids_W: NDArray[Any], profiled_N: NDArray[Any]) -> NDArray[np.int64]:
        """Each id itself where it is profiled, else the nearest that is. profiled_N: ascending."""
        found_W = ids_W.astype(np.int64)
        unseen = np.flatnonzero(~np.isin(found_W, profiled_N))
        if len(unseen) == 0 or len(profiled_N) == 0:
            return found_W
        known_ND = self._directions(profiled_N)
        for start in range(0, len(unseen), _AT_ONCE):
            some = unseen[start : start + _AT_ONCE]
            nearest = (self._directions(found_W[some]) @ known_ND.T).argmax(1)
            found_W[some] = profiled_N[nearest.numpy()]
        return found_W

    def _directions(self, ids: NDArray[Any]) -> Tensor:
        rows = self._embedding_VD[torch.from_numpy(ids.astype(np.int64))]
        return functional.normalize(rows.float(), dim=-1)
