"""Which tensors a decoder needs, by role, with the shapes its spec implies.

Loading and the header check both read this table, so that what is checked is what is loaded.
Shapes: D model dim, F expert FFN dim, E experts, V vocabulary, H query heads, G KV heads,
d head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor by its possible names (the first that exists is meant) and its shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


Wants = dict[str, Wanted]


def outer_tensors(spec: ModelSpec) -> Wants:
    """embed [V, D], final_norm [D] and, untied, head [V, D]."""
    D, V = spec.hidden_size, spec.vocab_size
    wants = {
        "embed": _one("model.embed_tokens.weight", V, D),
        "final_norm": _one("model.norm.weight", D),
    }
    if not spec.tie_word_embeddings:
        wants["head"] = _one("lm_head.weight", V, D)
    return wants


def attention_tensors(spec: ModelSpec, layer: int) -> Wants:
    """Both norms and the projections q [H*d, D], k and v [G*d, D], o [D, H*d] of a layer."""
    at = f"model.layers.{layer}"
    D, d = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * d, spec.num_kv_heads * d
    wants = {
        "attention_norm": _one(f"{at}.input_layernorm.weight", D),
        "mlp_norm": _one(f"{at}.post_attention_layernorm.weight", D),
    }
    for role, rows, columns in (("q", q, D), ("k", kv, D), ("v", kv, D), ("o", D, q)):
        wants[role] = _one(f"{at}.self_attn.{role}_proj.weight", rows, columns)
        if spec.attention_bias:
            wants[f"{role}_bias"] = _one(f"{at}.self_attn.{role}_proj.bias", rows)
    if spec.qk_norm:
        wants["q_norm"] = _one(f"{at}.self_attn.q_norm.weight", d)
        wants["k_norm"] = _one(f"{at}.self_attn.k_norm.weight", d)
    return wants


def dense_tensors(spec: ModelSpec, layer: int) -> Wants:
    """gate and up [F, D], down [D, F] of a dense layer's MLP."""
    at = f"model.layers.{layer}.mlp"
    D, F = spec.hidden_size, spec.dense_ffn_size
    return {
        "gate": _one(f"{at}.gate_proj.weight", F, D),
        "up": _one(f"{at}.up_proj.weight", F, D),
        "down": _one(f"{at}.down_proj.weight", D, F),
    }


def router_tensors(spec: ModelSpec, layer: int) -> Wants:
    """router [E, D] of a MoE layer."""
    names = tuple(name.format(layer=layer) for name in spec.family.router)
    return {"router": Wanted(names, (spec.num_experts, spec.hidden_size))}


def expert_tensors(spec: ModelSpec, layer: int, expert: int) -> Wants:
    """gate and up [F, D], down [D, F] of one expert that is stored singly."""
    D, F = spec.hidden_size, spec.expert_ffn_size
    names = spec.family.experts
    return {
        "gate": _one(names.gate.format(layer=layer, expert=expert), F, D),
        "up": _one(names.up.format(layer=layer, expert=expert), F, D),
        "down": _one(names.down.format(layer=layer, expert=expert), D, F),
    }


def fused_expert_tensors(spec: ModelSpec, layer: int) -> Wants:
    """gate_up [E, 2F, D] and down [E, D, F] of a layer whose experts are stored fused."""
    E, D, F = spec.num_experts, spec.hidden_size, spec.expert_ffn_size
    names = spec.family.experts
    return {
        "gate_up": _one(names.fused_gate_up.format(layer=layer), E, 2 * F, D),
        "down": _one(names.fused_down.format(layer=layer), E, D, F),
    }


def attention_half_tensors(spec: ModelSpec) -> Iterator[Wanted]:
    """Everything an attention rank holds."""
    yield from outer_tensors(spec).values()
    for layer in range(spec.num_layers):
        yield from attention_tensors(spec, layer).values()
        wants = router_tensors if spec.is_moe(layer) else dense_tensors
        yield from wants(spec, layer).values()


def _one(name: str, *shape: int) -> Wanted:
    return Wanted((name,), shape)
