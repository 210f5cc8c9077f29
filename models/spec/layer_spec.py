"""Layers with experts, windows, latent attention, indexers, routing and rope, from config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from models.spec.config_fields import ConfigFields
from models.spec.family import Family

_SLIDING, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"
_DENSE, _SPARSE = "dense", "sparse"
_INDEXED = "indexed_attention"
_INDEXER_MODES = {"F": "full", "S": "shared"}
_WINDOW_THETA = 10_000.0  # of layers with a window, by default
ROPES = "rope_parameters"
Windows = tuple[int | None, ...]


def read_moe_layers(config: ConfigFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Return the layers with experts, ascending. Raises CheckpointError."""
    layers = range(num_layers)
    if family.dense == "none":
        return tuple(layers)
    if family.dense == "types" and config.has("mlp_layer_types"):
        types = types_of(config, "mlp_layer_types", [], (_DENSE, _SPARSE), num_layers)
        return tuple(layer for layer in layers if types[layer] == _SPARSE)
    if family.dense in ("first", "types"):
        first, key = family.default_first_moe, family.first_moe_key
        return tuple(layers[first if key is None else config.count(key, default=first) :])
    if family.dense == "range":
        step = config.positive_int("moe_layer_interval", default=1)
        first, last = config.count("moe_layer_start_index", default=1), num_layers - 1
        if config.raw("moe_layer_end_index") != -1:
            last = config.count("moe_layer_end_index", default=last)
        return tuple(layer for layer in layers[first : last + 1] if (layer + 1) % step == 0)
    if family.dense == "step" and config.has("moe_layers"):
        return tuple(sorted({*config.int_list("moe_layers")} & {*layers}))
    key = "interleave_moe_layer_step" if family.dense == "step" else "decoder_sparse_step"
    step = config.positive_int(key, default=1)
    dense = set(config.int_list("mlp_only_layers")) if family.dense == "qwen" else set()
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def read_windows(config: ConfigFields, family: Family, num_layers: int) -> Windows:
    """Return each layer's window, None for full attention or none. Raises CheckpointError."""
    if family.recurrent or family.indexer:
        return (None,) * num_layers
    if family.windows in ("periodic", "later", "chunks", "sixths"):
        return _by_layer_types(config, family, num_layers)
    windows = _one_window(config, family, num_layers)
    types, kind = config.raw("layer_types"), _FULL if windows[0] is None else _SLIDING
    if types is not None and types != [kind] * num_layers:
        raise config.error("layer_types", f"expected {num_layers} times {kind!r}, got {types!r}")
    return windows


def read_unrotated(config: ConfigFields, family: Family, windows: Windows) -> tuple[int, ...]:
    """Return the layers without rope, ascending. Raises CheckpointError."""
    if not family.has_rope:
        return tuple(range(len(windows)))
    if family.windows == "chunks":
        return tuple(n for n, rope in enumerate(_rope_flags(config, len(windows))) if not rope)
    if not family.ropes_windows_only:
        return ()
    return tuple(layer for layer, window in enumerate(windows) if window is None)


def _one_window(config: ConfigFields, family: Family, num_layers: int) -> Windows:
    none: Windows = (None,) * num_layers
    switched, default = family.window_switch_key, family.default_window
    if family.windows == "none":
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


def _by_layer_types(config: ConfigFields, family: Family, num_layers: int) -> Windows:
    """Return windows by layer_types, or by the family's default for these."""
    kind = _CHUNKED if family.windows == "chunks" else _SLIDING
    key = "attention_chunk_size" if family.windows == "chunks" else "sliding_window"
    slides = [] if config.has("layer_types") else _default_slides(config, family, num_layers)
    default = [kind if each else _FULL for each in slides]
    types = types_of(config, "layer_types", default, (kind, _FULL), num_layers)
    if config.is_null(key) and (kind in types or family.ropes_windows_only):
        raise config.error(key, "null is not supported where layers differ in it")
    if kind not in types:
        return (None,) * num_layers
    window = config.positive_int(key, default=family.default_window)
    if family.windows == "sixths" and config.has("sliding_window_size"):  # beside the token itself
        window = config.positive_int("sliding_window_size") + 1
    return tuple(window if each == kind else None for each in types)


def _default_slides(config: ConfigFields, family: Family, num_layers: int) -> list[bool]:
    if family.windows == "chunks":
        return _rope_flags(config, num_layers)
    if family.windows == "later":
        first = config.count("max_window_layers", default=num_layers)
        has_window = not config.is_null("sliding_window")
        return [has_window and layer >= first for layer in range(num_layers)]
    key, period = family.window_period
    if family.windows == "sixths":
        return [layer > 0 and (layer + 1) % 6 != 0 for layer in range(num_layers)]
    if key:
        period = config.positive_int(key, default=period)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _rope_flags(config: ConfigFields, num_layers: int) -> list[bool]:
    """Return by layer whether Llama 4 rotates queries and keys there."""
    given = config.int_list("no_rope_layers")
    if not given:
        step = config.positive_int("no_rope_layer_interval", default=4)
        return [(layer + 1) % step != 0 for layer in range(num_layers)]
    if len(given) != num_layers:
        raise config.error("no_rope_layers", f"expected {num_layers} numbers, got {len(given)}")
    return [flag != 0 for flag in given]


def types_of(
    config: ConfigFields, key: str, default: list[str], known: Sequence[str], num_layers: int
) -> list[str]:
    types = config.raw(key) or default
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error(key, f"expected a list of {num_layers}, got {types!r}")
    for kind in types:
        if kind not in known:
            raise config.error(key, f"{kind!r} is not supported; supported: {', '.join(known)}")
    return types


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


def read_latent(config: ConfigFields, family: Family, num_heads: int) -> LatentSpec:
    """Read the sizes of latent attention. Raises CheckpointError."""
    always_interleaved = family.routing == "deepseek_v2" or family.indexer != ""
    if config.positive_int("num_key_value_heads", default=num_heads) != num_heads:
        raise config.error(
            "num_key_value_heads",
            f"latent attention needs as many as num_attention_heads={num_heads}",
        )
    q_rank = None
    default_q_rank = family.default_q_rank or None
    if config.has("q_lora_rank") or (not config.is_null("q_lora_rank") and default_q_rank):
        q_rank = config.positive_int("q_lora_rank", default=default_q_rank)
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


class IndexerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A query sees the `top_k` tokens with the highest scores of `heads` heads of `head_dim`.

    `interleaved`: the pairs that rope rotates are side by side. `shared_layers` use the selection
    of the layer before them.
    """

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    shared_layers: tuple[int, ...] = ()


def read_indexer(config: ConfigFields, family: Family, num_layers: int) -> IndexerSpec:
    """Read the sizes. Raises CheckpointError."""
    if config.raw("layer_types") not in (None, [_INDEXED] * num_layers):
        raise config.error("layer_types", f"expected {num_layers} times {_INDEXED!r}")
    if config.is_null("q_lora_rank"):
        raise config.error("q_lora_rank", "null is not supported with an indexer")
    interleaved = family.indexer == "interleaved"
    modes = _read_modes(config, num_layers) if interleaved else ["full"] * num_layers
    indexer = IndexerSpec(
        heads=config.positive_int("index_n_heads", default=family.default_index_heads),
        head_dim=config.positive_int("index_head_dim", default=128),
        top_k=config.positive_int("index_topk", default=2048),
        interleaved=interleaved,
        shared_layers=tuple(layer for layer, mode in enumerate(modes) if mode == "shared"),
    )
    rope_dim = config.positive_int("qk_rope_head_dim")
    if indexer.head_dim < rope_dim:
        raise config.error(
            "index_head_dim", f"{indexer.head_dim} is less than qk_rope_head_dim={rope_dim}"
        )
    return indexer


def _read_modes(config: ConfigFields, num_layers: int) -> list[str]:
    """Return `full` or `shared` of each layer; GLM's own keys have a period and an offset."""
    key = "indexer_types" if config.has("indexer_types") else "index_topk_pattern"
    modes = config.raw(key)
    if modes is None:
        every = config.positive_int("index_topk_freq", default=1)
        offset = config.count("index_skip_topk_offset", default=2)
        firsts = [max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers)]
        modes = ["full" if is_first else "shared" for is_first in firsts]
    modes = [_INDEXER_MODES.get(mode, mode) for mode in modes]
    if len(modes) != num_layers or not {*modes} <= {*_INDEXER_MODES.values()} or modes[0] != "full":
        raise config.error(key, f"expected {num_layers} times full or shared, got {modes!r}")
    return modes


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Routing rule of a layer. Experts form `groups`, of which the best `kept_groups` stay.

    A group's score is the sum of its `best_of_group` best experts. Weights are normalised over the
    chosen experts if `normalize`, then multiplied by `scale`. `jitter`: see `sparsemixer`.
    """

    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0
    jitter: float = 0.0


def read_routing(config: ConfigFields, family: Family, num_experts: int) -> RoutingSpec:
    """Read the routing rule. Raises CheckpointError for unsupported ones."""
    default_norm = family.default_norm_topk and not config.is_null("norm_topk_prob")
    normalize = family.always_norm_topk or config.boolean("norm_topk_prob", default=default_norm)
    if family.routing == "softmax":
        return RoutingSpec(normalize=normalize)
    if family.routing == "sparsemixer":
        jitter = config.number("router_jitter_noise", default=0.01)
        return RoutingSpec(score="sparsemixer", normalize=False, jitter=jitter)
    scale, key = family.default_routed_scale, family.scale_key
    if key is not None:
        scale = config.number(key, default=scale)
    if family.routing == "scored":
        return RoutingSpec(score=family.score, normalize=normalize, scale=scale)
    _refuse_others(config, family)
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
    allowed: dict[str, tuple[object, ...]] = {
        "topk_method": methods,
        "scoring_func": ("softmax",) if second else ("sigmoid",),
        "moe_layer_freq": (1,),
    }
    if family.windows_differ:
        del allowed["moe_layer_freq"]  # by layer: model.py
    for key, values in allowed.items():
        if config.has(key) and config.raw(key) not in values:
            raise config.unsupported(key, map(str, values))
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
    top_k = config.positive_int(*family.top_k_keys, default=family.default_top_k)
    if top_k > kept * (num_experts // groups):
        raise config.error(
            "num_experts_per_tok",
            f"{top_k} exceeds the {kept * (num_experts // groups)} experts of {kept} groups",
        )
    return groups, kept


RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `models.decoder.decoder.inverse_frequencies`.

    `attention_factor` multiplies cos and sin (yarn); `softmax_factor` multiplies the softmax scale
    of latent attention (DeepSeek's mscale_all_dim, squared). Dynamic NTK scaling only affects
    positions beyond max_position_embeddings, our longest context, and is read as `default`.
    `divisors`: longrope's, of the frequency of each pair, in the original context.
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
    divisors: tuple[float, ...] = ()

    @property
    def context_tokens(self) -> int:
        """Longest context of a yarn scaling, otherwise 0."""
        if self.kind != "yarn":
            return 0
        return math.floor(self.factor * self.original_context_tokens)


def read_rotary_dim(config: ConfigFields, family: Family, head_dim: int) -> int:
    """Return the elements of a head that rope rotates. Raises CheckpointError."""
    scaling = _rope_fields(config, family.default_rope_theta)
    key = "partial_rotary_factor"
    if family.rotary_fraction is None:
        for fields in (config, scaling):
            if fields.raw(key) not in (None, 1, 1.0):
                raise fields.unsupported(key, ["1.0"])
        return head_dim
    fraction = 1.0 if config.is_null(key) else family.rotary_fraction
    if family.rotary_dim_key is not None and config.has(family.rotary_dim_key):
        fraction = config.positive_int(family.rotary_dim_key) / head_dim
    rotated = int(head_dim * scaling.number(key, default=config.number(key, default=fraction)))
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise scaling.error(key, f"rotates {rotated} of {head_dim} elements, not an even part")
    return rotated


def read_rope(config: ConfigFields, family: Family, head_dim: int) -> RopeSpec:
    """Read the rope parameters. Raises CheckpointError for unsupported or incomplete scalings."""
    if family.needs_rope_parameters and not (config.has(ROPES) or config.raw("rope_scaling")):
        raise config.error(ROPES, f"missing; {family.model_type} needs them")
    default_theta = family.default_rope_theta
    scaling = _rope_fields(config, default_theta)
    theta = _read_theta(config, scaling, default_theta)
    kind = scaling.raw("rope_type", "type") or "default"
    if kind not in family.rope_kinds:
        supported = ", ".join(family.rope_kinds)
        raise scaling.error("rope_type", f"{kind!r} is not supported; supported: {supported}")
    if kind not in ("default", "yarn") and scaling.raw("mscale_all_dim"):
        raise scaling.error("mscale_all_dim", f"is not supported with rope_type {kind}, only yarn")
    if kind == "dynamic" and family.rope_alpha and scaling.raw("alpha"):
        theta *= scaling.number("alpha") ** (head_dim / (head_dim - 2))
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
    if kind == "longrope":
        return _longrope(scaling, theta, original, head_dim // 2)
    return _yarn(scaling, theta, original, longest)


def _longrope(scaling: ConfigFields, theta: float, original: int, pairs: int) -> RopeSpec:
    """Read longrope's factors of contexts up to the original one."""
    divisors = scaling.raw("short_factor")
    are_numbers = isinstance(divisors, list) and all(
        type(each) in (int, float) for each in divisors
    )
    if not are_numbers or len(divisors) != pairs or min(divisors) <= 0:
        raise scaling.error("short_factor", f"expected {pairs} positive numbers, got {divisors!r}")
    return RopeSpec(
        theta=theta,
        kind="longrope",
        original_context_tokens=original,
        attention_factor=scaling.number("short_mscale"),
        divisors=tuple(float(each) for each in divisors),
    )


def _rope_fields(config: ConfigFields, default_theta: float) -> ConfigFields:
    """Return the fields of rope_scaling, or of rope_parameters; both must agree on theta."""
    new, old = config.section(ROPES), config.section("rope_scaling")
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
    stated, ropes, rotated = config.section(ROPES), list[RopeSpec](), list[int]()
    thetas = {"full_attention": family.default_rope_theta, "sliding_attention": _WINDOW_THETA}
    for kind, theta in thetas.items():
        given = dict(stated.section(kind).items()) if config.has(ROPES) else {"rope_theta": theta}
        if "rope_theta" not in given:
            raise stated.error(kind, "expected an object with rope_theta for each layer type")
        alone = ConfigFields(config.path, {ROPES: given})
        ropes.append(read_rope(alone, family, head_dim))
        rotated.append(read_rotary_dim(alone, family, head_dim))
    if rotated[0] != rotated[1]:
        raise stated.error(
            "partial_rotary_factor",
            f"rotates {rotated[0]} or {rotated[1]} elements by layer type, which is not supported",
        )
    return ropes[0], ropes[1], rotated[0]
