"""The best split of N devices into attention and expert ranks, and whether to split."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from contracts.errors import ConfigError, ResourceError
from planner.costs.cost_model import (
    Deployment,
    chunk_costs,
    serving_ms,
    stage_models,
    tokens_per_expert,
)
from planner.costs.memory import max_samples
from planner.costs.stages import PlanSpec, StageModels
from planner.schedule.alternatives import Alternative, Workload, alternatives
from planner.schedule.recurrence import makespan_of_layers_ms
from planner.schedule.schedule import schedule_of
from planner.schedule.solver import PlannedBatch

DEFAULT_MAX_R2 = 64
_BALANCED = 0.85  # busy fraction from which on a group counts as busy


class Split(NamedTuple):
    """The plan of one split of the devices.

    planned: None if the split is impossible; `problem` has the reason.
    layers: stages of each layer if layers differ; `spec` then has their means.
    """

    deployment: Deployment
    spec: PlanSpec | None
    planned: PlannedBatch | None
    problem: str = ""
    layers: tuple[StageModels, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Return the rate of all attention ranks together; 0 without a plan."""
        if self.planned is None:
            return 0.0
        return self.deployment.attention_ranks * self.planned.samples_per_s


class SplitComparison(NamedTuple):
    """The best split against the same devices without a split."""

    best: Split
    splits: list[Split]
    others: list[Alternative]
    disaggregate: bool
    advice: str


Solve = Callable[[PlanSpec], PlannedBatch]


def plan_spec(workload: Workload, deployment: Deployment, max_r2: int = DEFAULT_MAX_R2) -> PlanSpec:
    """Return the planning problem of one split, with its batch bounded by memory.

    Raises ResourceError if nothing fits, ConfigError if the hardware has no figures for the split.
    """
    shape, hardware = workload.shape, workload.hardware
    if deployment.expert_ranks > shape.num_experts:
        raise ConfigError(
            f"expert_ranks={deployment.expert_ranks}: the model has {shape.num_experts} experts, "
            "and every expert rank needs one: lower it"
        )
    spread = workload.routing(deployment.expert_ranks).mean
    most = max_samples(shape, deployment, workload.usable_bytes, spread)
    try:
        return PlanSpec(
            stages=stage_models(shape, hardware, deployment, workload.backend, spread),
            tokens_per_expert_per_sample=tokens_per_expert(shape, deployment),
            num_layers=shape.moe_layers,
            max_samples=min(most, workload.max_samples),
            max_r2=max_r2,
            has_shared=shape.num_shared_experts > 0,
            **chunk_costs(hardware.attention, shape, deployment),
        )
    except ValueError as error:  # raised by stages.py, with the names of the file's fields
        raise ConfigError(str(error)) from None


def layer_stages(workload: Workload, deployment: Deployment) -> tuple[StageModels, ...]:
    """Return the stages of each MoE layer, () if all layers are alike. Raises ConfigError."""
    routing = workload.routing(deployment.expert_ranks)
    if routing.is_even:
        return ()
    shape, hardware, backend = workload.shape, workload.hardware, workload.backend
    return tuple(
        stage_models(shape, hardware, deployment, backend, spread) for spread in routing.layers
    )


def with_overhead(
    planned: PlannedBatch,
    spec: PlanSpec,
    layers: Sequence[StageModels],
    workload: Workload | None = None,
) -> PlannedBatch:
    """Return `planned` with the makespan of its actual layers and a batch's time outside of them.

    A plan is found for the mean of the layers. That mean is too short if different stages limit
    different layers.
    """
    makespan_ms = planned.makespan_ms
    if layers:
        makespan_ms = makespan_of_layers_ms(
            [
                schedule_of(msgspec.structs.replace(spec, stages=stages), planned.plan)
                for stages in layers
            ]
        )
    if workload is not None:
        makespan_ms += serving_ms(
            workload.hardware,
            workload.shape,
            micro_batches=planned.plan.r1,
            sequences=planned.samples,
            tokens=planned.samples * workload.sequence_tokens,
        )
    return msgspec.structs.replace(planned, makespan_ms=makespan_ms)


def plan_split(workload: Workload, deployment: Deployment, solve: Solve, max_r2: int) -> Split:
    """Return the split; if it is impossible, `problem` has the reason."""
    try:
        return planned_split(workload, deployment, solve, max_r2)
    except (ConfigError, ResourceError) as error:
        return Split(deployment, None, None, error.message)


def planned_split(workload: Workload, deployment: Deployment, solve: Solve, max_r2: int) -> Split:
    """Return the split. Raises the errors of `plan_spec`."""
    spec = plan_spec(workload, deployment, max_r2)
    layers = layer_stages(workload, deployment)
    planned = with_overhead(solve(spec), spec, layers, workload)
    return Split(deployment, spec, planned, layers=layers)


def search(workload: Workload, solve: Solve, max_r2: int = DEFAULT_MAX_R2) -> SplitComparison:
    """Compare all splits of the workload's devices. Raises ResourceError if none is possible."""
    devices = workload.devices
    splits = [
        plan_split(workload, workload.deployment(ranks, devices - ranks), solve, max_r2)
        for ranks in range(1, devices)
    ]
    return judge(workload, splits)


def judge(workload: Workload, splits: list[Split]) -> SplitComparison:
    """Compare the best of `splits` with the same devices without a split.

    Raises ResourceError if none of `splits` is possible.
    """
    best = max(splits, key=lambda split: split.samples_per_s)
    if best.planned is None:
        raise ResourceError(_no_split_fits(workload, splits))
    others = alternatives(workload)
    rival = max(others, key=lambda other: other.samples_per_s)
    disaggregate = best.samples_per_s > rival.samples_per_s
    advice = _advice(best, rival, disaggregate)
    if workload.cores is not None:
        advice += (
            f" These figures assume a core for each of {workload.devices} ranks; the hardware file "
            f"has {workload.cores}."
        )
    return SplitComparison(best, splits, others, disaggregate, advice)


def busy_fractions(split: Split) -> dict[str, float]:
    """Return the busy fraction of the makespan per resource: attention rank, links, expert rank."""
    assert split.planned is not None
    assert split.spec is not None
    schedule = schedule_of(split.spec, split.planned.plan)
    layer_ms = dict.fromkeys(("attention ranks", "expert ranks", "A2E", "E2A"), 0.0)
    for times in schedule.micro_batches:
        layer_ms["attention ranks"] += times.attention_ms + times.shared_ms
        for group in times.groups:
            layer_ms["expert ranks"] += group.repeats * group.expert_ms
            layer_ms["A2E"] += group.repeats * group.a2e_ms
            layer_ms["E2A"] += group.repeats * group.e2a_ms
    whole_ms = split.planned.makespan_ms / schedule.num_layers
    return {name: busy_ms / whole_ms for name, busy_ms in layer_ms.items()}


def _advice(best: Split, rival: Alternative, disaggregate: bool) -> str:
    deployment, parts = best.deployment, busy_fractions(best)
    ours = (
        f"{deployment.attention_ranks} + {deployment.expert_ranks} ranks do "
        f"{best.samples_per_s:.4g} samples/s"
    )
    busy = ", ".join(f"{name} {part:.0%}" for name, part in parts.items())
    if rival.samples_per_s == 0.0:
        return f"Disaggregate: {ours}; without a split the model does not fit. Busy: {busy}."
    ratio = best.samples_per_s / rival.samples_per_s
    theirs = f"{ratio:.2f}x the {rival.samples_per_s:.4g} of {rival.name}"
    waits = f"{rival.name} waits for communication {rival.exposed_fraction:.0%} of the time"
    if disaggregate:
        return f"Disaggregate: {ours}, {theirs}; {waits}. Busy: {busy}."
    return f"Do not disaggregate here: {ours}, {theirs}. {_why(parts)}; {waits}. Busy: {busy}."


def _why(parts: dict[str, float]) -> str:
    """Return the reason a split does not win: a busy link, an idle group or many small tasks."""
    groups = ("attention ranks", "expert ranks")
    if max(parts["A2E"], parts["E2A"]) > max(parts[group] for group in groups):
        return "The links between the groups are the bottleneck"
    idle = min(groups, key=lambda group: parts[group])
    if parts[idle] < _BALANCED:
        return f"The groups are out of balance: {idle} compute {parts[idle]:.0%} of the time"
    return "Both groups are busy, but start more and smaller tasks"


def _no_split_fits(workload: Workload, splits: list[Split]) -> str:
    # The split with the most expert ranks represents all: experts are most of the weights.
    first = splits[0]
    ranks = f"{first.deployment.attention_ranks} + {first.deployment.expert_ranks}"
    return f"devices={workload.devices}: no split fits; {ranks}: {first.problem}"
