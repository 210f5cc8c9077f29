"""Stage models of a group of another size, from those that this one has measured."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from contracts.hardware import LinkCost
from planner.costs.cost_model import Deployment, Direction, link_model
from planner.costs.model_shape import ModelShape
from planner.costs.routing_shape import uniform_spread
from planner.costs.stages import Linear, StageModels

_UNIT = LinkCost(backend="", direction="both", alpha_ms=0.0, ms_per_byte=1.0)


class Factors(NamedTuple):
    """Of a group of another size, over this one's: of starting a call of experts, of a token in it,
    and of a token on either way of a link."""

    call: float
    token: float
    a2e: float
    e2a: float


def factors(shape: ModelShape, now: Deployment, then: Deployment) -> Factors:
    """An expert rank's call costs as many pairs as it has experts, and so does starting it: on the
    processors that we know, that is the reading of weights. Links carry the busiest rank's bytes,
    as in `link_model`; routing is taken to be as even as now."""
    before, after = (uniform_spread(shape, each.expert_ranks) for each in (now, then))

    def link(direction: Direction) -> float:
        was, becomes = (link_model(_UNIT, shape, each, direction).beta_ms for each in (now, then))
        return becomes / was

    return Factors(
        after.slots / before.slots,
        after.busiest.pairs / before.busiest.pairs,
        link("a2e"),
        link("e2a"),
    )


def resized(
    stages: StageModels, shape: ModelShape, now: Deployment, then: Deployment
) -> StageModels:
    """The stages of one layer under `then`. Attention is a rank's own, and stays."""
    by = factors(shape, now, then)
    return msgspec.structs.replace(
        stages,
        expert=Linear(stages.expert.alpha_ms * by.call, stages.expert.beta_ms * by.token),
        a2e=Linear(stages.a2e.alpha_ms, stages.a2e.beta_ms * by.a2e),
        e2a=Linear(stages.e2a.alpha_ms, stages.e2a.beta_ms * by.e2a),
    )
