"""Throughput of the same devices without disaggregation.

Two ways to use N devices without two groups, on the same coefficients and memory, with the
communication volumes of MoE-Prefill's Table 1 (per device and layer; reconstructed):

    colocated DP+EP    every device attends and holds E/N experts: 2 all-to-alls of activations
    weight gathering   every device attends and computes all experts: 1 all-gather of weights, of
                       (N-1)/N of a layer's experts, while the layer before computes
"""

from typing import NamedTuple

from contracts.errors import ConfigError
from contracts.hardware import Hardware, LinkCost
from planner.costs.cost_model import (
    Deployment,
    Direction,
    attention_model,
    expert_model,
    find_link,
    serving_ms,
    shared_model,
    tokens_per_expert,
)
from planner.costs.memory import rank_memories
from planner.costs.model_shape import ModelShape
from planner.costs.prefill_modes import (
    PARTS,
    LayerMs,
    PrefillGroup,
    exchange_ms,
    exchanged_ms,
    gather_ms,
    gathered_ms,
)
from planner.costs.routing_shape import (
    RoutingByRanks,
    RoutingShape,
    Spread,
    uniform,
    uniform_spread,
)
from planner.costs.stages import FREE

MAX_SAMPLES = 1024  # per device; beyond, throughput no longer changes


class Alternative(NamedTuple):
    """Throughput of one alternative.

    samples_per_s: of all devices, 0 if it does not fit. samples: per device and pass.
    exposed_fraction: of the makespan, in which a device waits for communication.
    """

    name: str
    samples_per_s: float
    makespan_ms: float
    samples: int
    exposed_fraction: float
    note: str


class Workload(NamedTuple):
    """The load of `devices` devices; routing_of: None for uniform routing."""

    shape: ModelShape
    hardware: Hardware
    devices: int
    sequence_tokens: int
    context_tokens: int
    usable_bytes: float
    max_samples: int = MAX_SAMPLES
    backend: str | None = None
    routing_of: RoutingByRanks | None = None

    def routing(self, ranks: int) -> RoutingShape:
        """Return the routing with experts divided among `ranks`."""
        return uniform(self.shape, ranks) if self.routing_of is None else self.routing_of(ranks)

    @property
    def cores(self) -> int | None:
        """Return the number of cores if ranks have to share them, else None."""
        hardware = self.hardware
        if not hardware.shareable or hardware.devices is None or hardware.devices >= self.devices:
            return None
        return hardware.devices

    def deployment(self, attention_ranks: int, expert_ranks: int) -> Deployment:
        return Deployment(
            attention_ranks=attention_ranks,
            expert_ranks=expert_ranks,
            sequence_tokens=self.sequence_tokens,
            context_tokens=self.context_tokens,
        )


def alternatives(workload: Workload) -> list[Alternative]:
    return [_colocated(workload), _weight_gathering(workload)]


def _compute_ms(workload: Workload, deployment: Deployment, samples: int, spread: Spread) -> float:
    """Return the time of one layer on a device with both roles."""
    shape, hardware = workload.shape, workload.hardware
    attention = attention_model(hardware.attention, shape, deployment)
    shared = shared_model(hardware, shape, deployment) or FREE
    expert = expert_model(hardware, shape, spread)
    me = samples * tokens_per_expert(shape, deployment)
    return attention.at(samples) + shared.at(samples) + expert.at(me)


def _colocated(workload: Workload) -> Alternative:
    """Return the better of one batch and two half-batches, at the bound of their overlap."""
    name, devices, shape = "colocated DP+EP", workload.devices, workload.shape
    deployment, routing = workload.deployment(devices, devices), workload.routing(devices)
    memories = rank_memories(shape, deployment, workload.usable_bytes, routing.mean)
    weight_bytes = sum(memory.weight_bytes for memory in memories)
    samples = _fitting(workload, weight_bytes, sum(memory.sample_bytes for memory in memories))
    if samples < 1:
        return _does_not_fit(name, weight_bytes, workload)
    found = []
    for parts in (parts for parts in PARTS if parts <= samples):
        part = samples // parts
        times = [_colocated_ms(workload, deployment, part, spread) for spread in routing.layers]
        each_ms = [exchanged_ms(parts, layer) for layer in times]
        makespan_ms = shape.moe_layers * sum(each_ms) / len(each_ms)
        exposed = 1.0 - parts * sum(layer.compute for layer in times) / sum(each_ms)
        note = f"{part * parts} samples a device" + (", two half-batches" if parts == 2 else "")
        found.append(_alternative(name, workload, part * parts, makespan_ms, exposed, note))
    return max(found, key=lambda each: each.samples_per_s)


def _colocated_ms(
    workload: Workload, deployment: Deployment, samples: int, spread: Spread
) -> LayerMs:
    moved_ms = 0.0
    if workload.devices > 1:  # else the hardware may have no links
        me = samples * tokens_per_expert(workload.shape, deployment)
        moved_ms = exchange_ms(prefill_group(workload), spread, me)
    return LayerMs(_compute_ms(workload, deployment, samples, spread), moved_ms)


def _weight_gathering(workload: Workload) -> Alternative:
    """Return the throughput with the first layer resident and two more full layers buffered."""
    name, devices, shape = "weight gathering", workload.devices, workload.shape
    # One rank of each kind: all tokens of a device are computed by all experts on it.
    deployment, everything = workload.deployment(1, 1), uniform_spread(shape, 1)
    attention, expert = rank_memories(shape, deployment, workload.usable_bytes)
    layer_bytes = expert.weight_bytes / shape.moe_layers
    whole_layers = 1 if devices == 1 else min(3, shape.moe_layers)
    shards_bytes = expert.weight_bytes * shape.experts_per_rank(devices) / shape.num_experts
    weight_bytes = attention.weight_bytes + shards_bytes
    if devices > 1:
        weight_bytes += whole_layers * layer_bytes
    samples = _fitting(workload, weight_bytes, attention.sample_bytes + expert.sample_bytes)
    if samples < 1:
        return _does_not_fit(name, weight_bytes, workload)
    compute_ms = _compute_ms(workload, deployment, samples, everything)
    moved_ms = 0.0
    if devices > 1:
        moved_ms = gather_ms(any_split(workload, "a2e"), devices, layer_bytes)
    makespan_ms = gathered_ms(shape.moe_layers, LayerMs(compute_ms, moved_ms))
    exposed = 1.0 - shape.moe_layers * compute_ms / makespan_ms
    note = (
        f"{samples} samples a device, gather {moved_ms:.3g} ms a layer, compute {compute_ms:.3g} ms"
    )
    return _alternative(name, workload, samples, makespan_ms, exposed, note)


def prefill_group(workload: Workload) -> PrefillGroup:
    """Return the devices as prefill workers. Raises ConfigError if the hardware lacks figures."""
    return PrefillGroup(
        workload.shape,
        workload.hardware,
        workload.devices,
        any_split(workload, "a2e"),
        any_split(workload, "e2a"),
        workload.routing(workload.devices),
    )


def any_split(workload: Workload, direction: Direction) -> LinkCost:
    """Return the link's figures for all devices, else those of the most even split in the file."""
    hardware, devices = workload.hardware, workload.devices
    try:
        return find_link(
            hardware, workload.deployment(devices, devices), direction, workload.backend
        )
    except ConfigError:
        fitting = [link for link in hardware.links if link.direction in (direction, "both")]
        if not fitting:
            raise
        return min(
            fitting, key=lambda link: abs((link.attention_ranks or 1) - (link.expert_ranks or 1))
        )


def _fitting(workload: Workload, weight_bytes: float, sample_bytes: float) -> int:
    room = int((workload.usable_bytes - weight_bytes) // sample_bytes)
    return max(0, min(room, workload.max_samples))


def _alternative(
    name: str, workload: Workload, samples: int, makespan_ms: float, exposed: float, note: str
) -> Alternative:
    makespan_ms += serving_ms(
        workload.hardware,
        workload.shape,
        micro_batches=1,
        sequences=samples,
        tokens=samples * workload.sequence_tokens,
    )
    per_s = 1e3 * workload.devices * samples / makespan_ms
    return Alternative(name, per_s, makespan_ms, samples, max(0.0, exposed), note)


def _does_not_fit(name: str, weight_bytes: float, workload: Workload) -> Alternative:
    gib = 1 << 30
    note = (
        f"does not fit: weights of {weight_bytes / gib:.1f} GiB a device beside one sample, "
        f"{workload.usable_bytes / gib:.1f} GiB usable"
    )
    return Alternative(name, 0.0, 0.0, 0, 0.0, note)
