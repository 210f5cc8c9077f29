"""Share of a prompt's experts on each worker, predicted from its token ids.

Speculative MoE, Section 3.3, for whole requests: with experts divided among workers, pairs whose
expert is on the request's worker need no transfer.

Shapes: V token ids, W workers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.arrays import Bools
from planner.placement.routing import TokenCounts, share_table

MAX_TOKENS = 256  # of a prompt that are looked up, evenly spaced


class LocalShares:
    """Table of the mean share over layers, by token id; ids without counts have the mean."""

    def __init__(self, layers: Sequence[tuple[TokenCounts, Bools]], top_k: int) -> None:
        """layers: for each, counted pairs and the experts of each worker [E, W]."""
        self._table_VW = share_table(layers, top_k).astype(np.float32)

    def of_tokens(self, token_ids: Sequence[int], start: int = 0) -> list[float]:
        """Return the share of the pairs of tokens [start, end) on each worker; zeros for none.

        The time is bounded by MAX_TOKENS."""
        count = len(token_ids) - start
        if count <= 0:
            return [0.0] * self._table_VW.shape[1]
        step = -(-count // MAX_TOKENS) | 1  # odd, against prompts of pairs
        ids_T = np.array(token_ids[start::step], np.int64)
        rows_T = np.minimum(ids_T, len(self._table_VW) - 1)
        means: list[float] = self._table_VW.take(rows_T, axis=0).mean(0).tolist()
        return means
