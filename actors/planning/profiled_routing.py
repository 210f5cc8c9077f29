"""Counts of routing for the planner, which may not import models/."""

from __future__ import annotations

from models.foresight.routing_counts import RoutingCounts
from planner.placement.routing import LayerRouting, TokenCounts


def layer_routing(counts: RoutingCounts, layer: int) -> LayerRouting:
    """What is known of that layer."""
    known = counts.layer(layer)
    return LayerRouting(known.num_experts, known.sets_PK, known.ids_P, TokenCounts(*known.counts))
