"""How the tokens of a layer spread over the ranks that hold its experts, in numbers: what links and
expert ranks have to do.

    rows     the part of the tokens that have an expert on a rank: so many travel there, once each
    pairs    its (token, expert) pairs, in those of a mean expert: E / R where all ranks are alike
    copies   R * rows of the mean rank: ranks that a token is sent to
    load     pairs of the busiest rank over the mean rank's

Letters: E experts, R ranks. docs/notation.md, "Routing of a deployment".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from planner.costs.model_shape import ModelShape, hit_fraction


class RankShare(NamedTuple):
    rows: float
    pairs: float


class Spread(NamedTuple):
    """slots: of the fullest rank, spare ones too. at_home: where each rank attends and holds
    experts, how many times 1 / R of the copies stay on the rank that the token lives on; 1: tokens
    live anywhere, and no expert is there twice."""

    ranks: int
    slots: int
    mean: RankShare
    busiest: RankShare
    at_home: float = 1.0

    @property
    def copies(self) -> float:
        return self.ranks * self.mean.rows

    @property
    def load(self) -> float:
        return self.busiest.pairs / self.mean.pairs


class RoutingShape(NamedTuple):
    """layers: of each layer with experts, or one that stands for all of them."""

    layers: tuple[Spread, ...]

    @property
    def slots(self) -> int:
        return max(spread.slots for spread in self.layers)

    @property
    def mean(self) -> Spread:
        """Of a layer, the mean; its busiest rank is the mean of every layer's own."""
        first = self.layers[0]
        if all(spread == first for spread in self.layers):
            return first
        return Spread(
            first.ranks,
            self.slots,
            _mean_share([spread.mean for spread in self.layers]),
            _mean_share([spread.busiest for spread in self.layers]),
            statistics.fmean(spread.at_home for spread in self.layers),
        )

    @property
    def is_even(self) -> bool:
        """Whether every layer is as the mean."""
        return len(set(self.layers)) == 1


RoutingByRanks = Callable[[int], RoutingShape]
"""By the number of ranks that experts are divided among."""


def uniform_spread(shape: ModelShape, ranks: int) -> Spread:
    """Of routing that chooses every set of experts as often, experts in order, each once. All ranks
    are taken to be as full as the fullest."""
    experts = shape.experts_per_rank(ranks)
    share = RankShare(hit_fraction(shape, experts), float(experts))
    return Spread(ranks, experts, share, share)


def uniform(shape: ModelShape, ranks: int) -> RoutingShape:
    return RoutingShape((uniform_spread(shape, ranks),))


def _mean_share(shares: Sequence[RankShare]) -> RankShare:
    return RankShare(*(statistics.fmean(values) for values in zip(*shares, strict=True)))
