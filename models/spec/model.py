"""`ModelSpec`: the contents of config.json in one vocabulary for all families.

Old and new spellings of a field are accepted (`torch_dtype` / `dtype`, `rope_theta` +
`rope_scaling` / `rope_parameters`, `num_experts` / `num_local_experts` / `n_routed_experts`).
Unsupported values are refused with a one-line error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from contracts.errors import CheckpointError, RequestError
from contracts.requests import Sampling, check_sampling
from kernels.quantization import FP8_BLOCK
from models.spec.checkpoint_files import HEAD, stored_names
from models.spec.config_fields import ConfigFields, read_json
from models.spec.families import FAMILIES, Family
from models.spec.layer_spec import (
    LatentSpec,
    RopeSpec,
    RoutingSpec,
    read_latent,
    read_moe_layers,
    read_rope,
    read_routing,
    read_windows,
)

StoredDtype = Literal["bfloat16", "float16", "float32"]
_DTYPES: dict[str, StoredDtype] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
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
    latent attention; `head_dim` is then that of a query, and each head has a KV head.
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
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: StoredDtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    num_shared_experts: int = 0
    latent: LatentSpec | None = None
    clamp: ClampSpec | None = None

    @property
    def rope_dim(self) -> int:
        """Elements of a head that rope rotates."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def shared_ffn_size(self) -> int:
        return self.num_shared_experts * self.expert_ffn_size

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    def is_moe(self, layer: int) -> bool:
        return layer in self.moe_layers


def read_spec(folder: Path) -> ModelSpec:
    """Read `folder`/config.json, and eos ids from generation_config.json.

    A head among the weights is used even if config.json ties it to the embedding, as `transformers`
    does. Raises CheckpointError: one line that names the file and the field.
    """
    config = _read_config(folder)
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
    family = _family(config)
    _refuse_unsupported(config, family)
    num_layers = config.positive_int("num_hidden_layers")
    num_heads = config.positive_int("num_attention_heads")
    hidden_size = config.positive_int("hidden_size")
    moe_layers = read_moe_layers(config, family, num_layers)
    dense = len(moe_layers) < num_layers
    latent, num_kv_heads, head_dim = _heads(config, family, num_heads, hidden_size)
    num_experts = config.positive_int(*family.num_experts_keys)
    rope = _rope(config, family)
    spec = ModelSpec(
        architecture=family.model_type,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        top_k=config.positive_int("num_experts_per_tok", default=family.default_top_k),
        expert_ffn_size=config.positive_int(family.expert_ffn_key),
        dense_ffn_size=config.positive_int("intermediate_size") if dense else 0,
        moe_layers=moe_layers,
        routing=read_routing(config, family, num_experts),
        rope=rope,
        rms_norm_eps=config.number("rms_norm_eps", default=family.default_rms_norm_eps),
        vocab_size=config.positive_int("vocab_size"),
        max_context_tokens=_context_tokens(config, rope),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        attention_bias=family.reads_attention_bias
        and config.boolean("attention_bias", default=family.default_attention_bias),
        qk_norm=family.qk_norm,
        sliding_windows=read_windows(config, family, num_layers),
        dtype=_stored_dtype(config),
        eos_token_ids=eos_token_ids,
        bos_token_id=config.token_ids("bos_token_id")[0] if config.has("bos_token_id") else None,
        num_shared_experts=_shared_experts(config, family),
        latent=latent,
        clamp=_clamp(config) if family.experts is None else None,
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


def _family(config: ConfigFields) -> Family:
    model_type = config.raw("model_type")
    for family in FAMILIES.values():
        if model_type == family.model_type:
            return family
    architectures = config.raw("architectures")
    for family in FAMILIES.values():
        if model_type is None and architectures == [family.architecture]:
            return family
    supported = ", ".join(f"{family.model_type}" for family in FAMILIES.values())
    found = model_type if model_type is not None else architectures
    raise config.error("model_type", f"{found!r} is not supported; supported: {supported}")


def _heads(
    config: ConfigFields, family: Family, num_heads: int, hidden_size: int
) -> tuple[LatentSpec | None, int, int]:
    """Return (latent sizes, KV heads, head dim)."""
    if family.attention == "grouped":
        kv_heads = config.positive_int("num_key_value_heads", default=family.default_kv_heads)
        head_dim = config.positive_int("head_dim", default=hidden_size // num_heads)
        return None, kv_heads, head_dim
    second = family.routing == "deepseek_v2"
    latent = read_latent(config, num_heads=num_heads, always_interleaved=second)
    return latent, num_heads, latent.nope_dim + latent.rope_dim


def _rope(config: ConfigFields, family: Family) -> RopeSpec:
    given = config.has("rope_parameters") or config.raw("rope_scaling")
    if family.needs_rope_parameters and not given:
        raise config.error("rope_parameters", f"missing; {family.model_type} needs them")
    return read_rope(config, default_theta=family.default_rope_theta)


def _shared_experts(config: ConfigFields, family: Family) -> int:
    if family.shared is None:
        return 0
    return config.positive_int("n_shared_experts", default=family.default_shared_experts)


def _clamp(config: ConfigFields) -> ClampSpec:
    alpha = config.number("swiglu_alpha", default=1.702)
    return ClampSpec(alpha, config.number("swiglu_limit", default=7.0))


def _context_tokens(config: ConfigFields, rope: RopeSpec) -> int:
    """Return the larger of max_position_embeddings and YaRN's context: recipes change only one."""
    return max(config.positive_int("max_position_embeddings"), rope.context_tokens)


def _refuse_unsupported(config: ConfigFields, family: Family) -> None:
    for key, supported in _REQUIRED_VALUES.items():
        if config.has(key) and config.raw(key) != supported:
            raise config.error(
                key, f"{config.raw(key)!r} is not supported; supported: {supported!r}"
            )
    if config.has("quantization_config"):
        _refuse_quantization(config.section("quantization_config"), family)
    activation = config.raw("hidden_act")
    if activation not in (None, "silu"):
        raise config.error("hidden_act", f"{activation!r} is not supported; supported: silu")


def _refuse_quantization(quantization: ConfigFields, family: Family) -> None:
    """Refuse everything except fp8 in 128x128 blocks and gpt-oss's MXFP4."""
    method = quantization.raw("quant_method")
    supported = "fp8 (128x128 blocks)" + (", mxfp4" if family.experts is None else "")
    if method == "mxfp4" and family.experts is None:
        return
    if method != "fp8":
        raise quantization.error(
            "quant_method",
            f"{method or 'an unknown method'} is not supported; supported: {supported},"
            " or an unquantised bfloat16, float16 or float32 checkpoint",
        )
    block = quantization.raw("weight_block_size")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise quantization.error(
            "weight_block_size", f"{block!r} is not supported; supported: [128, 128]"
        )


def _stored_dtype(config: ConfigFields) -> StoredDtype:
    raw = config.raw("dtype", "torch_dtype")
    if raw is None:
        return "bfloat16" if config.has("quantization_config") else "float32"
    name = str(raw).removeprefix("torch.")
    if name not in _DTYPES:
        raise config.error("dtype", f"{raw!r} is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _eos_token_ids(folder: Path, config: ConfigFields) -> tuple[int, ...]:
    ids = config.token_ids("eos_token_id")
    path = folder / GENERATION_CONFIG
    if path.is_file():
        ids += ConfigFields(path, read_json(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(each for each in ids if each >= 0))  # -1: none


def _check_consistency(config: ConfigFields, spec: ModelSpec) -> None:
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
