"""A model's shape as plain numbers for the planner, which does not import models/."""

import msgspec
import numpy as np

from models.prediction.routing_counts import RoutingCounts
from models.spec.model import ModelSpec, kv_elements
from models.weights import layout
from planner.costs.model_shape import LatentShape, ModelShape
from planner.placement.routing import LayerRouting, TokenCounts


def shape_of(spec: ModelSpec, element_bytes: int) -> ModelShape:
    """Return the shape of `spec`. element_bytes: of weights and activations."""
    first = spec.num_layers - 1 if 0 in spec.recurrent_layers else 0
    matrices = [weight_spec for weight_spec in layout.mixer_tensors(spec, first).values()
                if len(weight_spec.shape) == 2]  # fmt: skip
    dense_layers = spec.num_layers - len(spec.moe_layers)
    latent, projection_elements = None, layout.attention_parameters(spec)
    if spec.latent is not None:
        latent = msgspec.convert(spec.latent, LatentShape, from_attributes=True)
        per_head = spec.latent.kv_rank * (spec.latent.nope_dim + spec.latent.value_dim)
        attended = spec.num_layers - len(spec.recurrent_layers)
        projection_elements -= spec.num_heads * per_head * attended // spec.num_layers
    # Work on states does not grow with the context: a window of one token.
    states = spec.recurrent_layers
    windows = [
        1 if layer in states else window for layer, window in enumerate(spec.sliding_windows)
    ]
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        projections=len(matrices),
        projection_elements=projection_elements,
        kv_entry_elements=kv_elements(spec) // spec.num_layers,
        windows=tuple(windows[layer] for layer in spec.moe_layers),
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        expert_elements=layout.expert_elements(spec),
        num_shared_experts=spec.num_shared_experts,
        shared_elements=3 * spec.hidden_size * spec.shared_ffn_size,
        vocab_size=spec.vocab_size,
        element_bytes=element_bytes,
        attention_rank_bytes=layout.total_bytes(layout.attention_half_tensors(spec), element_bytes),
        dense_elements=dense_layers * 3 * spec.hidden_size * spec.dense_ffn_size,
        latent=latent,
    )


def layer_routing(counts: RoutingCounts, layer: int) -> LayerRouting:
    """Return the routing counts of one layer."""
    E, pairs, paths = counts.num_experts, counts.layers[layer].pairs, counts.paths
    ids_N, experts_N = np.divmod(pairs.keys, E)
    return LayerRouting(
        E,
        paths.paths_PLK[:, list(counts.layers).index(layer)].astype(np.int64),
        paths.ids_P2[:, 0].astype(np.int64),
        TokenCounts(ids_N, experts_N, pairs.times),
    )
