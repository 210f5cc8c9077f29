"""Costs of a model from its shape: FLOPs, elements and bytes.

A multiply-add is 2 FLOPs. "Attended" FLOPs count the (query, key) pairs that the mask leaves: half
a square for a whole causal prompt, where FinDEP counts the square (Eq. 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

Chunks = Sequence[tuple[int, int]]
"""New tokens [start, stop) of each sequence; those before `start` are cached."""


class LatentShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of latent attention; a token's entry has kv_rank + rope_dim elements."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder in numbers. Sizes are in elements unless a name says bytes.

    projections, projection_elements: matrices of one layer's attention and their elements, without
    the up-projection of latents, which `latent` has. windows: attention window of each layer with
    experts (None: unlimited). kv_entry_elements: elements of a token in the pool per layer.
    expert_elements, shared_elements: of one expert, and of all shared experts of one layer.
    dense_elements: of the feed-forward networks of all layers without experts.
    attention_rank_bytes: weights of an attention rank.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    projections: int
    projection_elements: int
    kv_entry_elements: int
    windows: tuple[int | None, ...]
    num_experts: int
    top_k: int
    expert_elements: int
    num_shared_experts: int
    shared_elements: int
    vocab_size: int
    element_bytes: int
    attention_rank_bytes: int
    dense_elements: int = 0
    latent: LatentShape | None = None

    @property
    def moe_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of pool per token, over all layers; layers with a window keep every token too."""
        return self.num_layers * self.kv_entry_elements * self.element_bytes

    @property
    def pair_flops(self) -> int:
        """FLOPs of a (token, expert) pair: gate, up and down (the factor 3 of FinDEP's Eq. 3)."""
        return 2 * self.expert_elements

    def experts_per_rank(self, expert_ranks: int) -> int:
        """Return the experts of the fullest rank."""
        return -(-self.num_experts // expert_ranks)


class AttentionWork(NamedTuple):
    """Attention work of one micro-batch in one layer.

    Calls of a single chunk are its share of a group of chunks like it.
    """

    sequences: float
    linear_flops: float
    attended_flops: float
    context_bytes: float
    prompt_calls: float = 0.0
    decode_calls: float = 0.0

    def plus(self, other: AttentionWork) -> AttentionWork:
        return AttentionWork(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> AttentionWork:
        return AttentionWork(*(factor * a for a in self))


NO_WORK = AttentionWork(0.0, 0.0, 0.0, 0.0)


def chunk_work(shape: ModelShape, start: int, stop: int, window: int | None) -> AttentionWork:
    """Return the work of new tokens [start, stop) of one sequence, with those before cached.

    Any prompt, chunk behind a prefix, or decode step (stop = start + 1), in a layer with `window`.
    """
    tokens = stop - start
    pairs = causal_pairs(stop, window) - causal_pairs(start, window)
    per_token = shape.projection_elements + shape.hidden_size * shape.num_experts  # and the router
    linear, attended = 2.0 * tokens * per_token, 4.0 * pairs * shape.num_heads * shape.head_dim
    context = stop if start else 0  # without a prefix, keys and values are not read back
    if window is not None:
        context = min(context, tokens + window)
    if shape.latent is not None:
        linear_up, attended = _latent_flops(shape.latent, start, stop, pairs)
        linear += shape.num_heads * linear_up
        attended *= shape.num_heads
    read_bytes = context * shape.kv_entry_elements * shape.element_bytes
    calls = share_of(start, stop, window)
    return AttentionWork(1.0, linear, attended, float(read_bytes), *calls)


def batch_work(shape: ModelShape, chunks: Chunks, window: int | None) -> AttentionWork:
    """Return the work of a micro-batch, with the calls that its chunks make together."""
    total = NO_WORK
    for (start, stop), times in Counter(chunks).items():
        total = total.plus(chunk_work(shape, start, stop, window).times(times))
    calls = calls_of(chunks, window)
    return total._replace(prompt_calls=calls.prompts, decode_calls=calls.decodes)


def layer_mean_work(shape: ModelShape, start: int, stop: int) -> AttentionWork:
    """Return the mean of `chunk_work` over the layers with experts."""
    return _layer_mean(shape, lambda window: chunk_work(shape, start, stop, window))


def layer_mean_batch(shape: ModelShape, chunks: Chunks) -> AttentionWork:
    """Return the mean of `batch_work` over the layers with experts."""
    return _layer_mean(shape, lambda window: batch_work(shape, chunks, window))


def _layer_mean(shape: ModelShape, work_of: Callable[[int | None], AttentionWork]) -> AttentionWork:
    total = NO_WORK
    for window, layers in Counter(shape.windows).items():
        total = total.plus(work_of(window).times(layers / len(shape.windows)))
    return total


def hit_fraction(shape: ModelShape, experts: int) -> float:
    """Return the fraction of tokens with one of `experts` given experts, for uniform routing."""
    missed = 1.0
    for chosen in range(shape.top_k):
        missed *= max(0, shape.num_experts - experts - chosen) / (shape.num_experts - chosen)
    return 1.0 - missed


def count_tokens(chunks: Chunks) -> int:
    return sum(stop - start for start, stop in chunks)


def causal_pairs(stop: int, window: int | None) -> int:
    """Return the (query, key) pairs of the first `stop` tokens under a causal mask."""
    if window is None or stop <= window:
        return stop * (stop + 1) // 2
    return window * (window + 1) // 2 + (stop - window) * window


def _latent_flops(latent: LatentShape, start: int, stop: int, pairs: int) -> tuple[float, float]:
    """Return (per token, per pair) FLOPs of one head.

    Like kernels/latent_attention.py, it takes the cheaper of the expanded and absorbed forms.
    """
    up = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    absorbed = 2 * latent.kv_rank + latent.rope_dim
    expanded = latent.nope_dim + latent.rope_dim + latent.value_dim
    if (stop - start) * up + pairs * absorbed < stop * up + pairs * expanded:
        return 2.0 * (stop - start) * up, 2.0 * pairs * absorbed
    return 2.0 * stop * up, 2.0 * pairs * expanded


DECODE_KEYS = 1 << 14  # of a call for decodes


class Calls(NamedTuple):
    """Parts of attention: one for each chunk of a prompt, decodes up to DECODE_KEYS keys."""

    prompts: float
    decodes: float

    @property
    def total(self) -> float:
        return self.prompts + self.decodes


def calls_of(chunks: Chunks, window: int | None) -> Calls:
    """Return the calls for these chunks in a layer with `window` (None: unlimited)."""
    widths = [_width(stop, window) for start, stop in chunks if stop - start == 1]
    return Calls(float(len(chunks) - len(widths)), float(_decode_calls(widths)))


def share_of(start: int, stop: int, window: int | None) -> Calls:
    """Return the share of a chunk in the calls of many chunks like it."""
    if stop - start > 1:
        return Calls(1.0, 0.0)
    return Calls(0.0, 1.0 / max(1, DECODE_KEYS // _width(stop, window)))


def _width(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _decode_calls(widths: Sequence[int]) -> int:
    """Return the number of calls, each of at most DECODE_KEYS keys or one sequence."""
    calls = keys = 0
    for width in widths:
        if keys and keys + width > DECODE_KEYS:
            calls, keys = calls + 1, 0
        keys += width
    return calls + bool(keys)
