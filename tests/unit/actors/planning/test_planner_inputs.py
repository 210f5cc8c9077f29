"""Routing counts as planner inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from actors.planning.planner_inputs import layer_routing
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from planner.placement.routing import measure
from planner.placement.slots import LayerSlots

FOLDER = Path(__file__).resolve().parents[4] / "models" / "bundled"


def test_planner_uses_counted_routing() -> None:
    spec = read_spec(FOLDER)
    counts = RoutingCounts.read(FOLDER / "routing.safetensors", FOLDER, spec)
    for layer in spec.moe_layers:
        routing = layer_routing(counts, layer)
        assert routing.num_experts == spec.num_experts
        assert len(routing.sets_PK) == len(routing.ids_P) == 4096
        assert routing.counts.times_N.min() > 0
        sampled, counted = routing.load() / 4096, counts.layers[layer].load / counts.counted
        assert np.abs(sampled - counted).max() < 0.05
        contiguous = LayerSlots(range(spec.num_experts), ((0, 8), (8, 16)))
        assert 1.0 < measure(routing, contiguous).copies < 2.0
