"""Generation in one process per attention rank (`groups.colocated`).

A prefill worker with resident experts has the whole model and generates when there is no attention
rank, so colocation is a matter of settings: workers take the place of attention and expert ranks.
"""

import logging

import msgspec

from actors.planning.planner_inputs import shape_of
from cluster.fleet.hardware import load_hardware
from contracts.config import TandemConfig
from contracts.logs import event
from contracts.machine import available_bytes, whole_cores
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import element_bytes
from planner.costs.cost_model import Deployment, stage_models, tokens_per_expert

log = logging.getLogger("tandem.fleet")

_MEMORY_FRACTION = 0.5  # of the free memory, for weights
_CONTEXT_TOKENS = 512  # of the sequence whose decode is predicted


def colocate(config: TandemConfig, spec: ModelSpec) -> TandemConfig:
    """Return the settings with workers in place of attention and expert ranks, if that pays."""
    groups = config.groups
    if groups.colocated == "never" or groups.attention_ranks == 0:
        return config
    workers = max(groups.prefill_ranks, groups.attention_ranks)
    reason = _hindrance(config, spec, workers)
    event(log, "colocation", chosen=not reason, reason=reason)
    if reason:
        return config
    replaced = groups.ranks * groups.torch_threads
    groups = msgspec.structs.replace(
        groups,
        attention_ranks=0,
        expert_ranks=0,
        prefill_ranks=workers,
        torch_threads=max(groups.torch_threads, min(replaced, whole_cores()) // workers),
    )
    return msgspec.structs.replace(config, groups=groups)


def _hindrance(config: TandemConfig, spec: ModelSpec, workers: int) -> str:
    """Return why generation cannot or should not be colocated, or an empty string."""
    groups = config.groups
    unlike = {
        "groups.device=cuda": groups.device == "cuda",
        f"prefill.experts={config.prefill.experts}": config.prefill.experts != "resident",
        "prefill.disable_kv_cache=true": config.prefill.disable_kv_cache,
        "experts.slots": config.experts.is_bounded,
        "placement.file": config.placement.file is not None,
        "groups.attention_resources": bool(groups.attention_resources),
        "groups.expert_resources": bool(groups.expert_resources),
    }
    for setting, is_set in unlike.items():
        if is_set:
            return f"{setting} is set"
    needed, free = workers * weight_bytes(config, spec), available_bytes()
    if needed > _MEMORY_FRACTION * free:
        return f"weights of {needed:,} bytes exceed half of the {free:,} bytes that are free"
    gain = colocated_gain(config, spec)
    return f"predicted gain {gain:.2f}" if gain is not None and gain <= 1 else ""


def weight_bytes(config: TandemConfig, spec: ModelSpec) -> int:
    """Return the bytes of all weights in one process."""
    element = element_bytes(spec, config.model.dtype)
    experts = len(spec.moe_layers) * spec.num_experts * layout.expert_elements(spec)
    return layout.total_bytes(layout.attention_half_tensors(spec), element) + experts * element


def colocated_gain(config: TandemConfig, spec: ModelSpec) -> float | None:
    """Return the predicted gain for one sequence's decode; None without `planner.hardware`.

    Raises ConfigError for an invalid hardware file.
    """
    if config.planner.hardware is None:
        return None
    one = Deployment(
        attention_ranks=1, expert_ranks=1, sequence_tokens=1, context_tokens=_CONTEXT_TOKENS
    )
    shape = shape_of(spec, element_bytes(spec, config.model.dtype))
    stages = stage_models(shape, load_hardware(config.planner.hardware), one)
    return stages.colocated_gain(1, tokens_per_expert(shape, one))
