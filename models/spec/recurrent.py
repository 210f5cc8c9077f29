"""Layers with a recurrent state in place of K and V, from config.json."""

from __future__ import annotations

import msgspec

from models.spec.config_fields import ConfigFields
from models.spec.family import Family, RecurrentKind
from models.spec.layer_spec import types_of

LINEAR, FULL = "linear_attention", "full_attention"
_INTERVAL = 4  # by default each fourth layer has full attention


class RecurrentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of gated delta net layers in elements.

    Each of `key_heads` serves value_heads / key_heads value heads, which have a state of key_dim x
    value_dim each. `taps`: inputs of the convolution. `kind`: of the family (Family.recurrent).
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    kind: RecurrentKind

    @property
    def heads_per_key(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def mixed_dim(self) -> int:
        """Channels of the convolution that belong to a key head."""
        return 2 * self.key_dim + self.heads_per_key * self.value_dim

    @property
    def state_elements(self) -> int:
        """Numbers of a layer's states, which are float32."""
        return self.value_heads * self.key_dim * self.value_dim


def read_recurrent(config: ConfigFields, family: Family, num_layers: int) -> RecurrentSpec | None:
    """Read the sizes; None if all layers have full attention. Raises CheckpointError."""
    types, is_kimi = config.raw("layer_types"), family.recurrent == "by_row"
    if types is None and is_kimi:
        types = _kimi_types(config, num_layers)
    if types is None:
        every = config.positive_int("full_attention_interval", default=_INTERVAL)
        types = [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    types = types_of(config, "layer_types", types, (LINEAR, FULL), num_layers)
    layers = tuple(layer for layer, kind in enumerate(types) if kind == LINEAR)
    if not layers:
        return None
    spec = RecurrentSpec(
        layers=layers, kind=family.recurrent, **(_kimi_sizes if is_kimi else _sizes)(config)
    )
    if spec.value_heads % spec.key_heads:
        raise config.error(
            "linear_num_value_heads",
            f"linear_num_key_heads={spec.key_heads} does not divide {spec.value_heads}",
        )
    if len(layers) == num_layers:
        raise config.error("layer_types", f"none of {num_layers} layers has full attention")
    return spec


def _kimi_types(config: ConfigFields, num_layers: int) -> list[str | None]:
    """Return layer types by `linear_attn_config`, which counts from 1, or the default ones."""
    stated = config.section("linear_attn_config")
    if not (stated.has("full_attn_layers") and stated.has("kda_layers")):
        return [FULL if layer and layer % _INTERVAL == 0 else LINEAR for layer in range(num_layers)]
    types: list[str | None] = [None] * num_layers
    for key, kind in (("full_attn_layers", FULL), ("kda_layers", LINEAR)):
        for number in stated.int_list(key):
            if not 1 <= number <= num_layers or types[number - 1] not in (None, kind):
                raise stated.error(
                    key, f"{number} is not one of {num_layers} layers, or has a type"
                )
            types[number - 1] = kind
    if None in types:
        raise stated.error("kda_layers", f"layer {types.index(None) + 1} has no type")
    return types


def _sizes(config: ConfigFields) -> dict[str, int]:
    return {
        "key_heads": config.positive_int("linear_num_key_heads", default=16),
        "value_heads": config.positive_int("linear_num_value_heads", default=32),
        "key_dim": config.positive_int("linear_key_head_dim", default=128),
        "value_dim": config.positive_int("linear_value_head_dim", default=128),
        "taps": config.positive_int("linear_conv_kernel_dim", default=4),
    }


def _kimi_sizes(config: ConfigFields) -> dict[str, int]:
    stated = config.section("linear_attn_config")
    heads, size, taps = (
        stated.positive_int(key, default=config.positive_int(usual, default=default))
        for key, usual, default in (
            ("num_heads", "linear_num_heads", 32),
            ("head_dim", "linear_head_dim", 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
    )
    return {
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": size,
        "value_dim": size,
        "taps": taps,
    }
