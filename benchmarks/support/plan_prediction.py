"""Predicted times of a plan on ranks whose stages have been measured: the planner's cost models and
replay, and how much two cores of one machine slow each other down.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.support.stage_times import (
    COMPUTED,
    SENT,
    Chunks,
    Samples,
    StageSample,
    micro_batches,
)
from contracts.hardware import FORMAT_VERSION, Fit, Hardware, LinkCost
from contracts.plan import Plan
from contracts.traces import Stage
from planner.costs.cost_model import (
    PAIR_BYTES,
    Deployment,
    attention_ms,
    chunk_costs,
    expert_model,
    shared_model,
    stage_models,
    tokens_per_expert,
)
from planner.costs.model_shape import ModelShape, layer_mean_batch
from planner.costs.routing_shape import uniform_spread
from planner.costs.stage_fit import (
    AttentionSample,
    ExpertSample,
    SizedSample,
    fit_attention,
    fit_expert,
    fit_link,
    fit_shared,
)
from planner.costs.stages import PlanSpec
from planner.schedule.batch_plan import token_group_bounds
from planner.schedule.deployment_search import DEFAULT_MAX_R2
from planner.schedule.schedule import GroupRun, MicroBatchTimes, Replay, Schedule, replay
from tests.support.spans import length, union

_ROUNDS = 4  # of two estimates that need each other
_BESIDE = 0.5  # of a task's time, from which on it tells how much the other core slows it down

_ATTENTION_SIDE = COMPUTED[:2]


class Costs(NamedTuple):
    """slowdown: by stage, the part that a task takes longer while the other group computes."""

    hardware: Hardware
    slowdown: dict[Stage, float]


def packet_bytes(shape: ModelShape, stage: Stage, tokens: int) -> int:
    """Payload of a token group of `tokens` rows, with one expert rank, which all pairs are for."""
    pairs = tokens * shape.top_k * PAIR_BYTES if stage is Stage.A2E else 0
    return tokens * shape.hidden_size * shape.element_bytes + pairs


# --- from samples to costs


def fit_costs(shape: ModelShape, measured: Sequence[StageSample]) -> Costs:
    """Costs of tasks that run alone, and how much the other core slows them down."""
    slowdown = dict.fromkeys(COMPUTED, 0.0)
    for _ in range(_ROUNDS):
        hardware = _fit_alone(shape, measured, slowdown)
        predictor = Predictor(shape, Costs(hardware, slowdown))
        excess = defaultdict(list)
        for sample in measured:
            if sample.beside_fraction >= _BESIDE:
                ratio = sample.ms / predictor.alone_ms(sample)
                excess[sample.stage].append((ratio - 1) / sample.beside_fraction)
        slowdown = {stage: max(0.0, _median(excess[stage])) for stage in COMPUTED}
    return Costs(hardware, slowdown)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _fit_alone(
    shape: ModelShape, measured: Sequence[StageSample], slowdown: dict[Stage, float]
) -> Hardware:
    times = _times_alone(measured, slowdown)
    attention, attention_fit = fit_attention(
        shape,
        [AttentionSample(_label(chunks), chunks, None, ms)
         for chunks, _, ms in times[Stage.ATTENTION]],
    )  # fmt: skip
    expert, expert_fit = fit_expert(
        shape,
        [ExpertSample(f"{tokens} tokens", shape.num_experts, tokens * shape.top_k, ms)
         for _, tokens, ms in times[Stage.EXPERT]],
    )  # fmt: skip
    shared = None
    if times[Stage.SHARED]:
        shared, _ = fit_shared(
            shape, [SizedSample(_label(c), tokens, ms) for c, tokens, ms in times[Stage.SHARED]]
        )
    links = [_fit_link(shape, stage, times[stage]) for stage in SENT]
    return Hardware(
        version=FORMAT_VERSION,
        name="ranks",
        kind="measured",
        source="batches on these ranks, over this link",
        device="one core",
        memory_bytes=1,  # plans are limited by samples here
        attention=attention,
        shared=shared,
        expert=expert,
        links=[cost for cost, _ in links],
        fits=[attention_fit, expert_fit, *(fit for _, fit in links)],
    )


def _times_alone(
    measured: Sequence[StageSample], slowdown: dict[Stage, float]
) -> dict[Stage, list[tuple[Chunks, int, float]]]:
    """(chunks, tokens, ms) by stage: medians of equal tasks, as if nothing had run beside them."""
    equal: defaultdict[tuple[Stage, Chunks, int], list[float]] = defaultdict(list)
    for sample in measured:
        factor = 1 + slowdown.get(sample.stage, 0.0) * sample.beside_fraction
        equal[sample.stage, sample.chunks, sample.tokens].append(sample.ms / factor)
    times: defaultdict[Stage, list[tuple[Chunks, int, float]]] = defaultdict(list)
    for (stage, chunks, tokens), each_ms in equal.items():
        times[stage].append((chunks, tokens, statistics.median(each_ms)))
    return times


def _fit_link(
    shape: ModelShape, stage: Stage, times: Sequence[tuple[Chunks, int, float]]
) -> tuple[LinkCost, Fit]:
    samples = [
        SizedSample(f"{tokens} tokens", packet_bytes(shape, stage, tokens), ms)
        for _, tokens, ms in times
    ]
    return fit_link("tcp", "a2e" if stage is Stage.A2E else "e2a", samples)


def _label(chunks: Chunks) -> str:
    return f"{len(chunks)} x [{chunks[0][0]}, {chunks[0][1]})"


# --- from costs to a planning problem, and to the timeline of a plan


def plan_spec(shape: ModelShape, costs: Costs, tokens: int, max_samples: int) -> PlanSpec:
    """The planning problem of samples of `tokens` tokens, one rank on each side, whose stages run
    beside the other group's."""
    deployment = Deployment(attention_ranks=1, expert_ranks=1, sequence_tokens=tokens)
    stages = stage_models(shape, costs.hardware, deployment, "tcp")
    return PlanSpec(
        stages=stages,
        tokens_per_expert_per_sample=tokens_per_expert(shape, deployment),
        num_layers=shape.moe_layers,
        max_samples=max_samples,
        max_r2=DEFAULT_MAX_R2,
        has_shared=shape.num_shared_experts > 0,
        **chunk_costs(costs.hardware.attention, shape, deployment),
    )


class Predictor:
    """Timelines of plans."""

    def __init__(self, shape: ModelShape, costs: Costs) -> None:
        self.shape = shape
        self.costs = costs
        hardware = costs.hardware
        one_token = Deployment(attention_ranks=1, expert_ranks=1, sequence_tokens=1)
        self._shared = shared_model(hardware, shape, one_token)
        self._expert = expert_model(hardware, shape, uniform_spread(shape, 1))

    def replay(self, plan: Plan, samples: Samples) -> Replay:
        """The plan's timeline, tasks slowed down where both groups compute."""
        stretch = dict.fromkeys(COMPUTED, 1.0)
        for _ in range(_ROUNDS):
            timeline = replay(self._schedule(plan, samples, stretch))
            beside = _beside_fractions(timeline)
            stretch = {s: 1 + self.costs.slowdown.get(s, 0.0) * beside[s] for s in COMPUTED}
        return timeline

    def alone_ms(self, sample: StageSample) -> float:
        """What the task takes while the other group does not compute, as `costs` have it."""
        return self._task_ms(sample.stage, sample.chunks, sample.tokens)

    def _task_ms(self, stage: Stage, chunks: Chunks, tokens: int) -> float:
        if stage is Stage.ATTENTION:
            work = layer_mean_batch(self.shape, list(chunks))
            return attention_ms(self.costs.hardware.attention, self.shape, work)
        if stage is Stage.SHARED:
            return 0.0 if self._shared is None else self._shared.at(tokens)
        if stage is Stage.EXPERT:
            return self._expert.at(tokens * self.shape.top_k / self.shape.num_experts)
        link = self.costs.hardware.links[SENT.index(stage)]
        return link.alpha_ms + link.ms_per_byte * packet_bytes(self.shape, stage, tokens)

    def _schedule(self, plan: Plan, samples: Samples, stretch: dict[Stage, float]) -> Schedule:
        def expected_ms(stage: Stage, chunks: Chunks, tokens: int) -> float:
            alone_ms = self._task_ms(stage, chunks, tokens)
            return alone_ms * stretch.get(stage, 1.0)

        times = []
        for chunks in micro_batches(plan, samples):
            tokens = sum(stop - start for start, stop in chunks)
            sizes = [stop - start for start, stop in token_group_bounds(tokens, plan.r2)]
            groups = tuple(
                GroupRun(len(list(run)), *(expected_ms(stage, chunks, size)
                                           for stage in (Stage.A2E, Stage.EXPERT, Stage.E2A)))
                for size, run in itertools.groupby(sizes)
            )  # fmt: skip
            shared_ms = expected_ms(Stage.SHARED, chunks, tokens) if self._shared else 0.0
            attention_ms = expected_ms(Stage.ATTENTION, chunks, tokens)
            times.append(MicroBatchTimes(attention_ms, shared_ms, groups))
        return Schedule(tuple(times), self.shape.moe_layers, plan.order, plan.shared_lag)


def _beside_fractions(timeline: Replay) -> dict[Stage, float]:
    """Of each stage's time, the part in which the other group computes too."""
    busy = {
        stage: union([(s.start_s, s.end_s) for s in timeline.spans if s.stage is stage])
        for stage in COMPUTED
    }
    side = union([interval for stage in _ATTENTION_SIDE for interval in busy[stage]])
    found = {}
    for stage, own in busy.items():
        other = side if stage is Stage.EXPERT else busy[Stage.EXPERT]
        both_s = length(own) + length(other) - length(union([*own, *other]))
        found[stage] = both_s / length(own) if own else 0.0
    return found
