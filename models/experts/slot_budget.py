"""How many experts a configuration keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.config import ExpertsConfig
from contracts.errors import ConfigError
from models.spec.model import ModelSpec


def slot_count(
    config: ExpertsConfig,
    expert_bytes: int,
    model: ModelSpec,
    own: Mapping[int, Sequence[int]] | None = None,
) -> int:
    """Experts that are kept, at most all; the configuration gives one of slots and bytes. own: by
    layer, the worker's experts; None: all. Raises ConfigError where a token could not be computed
    with so few."""
    layers = len(model.moe_layers)
    held = [model.num_experts] * layers if own is None else list(map(len, own.values()))
    given, name = config.slots, f"experts.slots={config.slots}"
    if config.bytes is not None:
        given, name = config.bytes // expert_bytes, f"experts.bytes={config.bytes}"
    assert given is not None
    needed = min(model.top_k, max(held))
    if given < needed:
        raise ConfigError(
            f"{name}: room for {given} experts, but a token is computed with {needed} of a "
            f"layer: give at least experts.slots={needed}, or experts.bytes={needed * expert_bytes}"
        )
    return min(given, sum(held))
