"""Times of a prefill batch by mode, and of a token with experts that are read on demand.

    resident      all experts are on each worker
    gathered      a layer's experts arrive during the layer before
    all_to_all    experts are divided; of two parts of a batch one computes while the other travels

Workers have equal batches, and overlaps are bounds. docs/notation.md has the formulas ("Stage
models and memory", "Experts that are read").
"""

import enum
import math
from bisect import bisect_left
from typing import NamedTuple

import msgspec

from contracts.hardware import Hardware, LinkCost
from planner.costs.cost_model import (
    Deployment,
    attention_ms,
    expert_model,
    link_model,
    shared_model,
)
from planner.costs.model_shape import (
    AttentionWork,
    Chunks,
    ModelShape,
    count_tokens,
    layer_mean_batch,
)
from planner.costs.routing_shape import RoutingShape, Spread, uniform_spread

PARTS = (1, 2)
MAX_BREAK_EVEN_TOKENS = 1 << 20  # of a batch, when break-even is looked for


class PrefillMode(enum.StrEnum):
    RESIDENT = "resident"
    GATHERED = "gathered"
    ALL_TO_ALL = "all_to_all"


class PrefillGroup(NamedTuple):
    """A group of prefill workers.

    a2e, e2a: links between workers. routing: with experts divided among the workers.
    """

    shape: ModelShape
    hardware: Hardware
    workers: int
    a2e: LinkCost
    e2a: LinkCost
    routing: RoutingShape


class LayerMs(NamedTuple):
    """One layer's compute time on a worker, and its transfer time."""

    compute: float
    moved: float


def gathered_ms(layers: int, layer: LayerMs) -> float:
    """Return the time of `layers` layers; the first one's experts are present."""
    return layer.compute + (layers - 1) * max(layer.compute, layer.moved)


def exchanged_ms(parts: int, part: LayerMs) -> float:
    """Return the time of a layer in equal parts, of which one computes while another travels."""
    return max(parts * part.compute, parts * part.moved, part.compute + part.moved)


def gather_ms(link: LinkCost, workers: int, layer_bytes: float) -> float:
    """Return the time to receive one layer's experts from each other worker in turn."""
    moved_bytes = (workers - 1) / workers * layer_bytes
    return (workers - 1) * link.alpha_ms + moved_bytes * link.ms_per_byte


def exchange_ms(group: PrefillGroup, spread: Spread, tokens_per_expert: float) -> float:
    """Return the time of dispatch and combine, own experts excluded."""
    workers = group.workers
    if workers == 1:
        return 0.0
    all_workers = Deployment(attention_ranks=workers, expert_ranks=workers, sequence_tokens=1)
    models = (
        link_model(group.a2e, group.shape, all_workers, "a2e", spread),
        link_model(group.e2a, group.shape, all_workers, "e2a", spread),
    )
    return sum(
        model.alpha_ms + model.beta_ms * (workers - spread.at_home) / workers * tokens_per_expert
        for model in models
    )


def batch_seconds(way: PrefillMode, batch: Chunks, group: PrefillGroup) -> float:
    """Return the seconds of one batch; 0 for an empty one."""
    tokens = count_tokens(batch)
    if tokens == 0:
        return 0.0
    shape, work = group.shape, layer_mean_batch(group.shape, batch)
    if way is PrefillMode.ALL_TO_ALL:
        layers = group.routing.layers
        spent_ms = sum(_exchanged_layer_ms(group, work, tokens, spread) for spread in layers)
        return shape.moe_layers / len(layers) * spent_ms / 1e3
    compute_ms = _compute_ms(group, work, tokens, uniform_spread(shape, 1), senders=1)
    if way is PrefillMode.RESIDENT:
        return shape.moe_layers * compute_ms / 1e3
    layer_bytes = shape.num_experts * shape.expert_elements * shape.element_bytes
    moved_ms = gather_ms(group.a2e, group.workers, layer_bytes) if group.workers > 1 else 0.0
    return gathered_ms(shape.moe_layers, LayerMs(compute_ms, moved_ms)) / 1e3


def prompts_of(tokens: int, prompt_tokens: int) -> list[tuple[int, int]]:
    """Return a batch of `tokens`: prompts of prompt_tokens and a rest."""
    whole, rest = divmod(tokens, prompt_tokens)
    return [(0, prompt_tokens)] * whole + ([(0, rest)] if rest else [])


def break_even_tokens(
    group: PrefillGroup,
    one: PrefillMode,
    other: PrefillMode,
    *,
    prompt_tokens: int = MAX_BREAK_EVEN_TOKENS,
) -> int | None:
    """Return the least batch tokens for which `one` is not slower than `other`; None if none."""

    def pays(tokens: int) -> bool:
        batch = prompts_of(tokens, prompt_tokens)
        return batch_seconds(one, batch, group) <= batch_seconds(other, batch, group)

    high = 1
    while not pays(high):
        high *= 2
        if high > MAX_BREAK_EVEN_TOKENS:
            return None
    return bisect_left(range(high), True, high // 2 + 1, key=pays)


def _exchanged_layer_ms(
    group: PrefillGroup, work: AttentionWork, tokens: int, spread: Spread
) -> float:
    times = []
    for parts in PARTS:
        part = work.times(1 / parts)._replace(sequences=work.sequences)
        compute_ms = _compute_ms(group, part, tokens / parts, spread, senders=group.workers)
        me = _tokens_per_expert(group.shape, tokens / parts, group.workers)
        times.append(exchanged_ms(parts, LayerMs(compute_ms, exchange_ms(group, spread, me))))
    return min(times)


def _compute_ms(
    group: PrefillGroup, work: AttentionWork, tokens: float, spread: Spread, *, senders: int
) -> float:
    """senders: workers whose tokens meet the experts of `spread`."""
    shape, hardware = group.shape, group.hardware
    expert = expert_model(hardware, shape, spread)
    experts_ms = expert.at(_tokens_per_expert(shape, tokens, senders))
    return _other_ms(hardware, shape, work, tokens) + experts_ms


def _other_ms(hardware: Hardware, shape: ModelShape, work: AttentionWork, tokens: float) -> float:
    """Return the time of a layer's attention and shared experts."""
    one = Deployment(attention_ranks=1, expert_ranks=1, sequence_tokens=1)
    spent_ms = attention_ms(hardware.attention, shape, work)
    shared = shared_model(hardware, shape, one)
    return spent_ms if shared is None else spent_ms + shared.at(tokens)


def _tokens_per_expert(shape: ModelShape, tokens: float, senders: int) -> float:
    return senders * tokens * shape.top_k / shape.num_experts


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


def _layer_ms(
    hardware: Hardware, shape: ModelShape, active: float, sequences: int, context_tokens: int
) -> float:
    chunks = [(context_tokens, context_tokens + 1)] * sequences
    spent_ms = _other_ms(hardware, shape, layer_mean_batch(shape, chunks), sequences)
    cost = hardware.expert
    weights_ms = shape.expert_elements * shape.element_bytes * cost.weight_ms_per_byte
    spent_ms += cost.call_ms + active * (cost.expert_ms + weights_ms)
    return spent_ms + sequences * shape.top_k * shape.pair_flops * cost.ms_per_flop
