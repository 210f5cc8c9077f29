"""Layers with a window that differ from the others in more than the window, from config.json.

Fields of MiMo's original files that `transformers` ignores must agree with those that it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from models.spec.config_fields import ConfigFields
from models.spec.family import Family
from models.spec.layer_spec import RopeSpec, read_rope, read_rotary_dim

if TYPE_CHECKING:
    from models.spec.model import ModelSpec

_ROPES = "rope_parameters"
_WINDOW_THETA = 10_000.0  # by default


class WindowLayersSpec(msgspec.Struct, frozen=True, kw_only=True):
    """KV heads and rope of layers with a window."""

    kv_heads: int
    rope: RopeSpec


def read_ropes(
    config: ConfigFields, family: Family, head_dim: int
) -> tuple[RopeSpec, RopeSpec, int]:
    """Return the ropes of layers without and with a window, and the elements that both rotate.

    Raises CheckpointError.
    """
    if config.has("rope_scaling"):
        raise config.error("rope_scaling", "is not supported; write rope_parameters by layer type")
    stated, ropes, rotated = config.section(_ROPES), list[RopeSpec](), list[int]()
    thetas = {"full_attention": family.default_rope_theta, "sliding_attention": _WINDOW_THETA}
    for kind, theta in thetas.items():
        given = dict(stated.section(kind).items()) if config.has(_ROPES) else {"rope_theta": theta}
        if "rope_theta" not in given:
            raise stated.error(kind, "expected an object with rope_theta for each layer type")
        alone = ConfigFields(config.path, {_ROPES: given})
        ropes.append(read_rope(alone, family, head_dim))
        rotated.append(read_rotary_dim(alone, family, head_dim))
    if rotated[0] != rotated[1]:
        raise stated.error(
            "partial_rotary_factor",
            f"rotates {rotated[0]} or {rotated[1]} elements by layer type, which is not supported",
        )
    return ropes[0], ropes[1], rotated[0]


def check_agreement(config: ConfigFields, spec: ModelSpec) -> None:
    """Raise CheckpointError for a field that contradicts the spec."""
    windows = spec.window_layers
    assert windows is not None
    sparse = [int(spec.is_moe(layer)) for layer in range(spec.num_layers)]
    implied: dict[str, object] = {
        "swa_num_key_value_heads": windows.kv_heads,
        "swa_num_attention_heads": spec.num_heads,
        "swa_head_dim": spec.head_dim,
        "swa_v_head_dim": spec.value_dim,
        "rope_theta": spec.rope.theta,
        "swa_rope_theta": windows.rope.theta,
        "layernorm_epsilon": spec.rms_norm_eps,
        "hybrid_layer_pattern": [int(window is not None) for window in spec.sliding_windows],
        "moe_layer_freq": sparse,
    }
    for key, value in implied.items():
        if config.has(key) and config.raw(key) != value:
            raise config.error(key, f"{config.raw(key)!r}, but the other fields imply {value!r}")
    fraction = config.number("partial_rotary_factor", default=spec.rope_dim / spec.head_dim)
    if int(spec.head_dim * fraction) != spec.rope_dim:
        raise config.error(
            "partial_rotary_factor", f"{fraction:g}, but {_ROPES} rotates {spec.rope_dim} elements"
        )
    if spec.num_heads % windows.kv_heads:
        raise config.error(
            "num_key_value_heads",
            f"twice as many, {windows.kv_heads}, do not divide num_attention_heads="
            f"{spec.num_heads}",
        )
