"""Share of a prompt's experts on each worker, predicted from its token ids.

Speculative MoE, Section 3.3, for whole requests: with experts divided among workers, pairs whose
expert is on the request's worker need no transfer.

Shapes: V token ids, W workers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.arrays import Bools, Floats
from planner.placement.routing import TokenCounts, shares

MAX_TOKENS = 256  # of a prompt that are looked up, evenly spaced
_PRIOR_TOKENS = 1.0  # of mean routing, added to the counts of each id


class LocalShares:
    """Table of the mean share over layers, by token id. Ids without counts have the mean row."""

    def __init__(self, layers: Sequence[tuple[TokenCounts, Bools]], top_k: int) -> None:
        """layers: for each, counted pairs and the experts of each worker [E, W]."""
        ids = max(
            (int(counts.ids_N[-1]) + 1 for counts, _ in layers if len(counts.ids_N)), default=0
        )
        pairs_VW1 = np.zeros((ids, layers[0][1].shape[1] + 1))
        for counts, holds_EW in layers:
            found_VW1 = shares(*counts, holds_EW)
            pairs_VW1[: len(found_VW1)] += found_VW1
        all_W1 = pairs_VW1.sum(0)
        mean_W: Floats = all_W1[:-1] / max(1.0, all_W1[-1])
        prior = _PRIOR_TOKENS * top_k * len(layers)
        table_VW = (pairs_VW1[:, :-1] + prior * mean_W) / (pairs_VW1[:, -1:] + prior)
        self._table_VW = np.concatenate([table_VW, mean_W[None]]).astype(np.float32)

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
