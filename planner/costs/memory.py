"""Number of samples that fit: weights, KV pool, activations and channel buffers of each rank.

Conservative: every sample in flight counts as a running one.
"""

from bisect import bisect_left
from typing import Literal, NamedTuple

import msgspec

from contracts.errors import ResourceError
from planner.costs.cost_model import PAIR_BYTES, Deployment
from planner.costs.model_shape import ModelShape
from planner.costs.routing_shape import Spread, uniform_spread

FLOAT_BYTES = 4
GIB = float(1 << 30)


class RankMemory(NamedTuple):
    """Memory of one rank in bytes; sample_bytes: per sample in flight on each attention rank."""

    group: Literal["attention", "expert"]
    weight_bytes: float
    sample_bytes: float
    usable_bytes: float

    @property
    def max_samples(self) -> int:
        """Return the samples of one attention rank that fit in this rank."""
        return max(0, int((self.usable_bytes - self.weight_bytes) // self.sample_bytes))


def rank_memories(
    shape: ModelShape, deployment: Deployment, usable_bytes: float, spread: Spread | None = None
) -> tuple[RankMemory, RankMemory]:
    """Return the memory of an attention rank and of the fullest expert rank.

    spread: of tokens over expert ranks (default: uniform).
    """
    spread = spread or uniform_spread(shape, deployment.expert_ranks)
    attention = RankMemory(
        "attention",
        shape.attention_rank_bytes,
        _attention_sample_bytes(shape, deployment, spread.copies),
        usable_bytes,
    )
    weight_bytes = shape.moe_layers * spread.slots * shape.expert_elements * shape.element_bytes
    rows = deployment.attention_ranks * deployment.sequence_tokens * spread.busiest.rows
    # Received rows and sent sums are in segments; sums are computed in float32.
    row_bytes = shape.hidden_size * (2 * shape.element_bytes + FLOAT_BYTES)
    return attention, RankMemory("expert", weight_bytes, rows * row_bytes, usable_bytes)


def max_samples(
    shape: ModelShape, deployment: Deployment, usable_bytes: float, spread: Spread | None = None
) -> int:
    """Return the most samples in flight per attention rank.

    Raises ResourceError with a remedy if not one fits.
    """
    spread = spread or uniform_spread(shape, deployment.expert_ranks)
    memories = rank_memories(shape, deployment, usable_bytes, spread)
    for memory in memories:
        if memory.weight_bytes >= usable_bytes:
            spare = spread.slots - shape.experts_per_rank(deployment.expert_ranks)
            raise ResourceError(_weights_too_large(shape, memory, spare))
    samples = min(memory.max_samples for memory in memories)
    if samples < 1:
        raise ResourceError(_sample_too_long(shape, deployment, memories, spread))
    return samples


def activation_token_bytes(shape: ModelShape, copies: float) -> float:
    """Return the activation bytes of one token on an attention rank.

    Residual, normed input, queries with keys and values, heads' output, the float32 sum, and
    `copies` rows in both directions of the channel.
    """
    heads = 2 * shape.num_heads * shape.head_dim + shape.kv_entry_elements
    elements = (2 + 2 * copies) * shape.hidden_size + heads
    pairs_bytes = shape.top_k * (PAIR_BYTES + FLOAT_BYTES)
    return elements * shape.element_bytes + shape.hidden_size * FLOAT_BYTES + pairs_bytes


def _attention_sample_bytes(shape: ModelShape, deployment: Deployment, copies: float) -> float:
    tokens = deployment.sequence_tokens
    kv_bytes = float((deployment.context_tokens + tokens) * shape.kv_token_bytes)
    logits_bytes = shape.vocab_size * FLOAT_BYTES  # of the last token
    return kv_bytes + tokens * activation_token_bytes(shape, copies) + logits_bytes


def _weights_too_large(shape: ModelShape, memory: RankMemory, spare_slots: int) -> str:
    """Return the error text: what to change so that the rank's weights fit."""
    have, need = _gib(memory.usable_bytes), _gib(memory.weight_bytes)
    if memory.group == "attention":
        return (
            f"memory_bytes: an attention rank's weights are {need}, {have} are usable: "
            f"give devices with more than {need} usable"
        )
    layer_bytes = shape.moe_layers * shape.expert_elements * shape.element_bytes
    most = int(memory.usable_bytes // layer_bytes)  # slots of each layer that a rank can hold
    if most == 0:
        return (
            f"memory_bytes: one expert of every layer is {_gib(layer_bytes)}, {have} are usable: "
            "give larger devices"
        )
    if most <= spare_slots:
        return (
            f"spare_slots={spare_slots}: a rank with its share of {shape.num_experts} experts is "
            f"{need}, {have} are usable, which is {most} slots of every layer: lower it"
        )
    # A completely full rank has no memory for a sample.
    ranks = -(-shape.num_experts // (most - spare_slots))
    return (
        f"expert_ranks: a rank's share of {shape.num_experts} experts is {need}, "
        f"{have} are usable: {min(ranks, shape.num_experts)} or more would fit"
    )


def _sample_too_long(
    shape: ModelShape,
    deployment: Deployment,
    memories: tuple[RankMemory, RankMemory],
    spread: Spread,
) -> str:
    tight = min(memories, key=lambda memory: memory.max_samples)
    left = _gib(tight.usable_bytes - tight.weight_bytes)
    fits = _longest(shape, deployment, tight.usable_bytes, spread)
    advice = f"at most sequence_tokens={fits} fits" if fits else "not even one token fits"
    return (
        f"sequence_tokens={deployment.sequence_tokens}: one sample needs "
        f"{_gib(tight.sample_bytes)} on an {tight.group} rank, "
        f"{left} are left beside its weights: {advice}; "
        "or use more ranks of that group, or larger devices"
    )


def _longest(shape: ModelShape, deployment: Deployment, usable_bytes: float, spread: Spread) -> int:
    """Return the largest sequence_tokens of which one sample fits, by bisection; 0 if none does."""

    def exceeds(tokens: int) -> bool:
        trial = msgspec.structs.replace(deployment, sequence_tokens=tokens)
        memories = rank_memories(shape, trial, usable_bytes, spread)
        return any(memory.max_samples < 1 for memory in memories)

    return bisect_left(range(deployment.sequence_tokens), True, 1, key=exceeds) - 1


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.05 * GIB else f"{num_bytes:.0f} bytes"
