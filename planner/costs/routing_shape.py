"""The distribution of a layer's tokens over the ranks that hold its experts.

    rows     fraction of the tokens with an expert on a rank: each is sent there once
    pairs    a rank's (token, expert) pairs, in those of a mean expert: E / R if ranks are equal
    copies   R * rows of the mean rank: ranks that a token is sent to
    load     pairs of the busiest rank over the mean rank's

Letters: E experts, R ranks. docs/notation.md, "Routing of a deployment".
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from planner.costs.model_shape import ModelShape, hit_fraction


class RankShare(NamedTuple):
    rows: float
    pairs: float


class Spread(NamedTuple):
    """Distribution of one layer's tokens over ranks.

    slots: of the fullest rank, with spare ones. at_home: if ranks both attend and hold experts, the
    copies that stay on the token's rank, in 1 / R of all copies; 1 if tokens live anywhere and no
    expert has a replica.
    """

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
    """layers: a spread per layer with experts, or one that stands for all."""

    layers: tuple[Spread, ...]

    @property
    def slots(self) -> int:
        return max(spread.slots for spread in self.layers)

    @property
    def mean(self) -> Spread:
        """Return the mean layer; its busiest rank is the mean of each layer's busiest."""
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
        return len(set(self.layers)) == 1


RoutingByRanks = Callable[[int], RoutingShape]
"""Routing shape by the number of ranks."""


def uniform_spread(shape: ModelShape, ranks: int) -> Spread:
    """Return the spread of uniform routing, each expert once and in order.

    All ranks count as full as the fullest.
    """
    experts = shape.experts_per_rank(ranks)
    share = RankShare(hit_fraction(shape, experts), float(experts))
    return Spread(ranks, experts, share, share)


def uniform(shape: ModelShape, ranks: int) -> RoutingShape:
    return RoutingShape((uniform_spread(shape, ranks),))


def _mean_share(shares: Sequence[RankShare]) -> RankShare:
    return RankShare(*(statistics.fmean(values) for values in zip(*shares, strict=True)))
