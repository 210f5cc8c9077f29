"""Cost of a placement for one layer: the time of its busiest rank or of its link.

    J = max(pair * pairs, copy * copies) + HIDDEN * min(pair * pairs, copy * copies)
        + OVERLOAD * copy * copies * max(0, load - load_limit)

pairs: of the busiest rank; copies: ranks that a token is sent to; both per token. The shorter of
the two is hidden except for filling and draining the pipeline. `load_limit` protects texts outside
of the sample, where one late rank delays the whole group.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.arrays import Floats

HIDDEN = 0.1  # weight of the hidden time
OVERLOAD = 2.0  # a load of 0.01 over the limit costs as much as 2 % more copies
LOAD_LIMIT = 1.1


class PlacementCosts(NamedTuple):
    """Costs in any one unit of time.

    pair: one (token, expert) pair at an expert rank. copy: one token's copy, over all links
    together. move: fraction (0..1) of a layer's time that a moved expert has to save."""

    pair: float
    copy: float
    load_limit: float = LOAD_LIMIT
    move: float = 0.001


def usual_costs(top_k: int, ranks: int) -> PlacementCosts:
    """Return costs by which balanced ranks compute for as long as one copy of each token takes."""
    return PlacementCosts(pair=ranks / top_k, copy=1.0)


class Objective(NamedTuple):
    """Costs of a sample of `tokens` tokens with `pairs` pairs on `ranks` ranks."""

    costs: PlacementCosts
    tokens: float
    pairs: float
    ranks: int

    def price(self, copies: Floats | float, busiest: Floats | float) -> Floats:
        """Return J for each; busiest: pairs of the busiest rank."""
        link = np.asarray(copies) * (self.costs.copy / self.tokens)
        compute = np.asarray(busiest) * (self.costs.pair / self.tokens)
        price = np.maximum(link, compute) + HIDDEN * np.minimum(link, compute)
        if math.isfinite(self.costs.load_limit):
            load = np.asarray(busiest) * (self.ranks / self.pairs)
            price = price + OVERLOAD * link * np.maximum(0.0, load - self.costs.load_limit)
        return np.asarray(price)
