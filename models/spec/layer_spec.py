"""Which layers have experts, and how far each layer sees, as config.json states it."""

from __future__ import annotations

from models.spec.config_fields import ConfigFields
from models.spec.families import Family

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_moe_layers(config: ConfigFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Ascending. Raises CheckpointError."""
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
    """Per layer, None where it sees everything. Raises CheckpointError."""
    if family.alternating_window is not None:
        return _by_layer_types(config, family.alternating_window, num_layers)
    windows = _one_window(config, family, num_layers)
    types, kind = config.raw("layer_types"), _FULL if windows[0] is None else _SLIDING
    if types is not None and types != [kind] * num_layers:
        raise config.error("layer_types", f"expected {num_layers} times {kind!r}, got {types!r}")
    return windows


def _one_window(config: ConfigFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The same for each layer."""
    none: tuple[int | None, ...] = (None,) * num_layers
    switched, default = family.window_switch_key, family.default_window
    if not family.reads_window:
        return none
    if switched is not None and not config.boolean(switched, default=False):
        return none
    if not config.has("sliding_window") and (default is None or config.states("sliding_window")):
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
    """Where layer_types is silent, every second layer sees everything, the first does not."""
    types = config.raw("layer_types")
    if types is None:
        types = [_FULL if layer % 2 else _SLIDING for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error("layer_types", f"expected a list of {num_layers}, got {types!r}")
    for kind in types:
        if kind not in (_SLIDING, _FULL):
            raise config.error("layer_types", f"{kind!r} is not supported")
    if config.states_null("sliding_window"):
        raise config.error("sliding_window", "null is not supported where layers differ in it")
    window = config.positive_int("sliding_window", default=default)
    return tuple(window if kind == _SLIDING else None for kind in types)
