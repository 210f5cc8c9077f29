"""What a model's matrix products must do, on one attention and one expert rank: FLOPs, and bytes of
weights and KV cache that are read.

A multiply-add is 2 FLOPs. Attention counts the (query, key) pairs that the causal mask leaves.
Shapes: D model dim, F FFN dim, E experts, K top-k, H heads, d head dim, V vocabulary, T tokens.
"""

from typing import NamedTuple

import torch

from models.decoder.attention import kv_bytes_per_token
from models.spec.model import ModelSpec
from models.weights.layout import attention_parameters


class Rates(NamedTuple):
    """What one core does at best."""

    flops_per_s: float
    read_bytes_per_s: float


class Work(NamedTuple):
    """Products of one pass through the model that run one after another."""

    flops: float
    read_bytes: float

    def seconds(self, rates: Rates) -> float:
        """At the machine's rate: of arithmetic or of reading, whichever takes longer."""
        return max(self.flops / rates.flops_per_s, self.read_bytes / rates.read_bytes_per_s)


class Pass(NamedTuple):
    """One pass: `attention` (with dense and shared experts) and `head` on the attention rank."""

    attention: Work
    head: Work
    expert: Work

    @property
    def flops(self) -> float:
        return self.attention.flops + self.head.flops + self.expert.flops


def one_pass(
    spec: ModelSpec, dtype: torch.dtype, *, rows: int, new_tokens: int, context: int
) -> Pass:
    """The pass of `rows` sequences of new_tokens each after `context` earlier ones; logits of each
    row's last token."""
    T = rows * new_tokens
    pairs = rows * (new_tokens * context + new_tokens * (new_tokens + 1) / 2)
    parameters = _attention_half_parameters(spec)
    kv_bytes = rows * context * kv_bytes_per_token(spec, dtype)
    pair_flops = spec.num_layers * _flops_per_pair(spec, decode=new_tokens == 1)
    head = spec.vocab_size * spec.hidden_size
    expert = len(spec.moe_layers) * 3 * spec.hidden_size * spec.expert_ffn_size
    return Pass(
        Work(2 * T * parameters + pairs * pair_flops, parameters * dtype.itemsize + kv_bytes),
        Work(2 * rows * head, head * dtype.itemsize),
        Work(2 * T * spec.top_k * expert, _experts_met(spec, T) * expert * dtype.itemsize),
    )


def _attention_half_parameters(spec: ModelSpec) -> int:
    D, moe_layers = spec.hidden_size, len(spec.moe_layers)
    per_moe_layer = spec.num_experts * D + 3 * D * spec.shared_ffn_size
    dense = (spec.num_layers - moe_layers) * 3 * D * spec.dense_ffn_size
    return spec.num_layers * attention_parameters(spec) + moe_layers * per_moe_layer + dense


def _flops_per_pair(spec: ModelSpec, *, decode: bool) -> int:
    """Of all heads of a layer: a score, and one value's share of the sum. Latent attention decodes
    on latents as they lie (kernels/latent_attention.py)."""
    if spec.latent is None:
        return 4 * spec.num_heads * spec.head_dim
    if decode:
        return 4 * spec.num_heads * spec.latent.entry_dim
    return 2 * spec.num_heads * (spec.head_dim + spec.latent.value_dim)


def _experts_met(spec: ModelSpec, tokens: int) -> float:
    """Expected number of a layer's experts that T tokens meet, if routing is uniform."""
    missed = (1 - spec.top_k / spec.num_experts) ** tokens
    return spec.num_experts * (1 - missed)
