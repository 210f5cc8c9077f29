"""`ModelSpec`: the contents of config.json in one vocabulary for all families.

Old and new spellings of a field are accepted (`torch_dtype` / `dtype`, `rope_theta` +
`rope_scaling` / `rope_parameters`, `num_experts` / `num_local_experts` / `n_routed_experts`).
Unsupported values are refused with a one-line error.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from contracts.errors import CheckpointError, RequestError
from contracts.requests import Sampling, check_sampling
from kernels.quantization import FP8_BLOCK
from models.spec.checkpoint_files import HEAD, stored_names
from models.spec.config_fields import ConfigFields, read_json
from models.spec.families import FAMILIES
from models.spec.family import Family, QkNorm
from models.spec.layer_spec import (
    ROPES,
    IndexerSpec,
    LatentSpec,
    RopeSpec,
    RoutingSpec,
    WindowLayersSpec,
    read_indexer,
    read_latent,
    read_moe_layers,
    read_rope,
    read_ropes,
    read_rotary_dim,
    read_routing,
    read_unrotated,
    read_windows,
)
from models.spec.recurrent import RecurrentSpec, read_recurrent

StoredDtype = Literal["bfloat16", "float16", "float32"]
GENERATION_CONFIG = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# Fields that `transformers` implements and we do not.
_REQUIRED_VALUES: dict[str, object] = {"is_causal": True, "per_layer_config": {}, "mlp_bias": False}


class ClampSpec(msgspec.Struct, frozen=True):
    """Experts with biases and the clamped gate of kernels.experts.ClampedGate."""

    alpha: float
    limit: float


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape. Sizes in elements; `moe_layers` ascending; `sliding_windows` per layer.

    A sliding window W lets position p see positions p-W+1 .. p. `dtype`: of config.json (default
    float32, bfloat16 if quantised). `dense_ffn_size`: 0 without dense layers. `latent`: sizes of
    latent attention; `head_dim` is then that of a query, and each head has a KV head. `rope_dim`:
    elements of a head that rope rotates, in all layers but the `unrotated`. `clip_qkv`: limit of
    queries, keys and values. `embedding_scale` multiplies embeddings, `logits_scale` logits.
    `query_tuning` (s, n): without rope, 1 + s log(1 + (p + 1) // n) multiplies queries.
    `value_dim`: elements of a value of grouped attention, which `value_scale` multiplies.
    `window_layers`: what layers with a window have of their own.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_ffn_size: int
    dense_ffn_size: int
    moe_layers: tuple[int, ...]
    routing: RoutingSpec
    rope: RopeSpec
    rms_norm_eps: float
    vocab_size: int
    max_context_tokens: int
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: QkNorm
    rope_dim: int
    softmax_scale: float
    sliding_windows: tuple[int | None, ...]
    dtype: StoredDtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    num_shared_experts: int = 0
    shared_ffn_size: int = 0
    latent: LatentSpec | None = None
    clamp: ClampSpec | None = None
    unrotated: tuple[int, ...] = ()
    clip_qkv: float | None = None
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    head_bias: bool = False
    query_tuning: tuple[float, float] | None = None
    recurrent: RecurrentSpec | None = None
    indexer: IndexerSpec | None = None
    window_layers: WindowLayersSpec | None = None
    value_dim: int = 0
    value_scale: float = 1.0

    def kv_heads(self, layer: int) -> int:
        own = self.window_layers
        return self.num_kv_heads if own is None or not self.sliding_windows[layer] else own.kv_heads

    def rope_of(self, layer: int) -> RopeSpec | None:
        """Return the rope of a layer, or None if it has none."""
        if layer in self.unrotated:
            return None
        own = self.window_layers
        return self.rope if own is None or not self.sliding_windows[layer] else own.rope

    def has_sinks(self, layer: int) -> bool:
        of_all = self.window_layers is None
        return self.family.sinks and (of_all or self.sliding_windows[layer] is not None)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        layers = () if self.recurrent is None else self.recurrent.layers
        return tuple(layer for layer in layers if layer < self.num_layers)

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    def is_moe(self, layer: int) -> bool:
        return layer in self.moe_layers


def kv_entry_shapes(spec: ModelSpec, layer: int) -> tuple[tuple[int, int], ...]:
    """Return the [heads, size] of a token's entries in a layer.

    K and V, or one latent and an indexer's key; none in a layer with recurrent states.
    """
    if layer in spec.recurrent_layers:
        return ()
    if spec.latent is None:
        heads = spec.kv_heads(layer)
        return (heads, spec.head_dim), (heads, spec.value_dim)
    indexer = spec.indexer
    if indexer is None or layer in indexer.shared_layers:
        return ((1, spec.latent.entry_dim),)
    return ((1, spec.latent.entry_dim), (1, indexer.head_dim))


def kv_elements(spec: ModelSpec) -> int:
    """Return the pool elements per token over all layers."""
    layers = range(spec.num_layers)
    return sum(math.prod(shape) for layer in layers for shape in kv_entry_shapes(spec, layer))


def read_spec(folder: Path) -> ModelSpec:
    """Read `folder`/config.json, and eos ids from generation_config.json.

    A head among the weights is used even if config.json ties it to the embedding, as `transformers`
    does. Raises CheckpointError: one line that names the file and the field.
    """
    config = _text_fields(_read_config(folder))
    spec = spec_from(config, _eos_token_ids(folder, config))
    if spec.tie_word_embeddings and HEAD in stored_names(folder):
        return msgspec.structs.replace(spec, tie_word_embeddings=False)
    return spec


def read_sampling(folder: Path) -> Sampling:
    """Return the sampling defaults of generation_config.json, as vLLM uses them.

    max_tokens is 0 without max_new_tokens. Raises CheckpointError.
    """
    path = folder / GENERATION_CONFIG
    config = ConfigFields(path, read_json(path) if path.is_file() else {})
    stated = {name: config.raw(name) for name in SAMPLING_FIELDS if config.has(name)}
    try:
        sampling = msgspec.convert({"max_tokens": 0, **stated}, Sampling)
        sampling = msgspec.structs.replace(sampling, top_k=max(sampling.top_k, 0))
        check_sampling(sampling, vocabulary=0)
    except (msgspec.ValidationError, RequestError) as error:
        raise CheckpointError(
            f"{path}: {error}; correct it, or set model.generation_config=ignore"
        ) from None
    if config.has("max_new_tokens"):
        most = config.positive_int("max_new_tokens")
        sampling = msgspec.structs.replace(sampling, max_tokens=most)
    return sampling


def spec_from(config: ConfigFields, eos_token_ids: tuple[int, ...] = ()) -> ModelSpec:
    """Return the spec of a config.json's fields. Raises CheckpointError."""
    config = _text_fields(config)
    family = _family(config)
    config = config.renamed(family.aliases)
    _refuse_unsupported(config, family)
    num_layers = config.positive_int("num_hidden_layers")
    num_heads = config.positive_int("num_attention_heads")
    hidden_size = config.positive_int("hidden_size")
    moe_layers = read_moe_layers(config, family, num_layers)
    dense = len(moe_layers) < num_layers
    latent, num_kv_heads, head_dim = _heads(config, family, num_heads, hidden_size)
    num_experts = config.positive_int(*family.num_experts_keys)
    windows = read_windows(config, family, num_layers)
    rope, rope_dim, window_layers = _ropes(config, family, latent, head_dim, num_kv_heads)
    expert_ffn_size = config.positive_int(family.expert_ffn_key)
    shared, shared_ffn_size = _shared_experts(config, family, expert_ffn_size)
    spec = ModelSpec(
        architecture=family.model_type,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        top_k=config.positive_int(*family.top_k_keys, default=family.default_top_k),
        expert_ffn_size=expert_ffn_size,
        dense_ffn_size=config.positive_int(family.dense_ffn_key) if dense else 0,
        moe_layers=moe_layers,
        routing=read_routing(config, family, num_experts),
        rope=rope,
        vocab_size=config.positive_int("vocab_size"),
        max_context_tokens=_context_tokens(config, rope),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=family.default_tied),
        attention_bias=_switch(config, family.bias_key, family.default_attention_bias),
        qk_norm=_qk_norm(config, family),
        rope_dim=rope_dim,
        sliding_windows=windows,
        dtype=_stored_dtype(config),
        eos_token_ids=eos_token_ids,
        bos_token_id=config.token_ids("bos_token_id")[0] if config.has("bos_token_id") else None,
        num_shared_experts=shared,
        shared_ffn_size=shared_ffn_size,
        latent=latent,
        clamp=_clamp(config) if family.experts is None else None,
        recurrent=read_recurrent(config, family, num_layers) if family.recurrent else None,
        indexer=read_indexer(config, family, num_layers) if family.indexer else None,
        unrotated=read_unrotated(config, family, windows),
        clip_qkv=_clip(config, family),
        head_bias=_switch(config, family.head_bias_key, default=False),
        query_tuning=_query_tuning(config) if family.windows == "chunks" else None,
        window_layers=window_layers,
        value_dim=_value_dim(config, family, head_dim),
        value_scale=_value_scale(config, family),
        **_factors(config, family, head_dim, rope.softmax_factor if latent else 1.0),
    )
    _check_consistency(config, spec)
    return spec


def _read_config(folder: Path) -> ConfigFields:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a Hugging Face checkpoint folder")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; give a folder as it is on the hub")
    return ConfigFields(path, read_json(path))


def _text_fields(config: ConfigFields) -> ConfigFields:
    """Return the fields of the text model of a model with vision, else all.

    Raises CheckpointError for a text model beside another model than its own.
    """
    family = FAMILIES.get(str(config.section("text_config").raw("model_type")))
    if family is None:
        return config
    whole = config.raw("model_type")
    if whole is None or whole != family.with_vision:
        known = ", ".join(each.with_vision for each in FAMILIES.values() if each.with_vision)
        raise config.error(
            "model_type",
            f"{whole!r} around {family.model_type!r} is not supported; with vision: {known}",
        )
    return config.with_section("text_config")


def _family(config: ConfigFields) -> Family:
    model_type = config.raw("model_type")
    architectures = config.raw("architectures")
    for family in FAMILIES.values():
        is_named = model_type is None and architectures == [family.architecture]
        if is_named or model_type == family.model_type:
            return family
    supported = ", ".join(FAMILIES)
    found = model_type if model_type is not None else architectures
    raise config.error("model_type", f"{found!r} is not supported; supported: {supported}")


def _heads(
    config: ConfigFields, family: Family, num_heads: int, hidden_size: int
) -> tuple[LatentSpec | None, int, int]:
    """Return (latent sizes, KV heads, head dim)."""
    if family.attention == "grouped":
        default_kv, default_dim = family.default_kv_heads, family.default_head_dim
        kv_heads = config.positive_int("num_key_value_heads", default=default_kv or num_heads)
        head_dim = config.positive_int("head_dim", default=default_dim or hidden_size // num_heads)
        return None, kv_heads, head_dim
    latent = read_latent(config, family, num_heads)
    return latent, num_heads, latent.nope_dim + latent.rope_dim


def _ropes(
    config: ConfigFields, family: Family, latent: LatentSpec | None, head_dim: int, kv_heads: int
) -> tuple[RopeSpec, int, WindowLayersSpec | None]:
    """Return the rope, the elements that it rotates, and what layers with a window have."""
    if family.windows_differ:
        rope, own, rotated = read_ropes(config, family, head_dim)
        return rope, rotated, WindowLayersSpec(kv_heads=2 * kv_heads, rope=own)
    if not family.has_rope:
        return RopeSpec(theta=family.default_rope_theta), latent.rope_dim if latent else 0, None
    most = head_dim if latent is None else latent.rope_dim
    return read_rope(config, family, head_dim), read_rotary_dim(config, family, most), None


def _value_dim(config: ConfigFields, family: Family, head_dim: int) -> int:
    default = family.default_value_dim
    return config.positive_int("v_head_dim", default=default) if default else head_dim


def _value_scale(config: ConfigFields, family: Family) -> float:
    if family.value_scale is None:
        return 1.0
    key, default = family.value_scale
    return config.number(key, default=1.0 if config.is_null(key) else default)


def _switch(config: ConfigFields, key: str | None, default: bool) -> bool:
    return key is not None and config.boolean(key, default=default)


def _qk_norm(config: ConfigFields, family: Family) -> QkNorm:
    key = family.qk_norm_key
    has_norm = key is None or config.boolean(key, default=family.default_qk_norm)
    return family.qk_norm if has_norm else ""


def _clip(config: ConfigFields, family: Family) -> float | None:
    key = family.clip_key
    return None if key is None or not config.has(key) else config.number(key)


def _query_tuning(config: ConfigFields) -> tuple[float, float] | None:
    if not config.boolean("attn_temperature_tuning", default=True):
        return None
    return config.number("attn_scale", default=0.1), config.number("floor_scale", default=8192)


def _shared_experts(config: ConfigFields, family: Family, expert_ffn_size: int) -> tuple[int, int]:
    """Return the number of shared experts and the size of the MLP that they are."""
    key = family.shared_size_key or family.shared_key
    if not family.shared or key is None:
        return 0, 0
    if family.may_lack_shared:
        count = config.count(key, default=family.default_shared)
    else:
        count = config.positive_int(key, default=family.default_shared or None)
    if family.shared_size_key is not None:
        return min(count, 1), count
    return count, count * expert_ffn_size


def _factors(
    config: ConfigFields, family: Family, head_dim: int, rope_factor: float
) -> dict[str, float]:
    """Return the epsilon of norms and the factors of embeddings, softmax and logits.

    Granite multiplies what is added to the residual by m. A residual of 1/m of the size, with
    an epsilon of 1/m² in the norms, has the same logits without.
    """
    eps = config.number("rms_norm_eps", default=family.default_rms_norm_eps)
    if not family.multipliers:
        scale = 1.0
        if _switch(config, family.embedding_switch_key, default=False):
            scale = config.positive_int("hidden_size") ** 0.5
        softmax = head_dim**-0.5 * rope_factor
        return {"rms_norm_eps": eps, "softmax_scale": softmax, "embedding_scale": scale}
    multiplier = config.number("residual_multiplier", default=1.0)
    return {
        "rms_norm_eps": eps / multiplier**2,
        "softmax_scale": config.number("attention_multiplier", default=1.0),
        "embedding_scale": config.number("embedding_multiplier", default=1.0) / multiplier,
        "logits_scale": 1.0 / config.number("logits_scaling", default=1.0),
    }


def _clamp(config: ConfigFields) -> ClampSpec:
    alpha = config.number("swiglu_alpha", default=1.702)
    return ClampSpec(alpha, config.number("swiglu_limit", default=7.0))


def _context_tokens(config: ConfigFields, rope: RopeSpec) -> int:
    """Return the larger of max_position_embeddings and YaRN's context: recipes change only one.

    Longrope's factors depend on the longest sequence of a batch beyond the original context.
    """
    if rope.kind == "longrope":
        return min(config.positive_int("max_position_embeddings"), rope.original_context_tokens)
    return max(config.positive_int("max_position_embeddings"), rope.context_tokens)


def _refuse_unsupported(config: ConfigFields, family: Family) -> None:
    for key, supported in (*_REQUIRED_VALUES.items(), *family.required):
        if config.has(key) and config.raw(key) != supported:
            raise config.unsupported(key, [repr(supported)])
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            _refuse_quantization(config.section(key), family)
    if config.raw("hidden_act") not in (None, "silu"):
        raise config.unsupported("hidden_act", ["silu"])


def _refuse_quantization(quantization: ConfigFields, family: Family) -> None:
    """Refuse everything except fp8 in 128x128 blocks, int8 weights and gpt-oss's MXFP4."""
    method = quantization.raw("quant_method")
    supported = "fp8 (128x128 blocks)" + (", mxfp4" if family.experts is None else "")
    supported += ", compressed-tensors (int8 weights)"
    if method == "compressed-tensors":
        _refuse_compressed(quantization)
        return
    if method == "mxfp4" and family.experts is None:
        return
    if method != "fp8":
        raise quantization.error(
            "quant_method",
            f"{method or 'an unknown method'} is not supported; supported: {supported},"
            " or an unquantised bfloat16, float16 or float32 checkpoint",
        )
    block = [FP8_BLOCK, FP8_BLOCK]
    if quantization.raw("weight_block_size") != block:
        raise quantization.unsupported("weight_block_size", [str(block)])


# Supported values of compressed-tensors, by field; None: absent.
_INT8_FORMATS = ("int-quantized", "pack-quantized")
_COMPRESSED: dict[str, tuple[object, ...]] = {
    "format": _INT8_FORMATS,
    "kv_cache_scheme": (None,),
    "sparsity_config": (None,),
    "transform_config": (None,),
}
_COMPRESSED_GROUP: dict[str, tuple[object, ...]] = {
    "format": (*_INT8_FORMATS, None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_COMPRESSED_WEIGHTS: dict[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("channel", "group"),
    "dynamic": (False, None),
    "actorder": ("weight", "static", False, None),
}


def _refuse_compressed(quantization: ConfigFields) -> None:
    """Refuse everything except symmetric int8 weights, by channel or by group."""
    _refuse_values(quantization, _COMPRESSED)
    groups = quantization.section("config_groups")
    if not groups.items():
        raise quantization.error("config_groups", "missing; a group with weights is needed")
    for name, _ in groups.items():
        group = groups.section(name)
        _refuse_values(group, _COMPRESSED_GROUP)
        _refuse_values(group.section("weights"), _COMPRESSED_WEIGHTS)


def _refuse_values(fields: ConfigFields, supported: dict[str, tuple[object, ...]]) -> None:
    for key, values in supported.items():
        value = None if fields.raw(key) in ({}, []) else fields.raw(key)
        if not any(value == each and type(value) is type(each) for each in values):
            raise fields.unsupported(key, ["none" if e is None else repr(e) for e in values])


def _stored_dtype(config: ConfigFields) -> StoredDtype:
    raw = config.raw("dtype", "torch_dtype")
    if raw is None:
        return "bfloat16" if config.has("quantization_config") else "float32"
    name, known = str(raw).removeprefix("torch."), get_args(StoredDtype)
    if name not in known:
        raise config.error("dtype", f"{raw!r} is not supported; supported: {', '.join(known)}")
    return cast(StoredDtype, name)


def _eos_token_ids(folder: Path, config: ConfigFields) -> tuple[int, ...]:
    ids = config.token_ids("eos_token_id")
    path = folder / GENERATION_CONFIG
    if path.is_file():
        ids += ConfigFields(path, read_json(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(each for each in ids if each >= 0))  # -1: none


def _check_consistency(config: ConfigFields, spec: ModelSpec) -> None:
    if spec.window_layers is not None:
        _check_agreement(config, spec, spec.window_layers)
    if spec.num_heads % spec.num_kv_heads:
        raise config.error(
            "num_key_value_heads",
            f"{spec.num_kv_heads} does not divide num_attention_heads={spec.num_heads}",
        )
    if spec.top_k > spec.num_experts:
        raise config.error(
            "num_experts_per_tok", f"{spec.top_k} exceeds the {spec.num_experts} experts"
        )
    if not spec.moe_layers:
        raise config.error("num_hidden_layers", f"none of the {spec.num_layers} layers has experts")
    if spec.latent is None and spec.head_dim % 2:
        raise config.error("head_dim", f"{spec.head_dim} is odd; rope needs an even size")


def _check_agreement(config: ConfigFields, spec: ModelSpec, windows: WindowLayersSpec) -> None:
    """Raise CheckpointError for a field of MiMo's original files that contradicts the spec."""
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
            "partial_rotary_factor", f"{fraction:g}, but {ROPES} rotates {spec.rope_dim} elements"
        )
    if spec.num_heads % windows.kv_heads:
        raise config.error(
            "num_key_value_heads",
            f"twice as many, {windows.kv_heads}, do not divide num_attention_heads="
            f"{spec.num_heads}",
        )
