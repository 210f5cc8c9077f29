"""How a checkpoint's router chooses experts, as config.json states it."""

from __future__ import annotations

from typing import Literal

import msgspec

from models.spec.config_fields import ConfigFields
from models.spec.families import Family


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`score`: of all experts' logits. Experts stand in `groups` of equal size, of which the best
    `kept_groups` stay; a group's score is the sum of its `best_of_group` best experts'. Weights
    are normalised over the chosen, if at all, then multiplied by `scale`."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0


def read_routing(config: ConfigFields, family: Family, num_experts: int) -> RoutingSpec:
    """Raises CheckpointError for what would be routed wrongly."""
    normalize = family.always_norm_topk or config.boolean("norm_topk_prob", default=False)
    if family.routing == "plain":
        return RoutingSpec(normalize=normalize)
    _refuse_others(config, family)
    scale = config.number("routed_scaling_factor", default=family.default_routed_scale)
    if family.routing == "deepseek_v2":
        if config.states_null("topk_method"):
            raise config.error("topk_method", "null is not supported; supported: greedy")
        if config.raw("topk_method") in (None, "greedy"):
            return RoutingSpec(normalize=False, scale=scale)
        groups, kept = _groups(config, family, num_experts)
        return RoutingSpec(normalize=False, groups=groups, kept_groups=kept, scale=scale)
    groups, kept = _groups(config, family, num_experts)
    if num_experts // groups < 2:
        raise config.error(
            "n_group", f"{groups} groups of {num_experts} experts: fewer than 2 each"
        )
    normalize = config.boolean("norm_topk_prob", default=not config.states_null("norm_topk_prob"))
    return RoutingSpec(
        score="sigmoid",
        normalize=normalize,
        groups=groups,
        kept_groups=kept,
        best_of_group=2,
        scale=scale,
    )


def _refuse_others(config: ConfigFields, family: Family) -> None:
    """Settings of the original files that `transformers` has no code for."""
    second = family.routing == "deepseek_v2"
    methods = ("greedy", "group_limited_greedy") if second else ("noaux_tc",)
    allowed = {
        "topk_method": methods,
        "scoring_func": ("softmax",) if second else ("sigmoid",),
        "moe_layer_freq": (1,),
    }
    for key, values in allowed.items():
        if config.has(key) and config.raw(key) not in values:
            known = ", ".join(str(value) for value in values)
            raise config.error(key, f"{config.raw(key)!r} is not supported; supported: {known}")
    if second and config.boolean("norm_topk_prob", default=False):
        raise config.error(
            "norm_topk_prob", "true is not supported for deepseek_v2: implementations differ in it"
        )


def _groups(config: ConfigFields, family: Family, num_experts: int) -> tuple[int, int]:
    default_groups, default_kept = family.default_groups
    groups = config.positive_int("n_group", default=default_groups)
    kept = config.positive_int("topk_group", default=default_kept)
    if num_experts % groups or kept > groups:
        raise config.error(
            "n_group",
            f"{groups} groups, {kept} of them kept (topk_group), do not divide the {num_experts}"
            " experts",
        )
    top_k = config.positive_int("num_experts_per_tok", default=family.default_top_k)
    if top_k > kept * (num_experts // groups):
        raise config.error(
            "num_experts_per_tok",
            f"{top_k} exceeds the {kept * (num_experts // groups)} experts of {kept} groups",
        )
    return groups, kept
