"""What a model costs, counted from its shape: FLOPs, elements and bytes.

A multiply-add is 2 FLOPs. "Attended" FLOPs are those per (query, key) pair that the mask leaves, so
half a square for a whole causal prompt; FinDEP counts the square (Eq. 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

Chunks = Sequence[tuple[int, int]]
"""New tokens [start, stop) of each sequence; those before `start` are cached."""


class LatentShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of latent attention: a token's entry is kv_rank + rope_dim elements."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder in numbers. Sizes in elements unless a name says bytes.

    projections, projection_elements: matrices of one layer's attention and their elements, without
    the up-projection of latents (`latent` has that). windows: per layer with experts, how far it
    sees (None: everything). kv_entry_elements: what a token leaves in the pool per layer.
    expert_elements, shared_elements: of one expert, and of all shared experts together, of one
    layer. dense_elements: of the feed-forward networks of all layers without experts.
    attention_rank_bytes: weights of an attention rank. has_sinks: of attention, per head.
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
    has_sinks: bool = False

    @property
    def moe_layers(self) -> int:
        return len(self.windows)

    @property
    def groups_short(self) -> bool:
        """Whether attention takes short prompts together."""
        return self.latent is None and not self.has_sinks

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of pool per token, over all layers. A layer with a window keeps every token too."""
        return self.num_layers * self.kv_entry_elements * self.element_bytes

    @property
    def pair_flops(self) -> int:
        """FLOPs of a (token, expert) pair: gate, up and down (the factor 3 of FinDEP's Eq. 3)."""
        return 2 * self.expert_elements

    def experts_per_rank(self, expert_ranks: int) -> int:
        """Of the fullest rank."""
        return -(-self.num_experts // expert_ranks)


class AttentionWork(NamedTuple):
    """What one micro-batch's attention does in one layer. Calls: planner/costs/model_shape.py;
    those of a chunk are its share where there are many like it."""

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
    """Of new tokens [start, stop) of one sequence, those before being cached: any prompt, chunk
    behind a prefix, or decode step (stop = start + 1), in a layer that sees `window` tokens."""
    tokens = stop - start
    pairs = causal_pairs(stop, window) - causal_pairs(start, window)
    per_token = shape.projection_elements + shape.hidden_size * shape.num_experts  # and the router
    linear, attended = 2.0 * tokens * per_token, 4.0 * pairs * shape.num_heads * shape.head_dim
    context = stop if start else 0  # without a prefix, keys and values are at hand
    if window is not None:
        context = min(context, tokens + window)
    if shape.latent is not None:
        linear_up, attended = _latent_flops(shape.latent, start, stop, pairs)
        linear += shape.num_heads * linear_up
        attended *= shape.num_heads
    read_bytes = context * shape.kv_entry_elements * shape.element_bytes
    calls = share_of(start, stop, window, groups_short=shape.groups_short)
    return AttentionWork(1.0, linear, attended, float(read_bytes), *calls)


def batch_work(shape: ModelShape, chunks: Chunks, window: int | None) -> AttentionWork:
    """Of a micro-batch's chunks, with the calls that these make together."""
    total = NO_WORK
    for (start, stop), times in Counter(chunks).items():
        total = total.plus(chunk_work(shape, start, stop, window).times(times))
    calls = calls_of(chunks, window, groups_short=shape.groups_short)
    return total._replace(prompt_calls=calls.prompts, decode_calls=calls.decodes)


def layer_mean_work(shape: ModelShape, start: int, stop: int) -> AttentionWork:
    """`chunk_work`, the mean over the layers that have experts."""
    return _layer_mean(shape, lambda window: chunk_work(shape, start, stop, window))


def layer_mean_batch(shape: ModelShape, chunks: Chunks) -> AttentionWork:
    """`batch_work`, the mean over the layers that have experts."""
    return _layer_mean(shape, lambda window: batch_work(shape, chunks, window))


def _layer_mean(shape: ModelShape, work_of: Callable[[int | None], AttentionWork]) -> AttentionWork:
    total = NO_WORK
    for window, layers in Counter(shape.windows).items():
        total = total.plus(work_of(window).times(layers / len(shape.windows)))
    return total


def hit_fraction(shape: ModelShape, experts: int) -> float:
    """Fraction of tokens that chose at least one of `experts` given ones, for uniform routing."""
    missed = 1.0
    for chosen in range(shape.top_k):
        missed *= max(0, shape.num_experts - experts - chosen) / (shape.num_experts - chosen)
    return 1.0 - missed


def count_tokens(chunks: Chunks) -> int:
    """Return the number of new tokens."""
    return sum(stop - start for start, stop in chunks)


def causal_pairs(stop: int, window: int | None) -> int:
    """Return the (query, key) pairs of the first `stop` tokens under a causal mask."""
    if window is None or stop <= window:
        return stop * (stop + 1) // 2
    return window * (window + 1) // 2 + (stop - window) * window


def _latent_flops(latent: LatentShape, start: int, stop: int, pairs: int) -> tuple[float, float]:
    """(per token, per pair) FLOPs of one head, expanded or absorbed: kernels/latent_attention.py
    takes what costs fewer."""
    up = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    absorbed = 2 * latent.kv_rank + latent.rope_dim
    expanded = latent.nope_dim + latent.rope_dim + latent.value_dim
    if (stop - start) * up + pairs * absorbed < stop * up + pairs * expanded:
        return 2.0 * (stop - start) * up, 2.0 * pairs * absorbed
    return 2.0 * stop * up, 2.0 * pairs * expanded


TILE_ROWS = 128
SHORT_SCORES = 1 << 14  # (query, key) pairs of a sequence that is grouped
MIN_FILL = 0.75  # of a group: of its queries, and of its keys
GROUP_SLOTS = 4096  # keys of a group, padding included


class Calls(NamedTuple):
    """Of prompts, tiles and groups; of decode, groups."""

    prompts: float
    decodes: float

    @property
    def total(self) -> float:
        return self.prompts + self.decodes


def calls_of(chunks: Chunks, window: int | None, *, groups_short: bool) -> Calls:
    """Of chunks (start, stop) in a layer that sees `window` tokens (None: all)."""
    tiles = 0
    short: list[tuple[int, int]] = []  # new tokens, context
    widths: list[int] = []
    for start, stop in chunks:
        if stop - start == 1:
            widths.append(_width(stop, window))
        elif groups_short and _is_short(start, stop, window):
            short.append((stop - start, stop))
        else:
            tiles += -(-(stop - start) // TILE_ROWS)
    return Calls(float(tiles + _short_groups(short)), float(_decode_groups(widths)))


def share_of(start: int, stop: int, window: int | None, *, groups_short: bool) -> Calls:
    """What such a chunk adds where there are many like it."""
    if stop - start == 1:
        return Calls(0.0, 1.0 / max(1, GROUP_SLOTS // _width(stop, window)))
    if groups_short and _is_short(start, stop, window):
        return Calls(1.0 / max(1, GROUP_SLOTS // stop), 0.0)
    return Calls(float(-(-(stop - start) // TILE_ROWS)), 0.0)


def _width(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _is_short(start: int, stop: int, window: int | None) -> bool:
    return (window is None or stop <= window) and (stop - start) * stop <= SHORT_SCORES


def _short_groups(short: Sequence[tuple[int, int]]) -> int:
    """Grown in descending order of new tokens; one that is alone is a tile."""
    groups = members = longest = least = most = 0
    for count, context in sorted(short, reverse=True):
        low, high = min(least, context), max(most, context)
        fits = members and count >= MIN_FILL * longest and low >= MIN_FILL * high
        if fits and (members + 1) * high <= GROUP_SLOTS:
            members, least, most = members + 1, low, high
        else:
            groups, members, longest, least, most = groups + 1, 1, count, context, context
    return groups


def _decode_groups(widths: Sequence[int]) -> int:
    """Grown in descending order of what they see."""
    groups = members = longest = 0
    for width in sorted(widths, reverse=True):
        fits = members and (members + 1) * longest <= GROUP_SLOTS
        if fits and width >= MIN_FILL * longest:
            members += 1
        else:
            groups, members, longest = groups + 1, 1, width
    return groups
