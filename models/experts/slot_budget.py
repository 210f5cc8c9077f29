"""How many experts a configuration keeps."""

from __future__ import annotations

from contracts.config import ExpertsConfig
from contracts.errors import ConfigError
from models.spec.model import ModelSpec


def slots_for(config: ExpertsConfig, expert_bytes: int, model: ModelSpec) -> int:
    """Experts that are kept, at most all; the configuration gives one of slots and bytes. Raises
    ConfigError where a token could not be computed with so few."""
    all_experts = len(model.moe_layers) * model.num_experts
    given, name = config.slots, f"experts.slots={config.slots}"
    if config.bytes is not None:
        given, name = config.bytes // expert_bytes, f"experts.bytes={config.bytes}"
    assert given is not None
    if given < model.top_k:
        raise ConfigError(
            f"{name}: room for {given} experts, but a token is computed with {model.top_k} of a "
            f"layer: give at least experts.slots={model.top_k}, or experts.bytes="
            f"{model.top_k * expert_bytes}"
        )
    return min(given, all_experts)
