"""Remaining work of a prompt, given its cached or done tokens: MoE-Prefill's Eq. 2.

All results are integers, so sums return exactly to zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from planner.costs.model_shape import ModelShape, causal_pairs, chunk_work

RequestWork = Callable[[int, int], int]
"""(done_tokens, prompt_tokens) → work of the tokens in between, in FLOPs or tokens."""


def token_work(done_tokens: int, prompt_tokens: int) -> int:
    """Return the number of tokens: the unit for a model without FLOP counts."""
    return prompt_tokens - done_tokens


def work_of(shape: ModelShape | None) -> RequestWork:
    """Return work in FLOPs, or in tokens without a shape."""
    return token_work if shape is None else flops_work(shape)


def flops_work(shape: ModelShape) -> RequestWork:
    """Return FLOPs of new tokens [done, prompt) of one sequence in all layers.

    Projections, router, top-k and shared experts, dense layers, and attention to all tokens before;
    without norms and logits.
    """
    per_token = _linear_flops_per_token(shape)
    windows = Counter(shape.windows)
    windows[None] += shape.num_layers - shape.moe_layers  # dense layers see everything
    if shape.latent is not None:
        return _latent_work(shape, per_token)
    pair_flops = 4 * shape.num_heads * shape.head_dim
    layers = [(window, count * pair_flops) for window, count in windows.items() if count]

    def flops(done_tokens: int, prompt_tokens: int) -> int:
        total = per_token * (prompt_tokens - done_tokens)
        for window, flops_per_pair in layers:
            pairs = causal_pairs(prompt_tokens, window) - causal_pairs(done_tokens, window)
            total += flops_per_pair * pairs
        return total

    return flops


def _linear_flops_per_token(shape: ModelShape) -> int:
    router = shape.hidden_size * shape.num_experts
    experts = shape.top_k * shape.expert_elements + shape.shared_elements
    elements = (
        shape.num_layers * shape.projection_elements
        + shape.moe_layers * (router + experts)
        + shape.dense_elements
    )
    return 2 * elements


def _latent_work(shape: ModelShape, per_token: int) -> RequestWork:
    """Return the work of latent attention, expanded or absorbed, whichever is cheaper."""
    counted_once = 2 * (
        shape.projection_elements + shape.hidden_size * shape.num_experts
    )  # the part of `chunk_work`'s linear FLOPs that `per_token` includes

    def flops(done_tokens: int, prompt_tokens: int) -> int:
        tokens = prompt_tokens - done_tokens
        if tokens == 0:
            return 0
        layer = chunk_work(shape, done_tokens, prompt_tokens, None)
        attention = layer.attended_flops + layer.linear_flops - tokens * counted_once
        return per_token * tokens + shape.num_layers * round(attention)

    return flops
