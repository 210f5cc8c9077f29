"""Token ids without routing counts, replaced by the nearest id that has them.

Distance is the cosine of embeddings (Speculative MoE, Section 3.3). Shapes: V ids, D model dim,
N ids with counts, U new ids without.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Ids = NDArray[np.int64]
_AT_ONCE: Final = 64  # new ids of a call, each of which costs a product with the embeddings


class NearestIds:
    """The nearest ids found so far. Owned by one thread."""

    def __init__(self, embedding_VD: Tensor, counted_N: _Ids) -> None:
        self._embedding_VD = embedding_VD
        self._found_V = torch.full((len(embedding_VD),), -1)
        self._length_V = embedding_VD.float().norm(dim=1).clamp_min(1e-12)
        counted = torch.from_numpy(counted_N)
        self._found_V[counted] = counted
        self._is_counted_V = self._found_V >= 0

    def replace(self, ids_T: _Ids) -> _Ids:
        """Return ids with counts; of many new ones without, some stay until another call."""
        ids = torch.from_numpy(ids_T)
        new_U = torch.unique(ids[self._found_V[ids] < 0])[:_AT_ONCE]
        if len(new_U) and self._is_counted_V.any():
            products_UV = (self._embedding_VD[new_U] @ self._embedding_VD.T).float()
            cosines_UV = (products_UV / self._length_V).where(self._is_counted_V, -torch.inf)
            self._found_V[new_U] = cosines_UV.argmax(1)
        found_T = self._found_V[ids]
        replaced_T: _Ids = found_T.where(found_T >= 0, ids).numpy()
        return replaced_T
