"""Time per generated token with experts read on demand, on one worker.

    active(B)    E (1 - (1 - K/E)^B)           experts of a layer for B tokens, uniform routing
    C            attention + shared + experts  a layer's compute
    X            (1 - hits) active expert_bytes / tier_bytes_per_s
    on demand    L (C + X)                     ahead    C + X + (L - 1) max(C, X)  (a bound)

Letters: B sequences, E experts, K top-k, L layers. Speculating Experts, Eq. 1, with a cache
(docs/notation.md, "Experts that are read").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from contracts.hardware import Hardware
from planner.costs.cost_model import Deployment, batch_attention_ms, shared_model
from planner.costs.model_shape import ModelShape

SEQUENCES = (1, 2, 4, 8, 16)


class OffloadedToken(msgspec.Struct, frozen=True, kw_only=True):
    """Times per token of each sequence; missing: experts of a layer that are read."""

    sequences: int
    missing: float
    resident_ms: float
    on_demand_ms: float
    ahead_ms: float


class Tier(NamedTuple):
    """A storage tier for experts.

    kept: fraction of all experts that fits in the cache in compute format. hits: cache hit
    fraction; None: `held` for uniform routing, or 0 if a step needs more experts than are held (LRU
    then evicts each before its next use). stored_fraction: bytes of a stored expert over those in
    compute format.
    """

    kept: float
    bytes_per_s: float
    hits: float | None = None
    stored_fraction: float = 1.0

    @property
    def held(self) -> float:
        """Fraction of all experts that is held."""
        return min(1.0, self.kept / self.stored_fraction)


def active_experts(shape: ModelShape, sequences: int) -> float:
    """Return the expected number of different experts per layer."""
    return shape.num_experts * (1.0 - (1.0 - shape.top_k / shape.num_experts) ** sequences)


def most_sequences(shape: ModelShape, held: float) -> int:
    """Return the most sequences that need no more experts of a layer than are held.

    held: fraction below 1. Returns 0 if one sequence needs more.
    """
    share = shape.top_k / shape.num_experts
    if share >= held:
        return int(share == held)
    return math.floor(math.log1p(-held) / math.log1p(-share) + 1e-9)


def offloaded_token(
    hardware: Hardware, shape: ModelShape, tier: Tier, sequences: int, context_tokens: int
) -> OffloadedToken:
    """Return the times of one token of each sequence, behind context_tokens."""
    active = active_experts(shape, sequences)
    hits = tier.hits
    if hits is None:
        hits = tier.held if active <= tier.held * shape.num_experts * (1 + 1e-9) else 0.0
    missing = (1.0 - hits) * active
    expert_bytes = shape.expert_elements * shape.element_bytes * tier.stored_fraction
    read_ms = 1e3 * missing * expert_bytes / tier.bytes_per_s
    compute_ms = _layer_ms(hardware, shape, active, sequences, context_tokens)
    layers = shape.moe_layers
    return OffloadedToken(
        sequences=sequences,
        missing=missing,
        resident_ms=layers * compute_ms,
        on_demand_ms=layers * (compute_ms + read_ms),
        ahead_ms=compute_ms + read_ms + (layers - 1) * max(compute_ms, read_ms),
    )


def offloaded_tokens(
    hardware: Hardware,
    shape: ModelShape,
    tier: Tier,
    context_tokens: int,
) -> list[OffloadedToken]:
    return [offloaded_token(hardware, shape, tier, each, context_tokens) for each in SEQUENCES]


def _layer_ms(
    hardware: Hardware, shape: ModelShape, active: float, sequences: int, context_tokens: int
) -> float:
    chunks = [(context_tokens, context_tokens + 1)] * sequences
    spent_ms = batch_attention_ms(hardware.attention, shape, chunks)
    one = Deployment(attention_ranks=1, expert_ranks=1, sequence_tokens=1)
    shared = shared_model(hardware, shape, one)
    if shared is not None:
        spent_ms += shared.at(sequences)
    cost = hardware.expert
    weights_ms = shape.expert_elements * shape.element_bytes * cost.weight_ms_per_byte
    spent_ms += cost.call_ms + active * (cost.expert_ms + weights_ms)
    return spent_ms + sequences * shape.top_k * shape.pair_flops * cost.ms_per_flop
