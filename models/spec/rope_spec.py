"""Rotary position parameters from old and new keys of config.json."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from models.spec.config_fields import ConfigFields

RopeKind = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `kernels.norm_rope.inverse_frequencies`.

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
