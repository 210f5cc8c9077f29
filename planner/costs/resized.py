"""Stage models of a group of another size, from those that this one has measured."""

from __future__ import annotations

import msgspec

from contracts.hardware import LinkCost
from planner.costs.cost_model import Deployment, Direction, link_model
from planner.costs.model_shape import ModelShape
from planner.costs.routing_shape import uniform_spread
from planner.costs.stages import Linear, StageModels

_UNIT = LinkCost(backend="", direction="both", alpha_ms=0.0, ms_per_byte=1.0)


def resized(
    stages: StageModels, shape: ModelShape, now: Deployment, then: Deployment
) -> StageModels:
    """The stages of one layer under `then`. Attention is a rank's own, and stays. An expert rank's
    call costs as many pairs as it has experts, and so does starting it: on the processors that we
    know, that is the reading of weights. Links carry the busiest rank's bytes, as in `link_model`;
    routing is taken to be as even as now."""
    before, after = (uniform_spread(shape, each.expert_ranks) for each in (now, then))
    slots, pairs = after.slots / before.slots, after.busiest.pairs / before.busiest.pairs
    expert = Linear(stages.expert.alpha_ms * slots, stages.expert.beta_ms * pairs)

    def link(stage: Linear, direction: Direction) -> Linear:
        was, becomes = (link_model(_UNIT, shape, each, direction).beta_ms for each in (now, then))
        return Linear(stage.alpha_ms, stage.beta_ms * becomes / was)

    return msgspec.structs.replace(
        stages, expert=expert, a2e=link(stages.a2e, "a2e"), e2a=link(stages.e2a, "e2a")
    )
