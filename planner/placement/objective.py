"""What a placement costs a layer: the time of its busiest rank, or of its link.

    J = max(pair * pairs, copy * copies) + HIDDEN * min(pair * pairs, copy * copies)
        + OVERLOAD * copy * copies * max(0, load - load_limit)

pairs: of the busiest rank; copies: ranks that a token is sent to; both a token. While one is the
longer, the other is hidden behind it, all but what fills and drains the pipeline. `load_limit`
holds for texts that the sample is not of: a rank that is late there is late for the whole group.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.arrays import Floats

HIDDEN = 0.1  # what is hidden still counts by so much
OVERLOAD = 2.0  # a load of 0.01 over the limit costs as much as 2 % more copies
LOAD_LIMIT = 1.1


class PlacementCosts(NamedTuple):
    """pair: time of one (token, expert) pair at an expert rank. copy: of one token's copy, over all
    links together. Of any one unit. move: what an expert that moves has to save of a layer's time,
    as a part of it (0..1), where there is a placement to start from."""

    pair: float
    copy: float
    load_limit: float = LOAD_LIMIT
    move: float = 0.001


def usual_costs(top_k: int, ranks: int) -> PlacementCosts:
    """Where nothing is known: ranks that are equally busy compute for as long as the link takes
    for one copy of each token."""
    return PlacementCosts(pair=ranks / top_k, copy=1.0)


class Objective(NamedTuple):
    """Costs, for a sample of `tokens` with `pairs`, over so many ranks. Copies and pairs here are
    those of the whole sample; prices are of a token."""

    costs: PlacementCosts
    tokens: float
    pairs: float
    ranks: int

    def price(self, copies: Floats | float, busiest: Floats | float) -> Floats:
        """Of each of them: J. busiest: pairs of the busiest rank."""
        link = np.asarray(copies) * (self.costs.copy / self.tokens)
        compute = np.asarray(busiest) * (self.costs.pair / self.tokens)
        price = np.maximum(link, compute) + HIDDEN * np.minimum(link, compute)
        if math.isfinite(self.costs.load_limit):
            load = np.asarray(busiest) * (self.ranks / self.pairs)
            price = price + OVERLOAD * link * np.maximum(0.0, load - self.costs.load_limit)
        return np.asarray(price)
