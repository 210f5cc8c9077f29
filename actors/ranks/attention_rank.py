"""An attention rank: a serving loop whose experts are on other ranks, joined by channels.

Channels, their heartbeats and the planner's link have threads of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from actors.batching.due_times import DueTimes
from actors.batching.finisher import Finisher
from actors.batching.observer import Observer, Serving
from actors.batching.patience import Patience
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.channels.base import Endpoint
from actors.channels.factory import rank_endpoint
from actors.channels.loop_watch import LoopWatch
from actors.engine.executor import Executor, ExecutorParts
from actors.experts.caching import foresight
from actors.experts.dispatch_counts import DispatchCounts
from actors.experts.following import Following
from actors.experts.remote_plane import RemotePlane
from actors.experts.routing_sample import RoutingSample
from actors.kv.block_manager import BlockManager
from actors.planning.rank_planning import RankPlanning
from actors.ranks.joining import Joining
from actors.ranks.memory import kv_pool_blocks
from actors.ranks.priorities import Priorities
from actors.ranks.rank import Links, Rank, Recording, recording
from actors.ranks.serving_parts import ServingParts
from actors.ranks.serving_rank import load_half, prepare_process, serving_rank, unusable
from actors.telemetry.rank_metrics import RankMetrics, growth
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.config import PriorityConfig
from contracts.errors import CheckpointError, NotFiniteError
from contracts.messages import Submit
from contracts.requests import Priority, Sampling
from contracts.worker import WorkerSpec
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from models.spec.model import ModelSpec
from models.weights.layout import attention_parameters
from planner.findep.orders import by_plan
from planner.placement.slots import check_fits
from planner.policies.batching import ALL, APART, BatchingPolicy, Form, one_at_a_time, patient

WARM_UP_IDS = list(range(64))  # enough for two micro-batches, and for many experts
WARM_UP = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
NOBODY = -1  # no client has this number


def attention_rank(spec: WorkerSpec, *, batching: BatchingPolicy | None = None) -> Rank:
    """Loads its weights and begins to listen. batching: None: as the configuration says. Raises
    CheckpointError, ResourceError."""
    started_s, config = monotonic_s(), spec.config
    prepare_process(spec)
    half, served = load_half(spec)
    check_fits(spec.placement, None, half.spec.num_experts, half.spec.moe_layers)
    chunk_cost = ChunkCost(half.spec)

    kv, blocks = _pool(spec, half)
    scheduler = Scheduler(config.schedule, blocks)
    finisher = Finisher(half, max_context_tokens=served.max_context_tokens)

    watch = LoopWatch(spec.name, config.channel.stuck_s, monotonic_s, config.log.stacks_after_s)
    telemetry = RankMetrics(spec, monotonic_s)
    planning = RankPlanning(
        spec,
        chunk_cost=chunk_cost,
        upcoming=lambda: scheduler.upcoming(_next_forms(config.priority, scheduler)),
        clock=monotonic_s,
        telemetry=telemetry,
        pool_tokens=blocks.num_blocks * config.kv.block_tokens,
    )
    endpoint = rank_endpoint(spec, half.device, monotonic_s)
    spans = config.trace.spans
    recorded = recording(telemetry, spans, lambda _: watch.moved(), planning.observe)
    recorded = recorded.following(endpoint.bytes_moved)
    sample = _sample(spec, half.spec, planning)
    plane, following = _experts(spec, half, endpoint, recorded, sample)
    parts = ExecutorParts(
        spec.name, half, kv, plane, finisher, recorded.timeline, monotonic_s, sample
    )
    priorities = Priorities(config.priority, telemetry, spec.name)
    due_times, patience = DueTimes(config.priority, monotonic_s), _patience(spec, scheduler)
    preempting = patient(patience.left_s, patience.places)
    by_default = preempting if config.priority.preempt else one_at_a_time

    def close() -> None:
        try:
            planning.close()
        finally:
            endpoint.close()

    serving = ServingParts(
        scheduler,
        Executor(
            parts,
            chunk_cost=chunk_cost,
            choice=priorities.preemption(by_plan, priorities.user.pick),
        ),
        finisher,
        watch,
        plan_of=planning.choose,
        close=close,
        observers=[planning, WarmUp(unusable(spec, half)), due_times, patience, Placed(following)],
        batching=batching or priorities.batching(by_default),
    )
    joining = Joining(endpoint, config.channel.silence_s)
    links = Links(joining, planning.join, planning.pin)
    return serving_rank(spec, served, serving, recorded, links, started_s=started_s)


def _next_forms(config: PriorityConfig, scheduler: Scheduler) -> Sequence[Form]:
    """What comes next, as far as that can be told."""
    apart = config.preempt and all(map(scheduler.count, Priority))
    return APART if apart else (ALL,)


def _pool(spec: WorkerSpec, half: AttentionHalf) -> tuple[KvPool, BlockManager]:
    """What holds K and V, and its books."""
    kv = spec.config.kv
    num_blocks = kv_pool_blocks(
        half.spec, half.dtype, spec.config, half.device, ranks_on_node=spec.ranks_on_node
    )
    return KvPool(half.spec, num_blocks, kv.block_tokens, half.dtype, half.device), BlockManager(
        num_blocks, prefix_cache=kv.prefix_cache, share_partial=kv.share_partial_blocks
    )


def _sample(spec: WorkerSpec, model: ModelSpec, planning: RankPlanning) -> RoutingSample | None:
    """None: nobody wants to know where tokens go."""
    placing = spec.config.placement
    if placing.follow == "off" and placing.record is None:
        return None
    shape = len(model.moe_layers), model.top_k
    send = planning.report_routing
    return RoutingSample(spec.name, placing.sample_tokens, shape, monotonic_s, send)


def _patience(spec: WorkerSpec, scheduler: Scheduler) -> Patience:
    tbt_s, most = spec.config.priority.ls_tbt_s, spec.config.schedule.max_batch_sequences
    return Patience(scheduler, monotonic_s, tbt_s=tbt_s, most_sequences=most)


def _experts(
    spec: WorkerSpec,
    half: AttentionHalf,
    endpoint: Endpoint,
    recorded: Recording,
    sample: RoutingSample | None,
) -> tuple[RemotePlane, Following]:
    """How they are reached, and where they are."""
    model, config = half.spec, spec.config
    following = Following(
        endpoint,
        spec.placement,
        deadline_s=config.placement.deadline_s,
        check=lambda placement: check_fits(placement, None, model.num_experts, model.moe_layers),
        clock=monotonic_s,
    )
    _show(following, spec.name, recorded.metrics)
    counts = DispatchCounts(spec.placement.ranks)
    counts.show(recorded.metrics, spec.name)
    plane = RemotePlane(
        endpoint,
        following.slots,
        following.experts,
        recorded.timeline,
        monotonic_s,
        reply_s=config.channel.reply_s,
        repair_s=config.groups.repair_s,
        foresight=foresight(spec, half) if config.experts.is_bounded else None,
        sample=sample,
        following=following,
        counts=counts,
    )
    return plane, following


def _show(following: Following, name: str, telemetry: RankMetrics) -> None:
    telemetry.read(metrics.PLACEMENT_GENERATION, name, of=lambda: following.generation)
    for kind in following.repairs:
        of = partial(following.repairs.__getitem__, kind)
        telemetry.read(metrics.REPAIRS, name, kind, of=growth(of))


class Placed(Observer):
    """Says in the rank's status where experts are thought to be, and which expert ranks it has
    lost; and to the ingress, whether requests wait for them."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._waits = False

    def begin(self, loop: Serving) -> None:
        self._loop = loop

    def stepped(self) -> None:
        if self._following.waits != self._waits:
            self._waits = self._following.waits
            self._loop.say_waits(self._waits)

    def sections(self) -> dict[str, dict[str, float]]:
        following = self._following
        placement: dict[str, float] = {"generation": following.generation, "ranks": following.ranks}
        placement["switches"] = following.switches
        lost = {name: one.epoch for name, one in following.absent.items() if one.epoch}
        found: dict[str, dict[str, float]] = {"placement": {**placement, **following.repairs}}
        return found | {"lost": dict(lost)} if lost else found

    def notes(self) -> dict[str, str]:
        absent = {name: one for name, one in self._following.absent.items() if one.is_lost}
        if not absent:
            return {}
        meanwhile = "others stand in" if self._following.stands_in else "requests wait"
        reasons = "; ".join(one.reason for one in absent.values())
        return {"experts": f"{', '.join(absent)} lost, {meanwhile}: {reasons}"}


class WarmUp(Observer):
    """The first batch is our own, answered to nobody: it takes several times as long."""

    def __init__(self, unusable: CheckpointError) -> None:
        """unusable: what the rank ends with if its logits are no numbers."""
        self._unusable = unusable

    def begin(self, loop: Serving) -> None:
        loop.admit(NOBODY, Submit(request_id=0, token_ids=WARM_UP_IDS, sampling=WARM_UP))

    def completed(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if sequence.key[0] == NOBODY and isinstance(sequence.failure, NotFiniteError):
                raise self._unusable


class ChunkCost:
    """Relative attention cost of new tokens [start, stop) of a sequence: projections of each token,
    plus scores and weighted values over its context (FinDEP Eq. 1, for grouped-query attention)."""

    def __init__(self, model: ModelSpec) -> None:
        attended_flops = 4 * model.num_heads * model.head_dim
        linear_flops = 2 * attention_parameters(model)
        self._linear_tokens = linear_flops / attended_flops  # in units of one attended token

    def __call__(self, start: int, stop: int) -> float:
        return (stop - start) * (self._linear_tokens + (start + stop) / 2)
