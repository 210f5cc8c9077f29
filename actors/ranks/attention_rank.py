"""An attention rank: a serving loop whose experts run on other ranks.

Channels, heartbeats and the planner's link have their own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.finisher import Finisher
from actors.batching.observer import DecodeCoalescer, LoopControl, Observer
from actors.batching.scheduler import Scheduler
from actors.channels.endpoint import Endpoint
from actors.channels.factory import rank_endpoint
from actors.channels.heartbeat import LoopWatchdog
from actors.engine.executor import Executor, ExecutorParts
from actors.moe.remote_backend import RemoteBackend
from actors.moe.routing_sample import RoutingSample
from actors.offload.cache_factory import predictor
from actors.planning.rank_planning import RankPlanning
from actors.ranks.rank import PeerConnector, Rank, RankHooks, Recording, recording
from actors.ranks.serving_loop import ServingParts
from actors.ranks.serving_rank import (
    Priorities,
    block_manager,
    load_half,
    prepare_process,
    serving_pool,
    serving_rank,
    unusable_checkpoint,
)
from actors.rebalance.placement_client import PlacementClient
from actors.telemetry.telemetry import RankMetrics
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.config import PriorityConfig
from contracts.errors import CheckpointError, NotFiniteError
from contracts.messages import Submit
from contracts.ranks import RankSpec
from contracts.requests import Priority, Sampling
from kernels.device import runs_on_device
from models.decoder.decode_graphs import DecodeGraphs
from models.decoder.decoder import AttentionHalf
from models.spec.model import ModelSpec
from models.weights.layout import attention_parameters
from planner.placement.slots import check_fits
from planner.scheduling.batching import (
    ALL,
    SEPARATE_BATCHES,
    BatchingPolicy,
    BatchSelection,
    coalesce_decodes,
    one_at_a_time,
)
from planner.scheduling.task_order import by_plan

WARM_UP_IDS = list(range(64))  # enough for two micro-batches and many experts
WARM_UP = Sampling(max_tokens=2, top_p=0.5, seed=0, ignore_eos=True)  # compiles the sampler too
NO_CLIENT = -1


def attention_rank(spec: RankSpec, *, batching: BatchingPolicy | None = None) -> Rank:
    """Load the weights and listen. Raises CheckpointError, ResourceError."""
    config = spec.config
    spec = prepare_process(spec)
    half, served = load_half(spec)
    check_fits(spec.placement, None, half.spec.num_experts, half.spec.moe_layers)
    cost_of_chunk = chunk_cost(half.spec)

    kv = serving_pool(half, config, ranks_on_node=spec.ranks_on_node)
    blocks = block_manager(kv, config.kv)
    scheduler = Scheduler(config.schedule, blocks)
    finisher = Finisher(half, max_context_tokens=served.max_context_tokens)

    watch = LoopWatchdog(
        spec.name, config.channel.step_timeout_s, monotonic_s, config.log.stall_threshold_s
    )
    telemetry = RankMetrics(spec, monotonic_s)
    planning = RankPlanning(
        spec,
        chunk_cost=cost_of_chunk,
        upcoming=lambda: scheduler.upcoming(_next_forms(config.priority, scheduler)),
        clock=monotonic_s,
        telemetry=telemetry,
        pool_tokens=blocks.num_blocks * config.kv.block_tokens,
    )
    endpoint = rank_endpoint(spec, half.device, monotonic_s)
    observers = (lambda _: watch.record_progress(), planning.observe)
    recorded = recording(spec, telemetry, endpoint.bytes_moved, *observers)
    sample = _sample(spec, half.spec, planning)
    backend, client = _experts(spec, half, endpoint, recorded, sample)
    parts = ExecutorParts(
        spec.name, half, kv, backend, finisher, recorded.timeline, monotonic_s, sample,
        DecodeGraphs.of(half, kv, config.schedule.cuda_graphs),
    )  # fmt: skip
    priorities = Priorities(config.priority, telemetry, spec.name)
    coalescer = DecodeCoalescer(
        config.priority, scheduler, monotonic_s, config.schedule.max_batch_sequences
    )
    preempting = coalesce_decodes(coalescer.slack_s, coalescer.free_places)
    by_default = preempting if config.priority.preempt else one_at_a_time

    def close() -> None:
        try:
            planning.link.close()
        finally:
            endpoint.close()

    serving = ServingParts(
        scheduler,
        Executor(
            parts,
            chunk_cost=cost_of_chunk,
            choice=priorities.preemption(by_plan, priorities.user.pick),
        ),
        finisher,
        watch,
        plan_of=planning.choose,
        close=close,
        observers=[
            planning,
            WarmUp(unusable_checkpoint(spec, half)),
            coalescer,
            PlacementStatus(client),
        ],
        batching=batching or priorities.batching(by_default),
    )
    joining = PeerConnector(endpoint, config.channel.heartbeat_timeout_s)
    hooks = RankHooks(joining, planning.link.join, planning.pin)
    return serving_rank(spec, served, serving, recorded, hooks)


def _next_forms(config: PriorityConfig, scheduler: Scheduler) -> Sequence[BatchSelection]:
    apart = config.preempt and all(map(scheduler.count, Priority))
    return SEPARATE_BATCHES if apart else (ALL,)


def _sample(spec: RankSpec, model: ModelSpec, planning: RankPlanning) -> RoutingSample | None:
    """Return the routing sample, or None if nothing needs it."""
    placing = spec.config.placement
    if placing.rebalance == "off" and placing.record is None:
        return None
    shape = len(model.moe_layers), model.top_k
    send = planning.link.report
    return RoutingSample(spec.name, placing.sample_tokens, shape, monotonic_s, send)


def _experts(
    spec: RankSpec,
    half: AttentionHalf,
    endpoint: Endpoint,
    recorded: Recording,
    sample: RoutingSample | None,
) -> tuple[RemoteBackend, PlacementClient]:
    model, config = half.spec, spec.config
    client = PlacementClient(
        endpoint,
        spec.placement,
        deadline_s=config.placement.move_timeout_s,
        check=lambda placement: check_fits(placement, None, model.num_experts, model.moe_layers),
        clock=monotonic_s,
    )
    _register_metrics(client, spec.name, recorded.metrics)
    # On a device a prediction would be read by the host.
    predicts = config.experts.is_bounded and not runs_on_device(half.device)
    backend = RemoteBackend(
        endpoint,
        client,
        recorded.timeline,
        reply_timeout_s=config.channel.reply_timeout_s,
        recovery_timeout_s=config.groups.recovery_timeout_s,
        predictor=predictor(spec, half) if predicts else None,
        sample=sample,
        half=half,
    )
    backend.counts.show(recorded.metrics, spec.name)
    return backend, client


def _register_metrics(client: PlacementClient, name: str, telemetry: RankMetrics) -> None:
    telemetry.read(metrics.PLACEMENT_GENERATION, name, of=lambda: client.generation)
    for kind in client.repairs:
        of = partial(client.repairs.__getitem__, kind)
        telemetry.read(metrics.REPAIRS, name, kind, of=of)


class PlacementStatus(Observer):
    """Reports placement and lost expert ranks in the status, and waiting requests to clients."""

    def __init__(self, client: PlacementClient) -> None:
        self._client = client
        self._waits = False

    def begin(self, loop: LoopControl) -> None:
        self._loop = loop

    def stepped(self) -> None:
        if self._client.waits != self._waits:
            self._waits = self._client.waits
            self._loop.report_waiting(self._waits)

    def sections(self) -> dict[str, dict[str, float]]:
        client = self._client
        placement: dict[str, float] = {"generation": client.generation, "ranks": client.ranks}
        placement["switches"] = client.switches
        lost = {name: one.epoch for name, one in client.absent.items() if one.epoch}
        found: dict[str, dict[str, float]] = {"placement": {**placement, **client.repairs}}
        return found | {"lost": dict(lost)} if lost else found

    def notes(self) -> dict[str, str]:
        absent = {name: one for name, one in self._client.absent.items() if one.is_lost}
        if not absent:
            return {}
        meanwhile = "failover active" if self._client.uses_stand_in else "requests wait"
        reasons = "; ".join(one.reason for one in absent.values())
        return {"experts": f"{', '.join(absent)} lost, {meanwhile}: {reasons}"}


class WarmUp(Observer):
    """Runs a first batch of its own, which takes several times as long as others."""

    def __init__(self, unusable_checkpoint: CheckpointError) -> None:
        """unusable_checkpoint: raised if its logits are not finite."""
        self._unusable_checkpoint = unusable_checkpoint

    def begin(self, loop: LoopControl) -> None:
        loop.admit(NO_CLIENT, Submit(request_id=0, token_ids=WARM_UP_IDS, sampling=WARM_UP))

    def completed(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if sequence.key[0] == NO_CLIENT and isinstance(sequence.failure, NotFiniteError):
                raise self._unusable_checkpoint


def chunk_cost(model: ModelSpec) -> Callable[[int, int], float]:
    """Return the relative attention cost of new tokens [start, stop): projections, scores, values.

    In attended tokens; FinDEP Eq. 1, for grouped-query attention.
    """
    attended_flops = 4 * model.num_heads * model.head_dim
    linear_tokens = 2 * attention_parameters(model) / attended_flops
    return lambda start, stop: (stop - start) * (linear_tokens + (start + stop) / 2)
