"""Number of expert slots of a configuration."""

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
    """Return the number of slots, at most one for each expert of the worker.

    own: the worker's experts by layer; None: all. Raises ConfigError if the experts of a token do
    not fit.
    """
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
