"""Tensors of a decoder by role, with the shapes that its spec implies.

Loading and the header check use the same table, so that all loaded tensors are checked.

Shapes: D model dim, F expert FFN dim, E experts, V vocabulary, H query heads, G KV heads, d head
dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from kernels.quantization import MXFP4_GROUP
from models.spec.checkpoint_files import HEAD
from models.spec.family import Names
from models.spec.layer_spec import LatentSpec
from models.spec.model import ModelSpec
from models.spec.recurrent import RecurrentSpec


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSpec:
    """Possible names (the first match counts) and shape.

    packed: bytes; float32: kept so. plus_one: stored as its difference from 1.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    float32: bool = False
    packed: bool = False
    plus_one: bool = False


WeightSpecs = dict[str, WeightSpec]


def total_bytes(weight_specs: Iterable[WeightSpec], element_bytes: int) -> int:
    """Return the bytes of `weight_specs` once loaded with elements of this size."""
    return sum(
        math.prod(weight_spec.shape) * (4 if weight_spec.float32 else element_bytes)
        for weight_spec in weight_specs
    )


def outer_tensors(spec: ModelSpec) -> WeightSpecs:
    """Return embed [V, D], final_norm [D] and, untied, head [V, D]."""
    D, V = spec.hidden_size, spec.vocab_size
    weight_specs = {
        "embed": _one("model.embed_tokens.weight", V, D),
        "final_norm": _norm(spec, "model.norm.weight", D),
    }
    if not spec.tie_word_embeddings:
        weight_specs["head"] = _one(HEAD, V, D)
    if spec.head_bias:
        weight_specs["head_bias"] = _one(HEAD.replace("weight", "bias"), V)
    if spec.family.layer_norm:
        weight_specs["final_norm_bias"] = _one("model.norm.bias", D)
    return weight_specs


def norm_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return attention_norm and mlp_norm [D] of a layer, and their biases if it has LayerNorms."""
    weight_specs, kinds = {}, ("weight", "bias") if spec.family.layer_norm else ("weight",)
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if spec.family.sandwich_norm:
        names |= {"mlp_norm": "pre_mlp_layernorm", "mlp_out_norm": "post_mlp_layernorm"}
    for role, name in names.items():
        for kind in kinds:
            key = role if kind == "weight" else f"{role}_bias"
            weight_specs[key] = _norm(spec, f"model.layers.{layer}.{name}.{kind}", spec.hidden_size)
    return weight_specs


def attention_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return q [H*d, D], k [G*d, D], v [G*v, D], o [D, H*v] of a layer, and their norms."""
    if spec.latent is not None:
        return _latent_tensors(spec, spec.latent, layer)
    at = f"model.layers.{layer}"
    D, d = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * d, spec.kv_heads(layer) * d
    values, attended = spec.kv_heads(layer) * spec.value_dim, spec.num_heads * spec.value_dim
    weight_specs = {}
    stored_q = 2 * q if spec.family.gates_queries else q
    sizes = (("q", stored_q, D), ("k", kv, D), ("v", values, D), ("o", D, attended))
    for role, rows, columns in sizes:
        weight_specs[role] = _one(f"{at}.self_attn.{role}_proj.weight", rows, columns)
        if spec.attention_bias and (role != "o" or spec.family.has_output_bias):
            weight_specs[f"{role}_bias"] = _one(f"{at}.self_attn.{role}_proj.bias", rows)
    if spec.has_sinks(layer):
        names = tuple(f"{at}.self_attn.{name}" for name in spec.family.sink_names)
        weight_specs["sinks"] = WeightSpec(names, (spec.num_heads,))
    if spec.family.sandwich_norm:
        weight_specs["out_norm"] = _one(f"{at}.post_attention_layernorm.weight", D)
    if spec.family.gates_attention:
        weight_specs["gate"] = _one(f"{at}.self_attn.gate_proj.weight", q, D)
    if spec.qk_norm not in ("", "plain_head"):
        q_norm, k_norm = spec.family.qk_norm_names
        q, kv = (q, kv) if spec.qk_norm == "projection" else (d, d)
        weight_specs["q_norm"] = _norm(spec, f"{at}.self_attn.{q_norm}.weight", q)
        weight_specs["k_norm"] = _norm(spec, f"{at}.self_attn.{k_norm}.weight", kv)
    return weight_specs


def recurrent_tensors(spec: ModelSpec, sizes: RecurrentSpec, layer: int) -> WeightSpecs:
    """Return the tensors of a layer with states; see `_kimi_tensors`, or a gated delta net's.

    By key head, qkvz has rows of q, k, v and z, and ba of b and a, one per value head; qkv, z, b
    and a are not by key head. conv [channels of qkv, 1, taps], rates and biases [value heads].
    """
    if sizes.kind == "by_row":
        return _kimi_tensors(spec, sizes, layer)
    at, D, V = f"model.layers.{layer}.linear_attn", spec.hidden_size, sizes.value_heads
    mixed, values = sizes.key_heads * sizes.mixed_dim, V * sizes.value_dim
    rows = {"qkvz": mixed + values, "ba": 2 * V}
    if sizes.kind == "separate":
        rows = {"qkv": mixed, "z": values, "b": V, "a": V}
    return {
        **{role: _one(f"{at}.in_proj_{role}.weight", size, D) for role, size in rows.items()},
        "conv": _one(f"{at}.conv1d.weight", mixed, 1, sizes.taps),
        "rates": WeightSpec((f"{at}.A_log",), (V,), float32=True),
        "biases": WeightSpec((f"{at}.dt_bias",), (V,), float32=True),
        "norm": _one(f"{at}.norm.weight", sizes.value_dim),
        "o": _one(f"{at}.out_proj.weight", D, values),
    }


def _kimi_tensors(spec: ModelSpec, sizes: RecurrentSpec, layer: int) -> WeightSpecs:
    """Return the tensors of Kimi's delta attention with H heads of d.

    q, k and v [H*d, D], their convolutions [H*d, 1, taps], b [H, D]; of decays f and gates g: a [d,
    D], then b [H*d, d].
    """
    at, D = f"model.layers.{layer}.self_attn", spec.hidden_size
    H, d = sizes.key_heads, sizes.key_dim
    tensors = {role: _one(f"{at}.{role}_proj.weight", H * d, D) for role in ("q", "k", "v")}
    for role in ("q", "k", "v"):
        tensors[f"{role}_conv"] = _one(f"{at}.{role}_conv1d.weight", H * d, 1, sizes.taps)
    for role in ("f", "g"):
        tensors[f"{role}_a"] = _one(f"{at}.{role}_a_proj.weight", d, D)
        tensors[f"{role}_b"] = _one(f"{at}.{role}_b_proj.weight", H * d, d)
    return tensors | {
        "b": _one(f"{at}.b_proj.weight", H, D),
        "rates": WeightSpec((f"{at}.A_log",), (1, 1, H, 1), float32=True),
        "biases": WeightSpec((f"{at}.dt_bias",), (H * d,), float32=True),
        "norm": _one(f"{at}.o_norm.weight", d),
        "o": _one(f"{at}.o_proj.weight", D, H * d),
    }


def mixer_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return the tensors of attention, or of what a layer has in its place."""
    if spec.recurrent is not None and layer in spec.recurrent.layers:
        return recurrent_tensors(spec, spec.recurrent, layer)
    return {**attention_tensors(spec, layer), **{
        f"index_{role}": weight_spec for role, weight_spec in indexer_tensors(spec, layer).items()
    }}  # fmt: skip


def indexer_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return q [H*d, q_rank], k [d, D], its LayerNorm [d], and weights [H, D] of an indexer."""
    sizes, latent, at = spec.indexer, spec.latent, f"model.layers.{layer}.self_attn.indexer"
    if sizes is None or latent is None or latent.q_rank is None or layer in sizes.shared_layers:
        return {}
    H, d, D = sizes.heads, sizes.head_dim, spec.hidden_size
    return {
        "q": _one(f"{at}.wq_b.weight", H * d, latent.q_rank),
        "k": _one(f"{at}.wk.weight", d, D),
        "norm": _one(f"{at}.k_norm.weight", d),
        "bias": _one(f"{at}.k_norm.bias", d),
        "weights": WeightSpec((f"{at}.weights_proj.weight",), (H, D), float32=True),
    }


def attention_parameters(spec: ModelSpec) -> int:
    """Return the elements of a layer's projections: multiply-adds per token without context."""
    whole = sum(
        math.prod(weight_spec.shape)
        for layer in range(spec.num_layers)
        for weight_spec in mixer_tensors(spec, layer).values()
        if len(weight_spec.shape) == 2
    )
    return whole // spec.num_layers


def _latent_tensors(spec: ModelSpec, latent: LatentSpec, layer: int) -> WeightSpecs:
    """Return the tensors of latent attention.

    kv_a [C, D] makes the cache entry (C = kv_rank + rope_dim), kv_b [H*(n+v), kv_rank] its keys and
    values; queries come from q [H*d, D], or from q_b [H*d, q_rank] after q_a [q_rank, D].
    """
    at = f"model.layers.{layer}.self_attn"
    D, H, C = spec.hidden_size, spec.num_heads, latent.entry_dim
    values = H * latent.value_dim
    weight_specs = {
        "kv_a": _one(f"{at}.kv_a_proj_with_mqa.weight", C, D),
        "kv_norm": _one(f"{at}.kv_a_layernorm.weight", latent.kv_rank),
        "kv_b": _one(f"{at}.kv_b_proj.weight", H * latent.nope_dim + values, latent.kv_rank),
        "o": _one(f"{at}.o_proj.weight", D, values),
    }
    if latent.q_rank is None:
        weight_specs["q"] = _one(f"{at}.q_proj.weight", H * spec.head_dim, D)
    else:
        weight_specs["q_a"] = _one(f"{at}.q_a_proj.weight", latent.q_rank, D)
        weight_specs["q_norm"] = _one(f"{at}.q_a_layernorm.weight", latent.q_rank)
        weight_specs["q_b"] = _one(f"{at}.q_b_proj.weight", H * spec.head_dim, latent.q_rank)
    if spec.attention_bias:
        weight_specs["kv_a_bias"] = _one(f"{at}.kv_a_proj_with_mqa.bias", C)
        weight_specs["o_bias"] = _one(f"{at}.o_proj.bias", D)
        if latent.q_rank is not None:
            weight_specs["q_a_bias"] = _one(f"{at}.q_a_proj.bias", latent.q_rank)
    return weight_specs


def dense_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return gate and up [F, D], down [D, F] of a dense layer's MLP."""
    at = tuple(f"model.layers.{layer}.{name}" for name in spec.family.mlp)
    return _mlp_tensors(at, spec.hidden_size, spec.dense_ffn_size)


def shared_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return the tensors of a layer's shared experts, which are one MLP; empty without any.

    Gate, up and down, or gate_up [2F, D] and down; output_gate [1, D] if it has one.
    """
    D, F = spec.hidden_size, spec.shared_ffn_size
    if not F or not spec.is_moe(layer):
        return {}
    names, gate = _of_layer(spec.family.shared, layer), spec.family.shared_gate
    if len(names) == 2:
        return {"gate_up": _one(names[0], 2 * F, D), "down": _one(names[1], D, F)}
    weight_specs = _mlp_tensors(names, D, F)
    if gate is not None:
        weight_specs["output_gate"] = _one(gate.format(layer=layer), 1, D)
    return weight_specs


def _mlp_tensors(at: Names, D: int, F: int) -> WeightSpecs:
    return {
        role: WeightSpec(tuple(f"{name}.{role}_proj.weight" for name in at), shape)
        for role, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))
    }


def router_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return router [E, D] of a MoE layer, and its bias and correction bias [E] if it has them."""
    family, E = spec.family, spec.num_experts
    names, shape = _of_layer(family.router, layer), (E, spec.hidden_size)
    weight_specs = {"router": WeightSpec(names, shape, family.float32_router)}
    if family.router_bias is not None:
        weight_specs["bias"] = _one(family.router_bias.format(layer=layer), E)
    if family.correction_bias:
        names = _of_layer(family.correction_bias, layer)
        size = (1, E) if family.correction_is_matrix else (E,)
        weight_specs["correction"] = WeightSpec(names, size, float32=True)
    return weight_specs


def expert_tensors(spec: ModelSpec, layer: int, expert: int) -> WeightSpecs:
    """Return gate and up [F, D], down [D, F] of one expert that is stored by itself."""
    D, F = spec.hidden_size, spec.expert_ffn_size
    names = spec.family.experts
    assert names is not None
    assert names.gate is not None
    return {
        "gate": _one(names.gate.format(layer=layer, expert=expert), F, D),
        "up": _one(names.up.format(layer=layer, expert=expert), F, D),
        "down": _one(names.down.format(layer=layer, expert=expert), D, F),
    }


def fused_expert_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return gate_up [E, 2F, D] and down [E, D, F] of a layer whose experts are stored fused."""
    E, D, F = spec.num_experts, spec.hidden_size, spec.expert_ffn_size
    names = spec.family.experts
    assert names is not None
    turn = -1 if names.transposed else 1
    return {
        "gate_up": WeightSpec(_of_layer(names.fused_gate_up, layer), (E, *(2 * F, D)[::turn])),
        "down": WeightSpec(_of_layer(names.fused_down, layer), (E, *(D, F)[::turn])),
    }


def clamped_expert_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return gate_up [E, D, 2F] (columns gate, up, gate, up ...), down [E, F, D], and biases."""
    at = f"model.layers.{layer}.mlp.experts"
    E, D, F = spec.num_experts, spec.hidden_size, spec.expert_ffn_size
    return {
        "gate_up": _one(f"{at}.gate_up_proj", E, D, 2 * F),
        "gate_up_bias": _one(f"{at}.gate_up_proj_bias", E, 2 * F),
        "down": _one(f"{at}.down_proj", E, F, D),
        "down_bias": _one(f"{at}.down_proj_bias", E, D),
    }


def packed_expert_tensors(spec: ModelSpec, layer: int) -> WeightSpecs:
    """Return clamped experts with MXFP4 matrices, which are not transposed.

    Rows are 32-element groups with one byte of exponent each, in blocks of 16 bytes; gate_up [E,
    2F, D] (interleaved rows) and down [E, D, F].
    """
    weight_specs = clamped_expert_tensors(spec, layer)
    E, D, F = spec.num_experts, spec.hidden_size, spec.expert_ffn_size
    for role, rows, columns in (("gate_up", 2 * F, D), ("down", D, F)):
        (name,) = weight_specs.pop(role).names
        shape = (E, rows, columns // MXFP4_GROUP)
        weight_specs[f"{role}_blocks"] = WeightSpec((f"{name}_blocks",), (*shape, 16), packed=True)
        weight_specs[f"{role}_scales"] = WeightSpec((f"{name}_scales",), shape, packed=True)
    return weight_specs


def expert_elements(spec: ModelSpec) -> int:
    D, F = spec.hidden_size, spec.expert_ffn_size
    return 3 * D * F + (0 if spec.clamp is None else 2 * F + D)


def attention_half_tensors(spec: ModelSpec) -> Iterator[WeightSpec]:
    """Return all tensors of an attention rank."""
    yield from outer_tensors(spec).values()
    for layer in range(spec.num_layers):
        yield from attention_half_layer(spec, layer)


def attention_half_layer(spec: ModelSpec, layer: int) -> Iterator[WeightSpec]:
    """Return an attention rank's tensors of one layer: all except the routed experts."""
    mlp = router_tensors if spec.is_moe(layer) else dense_tensors
    for tensors in (norm_tensors, mixer_tensors, shared_tensors, mlp):
        yield from tensors(spec, layer).values()


def _of_layer(names: Names, layer: int) -> Names:
    return tuple(name.format(layer=layer) for name in names)


def _norm(spec: ModelSpec, name: str, size: int) -> WeightSpec:
    return WeightSpec((name,), (size,), plus_one=spec.family.centred_norms)


def _one(name: str, *shape: int) -> WeightSpec:
    return WeightSpec((name,), shape)
