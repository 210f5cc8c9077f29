"""Layers with a recurrent state in place of K and V, from config.json."""

from __future__ import annotations

import msgspec

from models.spec.config_fields import ConfigFields
from models.spec.family import Family

LINEAR, FULL = "linear_attention", "full_attention"
_INTERVAL = 4  # by default each fourth layer has full attention


class RecurrentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of gated delta net layers in elements.

    Each of `key_heads` serves value_heads / key_heads value heads, which have a state of key_dim x
    value_dim each. `taps`: inputs of the convolution. `by_key_head`: so are the projections
    stored, in two tensors.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_key_head: bool

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
    types = config.raw("layer_types")
    if types is None:
        every = config.positive_int("full_attention_interval", default=_INTERVAL)
        types = [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error("layer_types", f"expected a list of {num_layers}, got {types!r}")
    for kind in types:
        if kind not in (LINEAR, FULL):
            raise config.error("layer_types", f"{kind!r} is not supported")
    layers = tuple(layer for layer, kind in enumerate(types) if kind == LINEAR)
    if not layers:
        return None
    spec = RecurrentSpec(
        layers=layers,
        key_heads=config.positive_int("linear_num_key_heads", default=16),
        value_heads=config.positive_int("linear_num_value_heads", default=32),
        key_dim=config.positive_int("linear_key_head_dim", default=128),
        value_dim=config.positive_int("linear_value_head_dim", default=128),
        taps=config.positive_int("linear_conv_kernel_dim", default=4),
        by_key_head=family.recurrent == "by_key_head",
    )
    if spec.value_heads % spec.key_heads:
        raise config.error(
            "linear_num_value_heads",
            f"linear_num_key_heads={spec.key_heads} does not divide {spec.value_heads}",
        )
    if len(layers) == num_layers:
        raise config.error("layer_types", f"none of {num_layers} layers has full attention")
    return spec
