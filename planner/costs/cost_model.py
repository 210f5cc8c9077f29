"""Stage models of a deployment, from the model's shape and a machine's coefficients.

Letters: E experts, K top-k, D model dim, e slots of the fullest expert rank. A `Spread` describes
how tokens spread over expert ranks; the default is uniform. docs/notation.md has the formulas.
"""

from typing import Literal, NamedTuple

import msgspec

from contracts.errors import ConfigError
from contracts.hardware import AttentionCost, Hardware, LinkCost, SharedCost
from planner.costs.model_shape import AttentionWork, ModelShape, layer_mean_batch, layer_mean_work
from planner.costs.routing_shape import RankShare, Spread, uniform_spread
from planner.costs.stages import FREE, Linear, StageModels

PAIR_BYTES = 8  # an index (int32) and a weight (float32) travel with each (token, expert) pair

Direction = Literal["a2e", "e2a"]


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the two groups and of their samples.

    A sample has sequence_tokens new tokens behind context_tokens cached ones (decode: 1 new token).
    """

    attention_ranks: int
    expert_ranks: int
    sequence_tokens: int
    context_tokens: int = 0

    @property
    def devices(self) -> int:
        return self.attention_ranks + self.expert_ranks


def attention_ms(cost: AttentionCost, shape: ModelShape, work: AttentionWork) -> float:
    """Return the time of one layer's attention for one micro-batch that is sent to one rank."""
    return cost.call_ms + shape.projections * cost.projection_ms + _per_sample_ms(cost, work)


def attention_model(
    cost: AttentionCost, shape: ModelShape, deployment: Deployment, spread: Spread | None = None
) -> Linear:
    """Return the attention model; x: samples of a micro-batch.

    spread: None without packets or with packets to one rank. Calls are exact for one sample and for
    full groups.
    """
    packets = _packets_model(cost, shape, spread)
    start, work = deployment.context_tokens, _sample_work(shape, deployment)
    single_sample = layer_mean_batch(shape, [(start, start + deployment.sequence_tokens)])
    first_call_ms = max(0.0, _per_sample_ms(cost, single_sample) - _per_sample_ms(cost, work))
    alpha_ms = (
        cost.call_ms + shape.projections * cost.projection_ms + packets.alpha_ms + first_call_ms
    )
    packets_ms = packets.beta_ms * deployment.sequence_tokens
    return Linear(alpha_ms, _per_sample_ms(cost, work) + packets_ms)


def _packets_model(cost: AttentionCost, shape: ModelShape, spread: Spread | None) -> Linear:
    """Return the cost of packets to more than one expert rank; x: tokens."""
    if spread is None or spread.ranks == 1:
        return FREE
    row_bytes = shape.hidden_size * shape.element_bytes
    more_copies = max(0.0, spread.copies - 1)
    return Linear(
        (spread.ranks - 1) * cost.packet_ms, more_copies * row_bytes * cost.copied_ms_per_byte
    )


def serving_ms(
    hardware: Hardware, shape: ModelShape, *, micro_batches: int, sequences: float, tokens: float
) -> float:
    """Return the time of a batch outside of its layers on an attention rank.

    Includes the logits of one row per sequence; 0 if it was not measured.
    """
    cost = hardware.serving
    if cost is None:
        return 0.0
    logits_ms = 2.0 * shape.hidden_size * shape.vocab_size * hardware.attention.linear_ms_per_flop
    return (
        cost.batch_ms
        + cost.micro_batch_ms * micro_batches
        + (cost.sequence_ms + logits_ms) * sequences
        + cost.token_ms * tokens
    )


def chunk_costs(cost: AttentionCost, shape: ModelShape, deployment: Deployment) -> dict[str, float]:
    """Return the costs of cutting a sample along its length: fields attention_* of `PlanSpec`."""
    start, new = deployment.context_tokens, deployment.sequence_tokens
    work = _sample_work(shape, deployment)
    behind = layer_mean_work(shape, start + new, start + new + 1)  # reads the whole sample
    pairs_ms = cost.attended_ms_per_flop * work.attended_flops
    return {
        "attention_quadratic_fraction": pairs_ms / _per_sample_ms(cost, work),
        "attention_chunk_ms": cost.sequence_ms + min(1.0, work.prompt_calls) * cost.prompt_call_ms,
        "attention_context_ms": cost.context_ms_per_byte * behind.context_bytes,
    }


def shared_model(hardware: Hardware, shape: ModelShape, deployment: Deployment) -> Linear | None:
    """Return the shared experts' model, None without any; x: samples of a micro-batch."""
    if shape.num_shared_experts == 0:
        return None
    cost = hardware.shared
    if cost is None:
        expert = hardware.expert
        cost = SharedCost(call_ms=expert.call_ms + expert.expert_ms, ms_per_flop=expert.ms_per_flop)
    alpha_ms = cost.call_ms + 3 * shape.num_shared_experts * cost.projection_ms
    flops = 2.0 * shape.shared_elements * deployment.sequence_tokens
    return Linear(alpha_ms, flops * cost.ms_per_flop)


def expert_model(hardware: Hardware, shape: ModelShape, spread: Spread) -> Linear:
    """Return the expert model; x: mean tokens per expert.

    All slots of the rank count as active (FinDEP, Eq. 3); pairs are the busiest rank's.
    """
    cost = hardware.expert
    weights_ms = shape.expert_elements * shape.element_bytes * cost.weight_ms_per_byte
    alpha_ms = cost.call_ms + spread.slots * (cost.expert_ms + weights_ms)
    return Linear(alpha_ms, spread.busiest.pairs * shape.pair_flops * cost.ms_per_flop)


def link_model(
    link: LinkCost,
    shape: ModelShape,
    deployment: Deployment,
    direction: Direction,
    spread: Spread | None = None,
) -> Linear:
    """Return the link model; x: tokens per expert of a token group.

    Bytes are the busiest rank's: of one attention rank with all expert ranks, or of one expert rank
    with all attention ranks.
    """
    ag, eg = deployment.attention_ranks, deployment.expert_ranks
    spread = spread or uniform_spread(shape, eg)
    tokens = shape.num_experts / (ag * shape.top_k)  # of one attention rank, for x = 1
    row_bytes = shape.hidden_size * shape.element_bytes

    if not link.deduplicated:
        pairs = tokens * shape.top_k * spread.busiest.pairs / shape.num_experts
        return Linear(link.alpha_ms, ag * pairs * row_bytes * link.ms_per_byte)

    def packet_bytes(share: RankShare) -> float:
        pairs = tokens * shape.top_k * share.pairs / shape.num_experts
        pairs_bytes = pairs * PAIR_BYTES if direction == "a2e" else 0.0
        return tokens * share.rows * row_bytes + pairs_bytes

    most_bytes = max(ag * packet_bytes(spread.busiest), eg * packet_bytes(spread.mean))
    return Linear(link.alpha_ms, most_bytes * link.ms_per_byte)


def find_link(
    hardware: Hardware, deployment: Deployment, direction: Direction, backend: str | None = None
) -> LinkCost:
    """Return the link's coefficients for this split and backend (default: the file's first).

    Raises ConfigError.
    """
    backends = list(dict.fromkeys(link.backend for link in hardware.links))
    if backend is not None and backend not in backends:
        raise ConfigError(
            f"backend={backend}: hardware {hardware.name} has figures for {', '.join(backends)}"
        )
    chosen_backend = backend or backends[0]
    for link in hardware.links:
        if link.backend != chosen_backend or link.direction not in (direction, "both"):
            continue
        if link.attention_ranks in (None, deployment.attention_ranks) and link.expert_ranks in (
            None,
            deployment.expert_ranks,
        ):
            return link
    splits = [f"{link.attention_ranks}+{link.expert_ranks}" for link in hardware.links]
    raise ConfigError(
        f"attention_ranks={deployment.attention_ranks}, expert_ranks={deployment.expert_ranks}: "
        f"hardware {hardware.name} has {direction} figures for {', '.join(splits)} only"
    )


def stage_models(
    shape: ModelShape,
    hardware: Hardware,
    deployment: Deployment,
    backend: str | None = None,
    spread: Spread | None = None,
) -> StageModels:
    """Return the stage models. Raises ConfigError if the hardware lacks figures for the split."""
    spread = spread or uniform_spread(shape, deployment.expert_ranks)
    links = {
        direction: link_model(
            find_link(hardware, deployment, direction, backend),
            shape,
            deployment,
            direction,
            spread,
        )
        for direction in ("a2e", "e2a")
    }
    return StageModels(
        attention=attention_model(hardware.attention, shape, deployment, spread),
        shared=shared_model(hardware, shape, deployment),
        expert=expert_model(hardware, shape, spread),
        a2e=links["a2e"],
        e2a=links["e2a"],
    )


def tokens_per_expert(shape: ModelShape, deployment: Deployment) -> float:
    """Return the tokens per expert of one sample on each attention rank: ag * K * S / E."""
    tokens = deployment.attention_ranks * deployment.sequence_tokens
    return tokens * shape.top_k / shape.num_experts


def _sample_work(shape: ModelShape, deployment: Deployment) -> AttentionWork:
    start = deployment.context_tokens
    return layer_mean_work(shape, start, start + deployment.sequence_tokens)


def _per_sample_ms(cost: AttentionCost, work: AttentionWork) -> float:
    return (
        cost.sequence_ms * work.sequences
        + cost.linear_ms_per_flop * work.linear_flops
        + cost.attended_ms_per_flop * work.attended_flops
        + cost.context_ms_per_byte * work.context_bytes
        + cost.prompt_call_ms * work.prompt_calls
        + cost.decode_call_ms * work.decode_calls
    )


_UNIT = LinkCost(backend="", direction="both", alpha_ms=0.0, ms_per_byte=1.0)


class ResizeFactors(NamedTuple):
    """Ratios of costs after a resize to costs before.

    call: start of an expert call. token: of a token in it. a2e, e2a: of a token on a link.
    """

    call: float
    token: float
    a2e: float
    e2a: float


def resize_factors(shape: ModelShape, now: Deployment, then: Deployment) -> ResizeFactors:
    """Return the factors from `now` to `then`.

    The start of an expert call is mostly the reading of weights, so it scales with the experts of a
    rank. Links carry the busiest rank's bytes, as in `link_model`; routing is assumed to stay as
    even as it is.
    """
    before, after = (uniform_spread(shape, each.expert_ranks) for each in (now, then))

    def link(direction: Direction) -> float:
        was, becomes = (link_model(_UNIT, shape, each, direction).beta_ms for each in (now, then))
        return becomes / was

    return ResizeFactors(
        after.slots / before.slots,
        after.busiest.pairs / before.busiest.pairs,
        link("a2e"),
        link("e2a"),
    )


def resized(
    stages: StageModels, shape: ModelShape, now: Deployment, then: Deployment
) -> StageModels:
    """Return the stages under `then`. Attention does not change."""
    by = resize_factors(shape, now, then)
    return msgspec.structs.replace(
        stages,
        expert=Linear(stages.expert.alpha_ms * by.call, stages.expert.beta_ms * by.token),
        a2e=Linear(stages.a2e.alpha_ms, stages.a2e.beta_ms * by.a2e),
        e2a=Linear(stages.e2a.alpha_ms, stages.e2a.beta_ms * by.e2a),
    )
