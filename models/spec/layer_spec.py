"""Layers with experts, windows, latent attention and routing, from config.json."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from models.spec.config_fields import ConfigFields
from models.spec.families import Family

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_moe_layers(config: ConfigFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Return the layers with experts, ascending. Raises CheckpointError."""
    if not family.may_have_dense_layers:
        return tuple(range(num_layers))
    if family.first_moe_key is not None:
        first = config.count(family.first_moe_key, default=family.default_first_moe)
        return tuple(range(first, num_layers))
    step = config.positive_int("decoder_sparse_step", default=1)
    dense = set(config.int_list("mlp_only_layers"))
    return tuple(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )


def read_windows(config: ConfigFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, None for full attention. Raises CheckpointError."""
    if family.alternating_window is not None:
        return _by_layer_types(config, family.alternating_window, num_layers)
    windows = _one_window(config, family, num_layers)
    types, kind = config.raw("layer_types"), _FULL if windows[0] is None else _SLIDING
    if types is not None and types != [kind] * num_layers:
        raise config.error("layer_types", f"expected {num_layers} times {kind!r}, got {types!r}")
    return windows


def _one_window(config: ConfigFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return one window for all layers."""
    none: tuple[int | None, ...] = (None,) * num_layers
    switched, default = family.window_switch_key, family.default_window
    if not family.reads_window:
        return none
    if switched is not None and not config.boolean(switched, default=False):
        return none
    if not config.has("sliding_window") and (
        default is None or config.is_present("sliding_window")
    ):
        return none
    first = config.raw("max_window_layers")
    if switched is not None and first not in (None, 0):
        raise config.error(
            "max_window_layers",
            f"{first!r} together with {switched} is not supported (which layers slide is"
            f" ambiguous); set max_window_layers to 0 for all layers, or {switched} to false",
        )
    return (config.positive_int("sliding_window", default=default),) * num_layers


def _by_layer_types(config: ConfigFields, default: int, num_layers: int) -> tuple[int | None, ...]:
    """Return windows by layer_types; by default every second layer is full, the first is not."""
    types = config.raw("layer_types")
    if types is None:
        types = [_FULL if layer % 2 else _SLIDING for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error("layer_types", f"expected a list of {num_layers}, got {types!r}")
    for kind in types:
        if kind not in (_SLIDING, _FULL):
            raise config.error("layer_types", f"{kind!r} is not supported")
    if config.is_null("sliding_window"):
        raise config.error("sliding_window", "null is not supported where layers differ in it")
    window = config.positive_int("sliding_window", default=default)
    return tuple(window if kind == _SLIDING else None for kind in types)


_DEFAULT_Q_RANK = 1536  # if the key is missing; null: none


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of latent attention in elements.

    A head's query and key have `nope_dim` plain and `rope_dim` rotated elements; a token's cache
    entry has kv_rank + rope_dim. `q_rank` None: queries are projected directly. `interleaved`: the
    pairs that rope rotates are stored side by side.
    """

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def entry_dim(self) -> int:
        return self.kv_rank + self.rope_dim


def read_latent(config: ConfigFields, *, num_heads: int, always_interleaved: bool) -> LatentSpec:
    """Read the sizes of latent attention. Raises CheckpointError."""
    if config.positive_int("num_key_value_heads", default=num_heads) != num_heads:
        raise config.error(
            "num_key_value_heads",
            f"latent attention needs as many as num_attention_heads={num_heads}",
        )
    q_rank = None
    if not config.is_null("q_lora_rank"):
        q_rank = config.positive_int("q_lora_rank", default=_DEFAULT_Q_RANK)
    halves = config.is_null("rope_interleave")
    latent = LatentSpec(
        kv_rank=config.positive_int("kv_lora_rank"),
        q_rank=q_rank,
        nope_dim=config.positive_int("qk_nope_head_dim"),
        rope_dim=config.positive_int("qk_rope_head_dim"),
        value_dim=config.positive_int("v_head_dim"),
        interleaved=always_interleaved or config.boolean("rope_interleave", default=not halves),
    )
    if latent.rope_dim % 2:
        raise config.error("qk_rope_head_dim", f"{latent.rope_dim} is odd; rope needs an even size")
    return latent


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Routing rule of a layer. Experts form `groups`, of which the best `kept_groups` stay.

    A group's score is the sum of its `best_of_group` best experts. Weights are normalised over the
    chosen experts if `normalize`, then multiplied by `scale`.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0


def read_routing(config: ConfigFields, family: Family, num_experts: int) -> RoutingSpec:
    """Read the routing rule. Raises CheckpointError for unsupported ones."""
    normalize = family.always_norm_topk or config.boolean("norm_topk_prob", default=False)
    if family.routing == "plain":
        return RoutingSpec(normalize=normalize)
    _refuse_others(config, family)
    scale = config.number("routed_scaling_factor", default=family.default_routed_scale)
    if family.routing == "deepseek_v2":
        if config.is_null("topk_method"):
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
    normalize = config.boolean("norm_topk_prob", default=not config.is_null("norm_topk_prob"))
    return RoutingSpec(
        score="sigmoid",
        normalize=normalize,
        groups=groups,
        kept_groups=kept,
        best_of_group=2,
        scale=scale,
    )


def _refuse_others(config: ConfigFields, family: Family) -> None:
    """Refuse settings of the original files that `transformers` does not implement."""
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


RopeKind = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `models.decoder.decoder.inverse_frequencies`.

    `attention_factor` multiplies cos and sin (yarn); `softmax_factor` multiplies the softmax scale
    of latent attention (DeepSeek's mscale_all_dim, squared). Dynamic NTK scaling only affects
    positions beyond max_position_embeddings, our longest context, and is read as `default`.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0

    @property
    def context_tokens(self) -> int:
        """Longest context of a yarn scaling, otherwise 0."""
        if self.kind != "yarn":
            return 0
        return math.floor(self.factor * self.original_context_tokens)


def read_rope(config: ConfigFields, *, default_theta: float) -> RopeSpec:
    """Read the rope parameters. Raises CheckpointError for unsupported or incomplete scalings."""
    scaling = _rope_fields(config, default_theta)
    theta = _read_theta(config, scaling, default_theta)
    kind = scaling.raw("rope_type", "type") or "default"
    if kind not in SUPPORTED_ROPE:
        raise scaling.error(
            "rope_type", f"{kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}"
        )
    for fields in (config, scaling):
        if fields.raw("partial_rotary_factor") not in (None, 1, 1.0):
            raise fields.error("partial_rotary_factor", "only 1.0 is supported")
    if kind not in ("default", "yarn") and scaling.raw("mscale_all_dim"):
        raise scaling.error("mscale_all_dim", f"is not supported with rope_type {kind}, only yarn")
    if kind in ("default", "dynamic"):
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=scaling.number("factor"))
    longest = config.positive_int("max_position_embeddings")
    # The outer field takes precedence, as in `transformers`.
    outer = config.is_present("original_max_position_embeddings")
    original = (config if outer else scaling).positive_int(
        "original_max_position_embeddings", default=None if outer else longest
    )
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=scaling.number("factor"),
            original_context_tokens=original,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    return _yarn(scaling, theta, original, longest)


def _rope_fields(config: ConfigFields, default_theta: float) -> ConfigFields:
    """Return the fields of rope_scaling, or of rope_parameters; both must agree on theta."""
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    meant = old if any(True for _ in old.items()) else new
    for key, value in meant.items():
        if isinstance(value, dict):
            raise meant.error(key, "rope parameters by layer type are not supported")
    if meant is old and new.has("rope_theta"):
        theta = new.number("rope_theta")
        if _read_theta(config, old, default_theta) != theta:
            raise config.error(
                "rope_scaling",
                f"stands beside rope_parameters.rope_theta={theta:g} and replaces it; write"
                f' "rope_theta": {theta:g} into rope_scaling, or move all into rope_parameters',
            )
    return meant


def _read_theta(config: ConfigFields, scaling: ConfigFields, default: float) -> float:
    holder = scaling if scaling.is_present("rope_theta") else config
    return holder.number("rope_theta", default=None if holder.is_present("rope_theta") else default)


def _yarn(scaling: ConfigFields, theta: float, original: int, longest: int) -> RopeSpec:
    """Read YaRN. Its temperature 0.1 ln(s) + 1 multiplies cos and sin.

    DeepSeek has two scales: cos and sin get their ratio if both are given, and the softmax gets
    mscale_all_dim.
    """
    ratio = longest / original if scaling.is_null("factor") else None
    factor = scaling.number("factor", default=ratio)

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale = scaling.number("mscale") if scaling.raw("mscale") else 0.0
    all_dim = scaling.number("mscale_all_dim") if scaling.raw("mscale_all_dim") else 0.0
    both = mscale and all_dim
    usual = temperature(mscale) / temperature(all_dim) if both else temperature(1.0)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context_tokens=original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        truncate=scaling.boolean("truncate", default=not scaling.is_null("truncate")),
        attention_factor=scaling.number("attention_factor", default=usual),
        softmax_factor=temperature(all_dim) ** 2 if all_dim else 1.0,
    )
