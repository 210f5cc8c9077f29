"""A prefill worker: the whole model with experts from a store, and a log for the routers.

With a KV pool it also generates, one token per sequence and batch. Experts are copied by separate
threads.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.batching.finisher import Finisher
from actors.batching.observer import DecodeCoalescer, LoopControl, Observer
from actors.batching.scheduler import Scheduler
from actors.channels.heartbeat import LoopWatchdog
from actors.engine.executor import Executor, ExecutorParts
from actors.gather.expert_supply import ExpertSupply, expert_supply
from actors.gather.shuffled import BatchFacts
from actors.moe.backend import ExpertBackend, TaskKey
from actors.planning.calibration import calibrate, product_flops_per_s
from actors.planning.planner_inputs import layer_routing, shape_of
from actors.ranks.activation_pass import reference_slices
from actors.ranks.prefill_log import PrefillLog
from actors.ranks.rank import Rank, RankHooks, recording
from actors.ranks.serving_loop import ServingParts
from actors.ranks.serving_rank import (
    Priorities,
    ServedModel,
    block_manager,
    load_half,
    prefill_limits,
    prepare_process,
    serving_pool,
    serving_rank,
    unusable_checkpoint,
)
from actors.telemetry.telemetry import RankMetrics
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.config import PriorityConfig, ScheduleConfig
from contracts.errors import ChannelError, ConfigError, NotFiniteError, ResourceError
from contracts.logs import event
from contracts.plan import Plan
from contracts.ranks import RankSpec
from contracts.requests import Priority
from kernels.device import wait_for_device
from kernels.steps import run_to_end
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.prediction.nearest_ids import NearestIds
from models.prediction.routing_counts import RoutingCounts
from models.spec.checkpoint_files import ROUTING
from planner.arrays import Floats
from planner.placement.shuffling import share_tables
from planner.placement.slots import ExpertPlacement
from planner.routing.open_requests import work_of
from planner.scheduling.batching import (
    BatchingPolicy,
    coalesce_decodes,
    one_at_a_time,
    preempt_if_profitable,
)
from planner.scheduling.task_order import by_layer, by_plan

log = logging.getLogger("tandem.worker")

WHOLE = Plan()  # one micro-batch


def prefill_rank(spec: RankSpec, *, batching: BatchingPolicy | None = None) -> Rank:
    """Load the weights and listen. Raises CheckpointError, ResourceError, ChannelError."""
    if spec.config.prefill.engine != "torch":
        return _load_engine(spec.config.prefill.engine)(spec)
    config = spec.config
    spec = prepare_process(spec)
    half, served = load_half(spec)
    disable_kv_cache, schedule = config.prefill.disable_kv_cache, prefill_limits(config)

    telemetry = RankMetrics(spec, monotonic_s)
    watch = LoopWatchdog(
        spec.name, config.channel.step_timeout_s, monotonic_s, config.log.stall_threshold_s
    )
    recorded = recording(
        spec, telemetry, lambda: supply.bytes_moved(), lambda _: watch.record_progress()
    )
    work = work_of(shape_of(half.spec, half.dtype.itemsize))
    facts = BatchFacts(work, _first_shares(spec, half))
    supply = expert_supply(spec, half.spec, half.dtype, recorded.timeline, telemetry, facts)
    kv = _pool(spec, half, schedule, served, supply)
    # Without a KV cache states start and end with a batch, and so do shared blocks.
    has_states = half.spec.recurrent is not None
    shares = config.kv.prefix_cache and not (has_states and disable_kv_cache)
    blocks = block_manager(
        kv, config.kv, prefix_cache=shares, keeps=not disable_kv_cache, journal=True
    )
    prefill_log = PrefillLog(spec, work, blocks, served.max_context_tokens, telemetry)
    scheduler = Scheduler(
        schedule, blocks, whole_prompts=disable_kv_cache, on_end=prefill_log.ended
    )
    finisher = Finisher(half, max_context_tokens=served.max_context_tokens)

    backend = supply.backend(half)
    parts = ExecutorParts(spec.name, half, kv, backend, finisher, recorded.timeline, monotonic_s)
    priorities = Priorities(config.priority, telemetry, spec.name)
    coalescer = DecodeCoalescer(
        config.priority, scheduler, monotonic_s, schedule.max_batch_sequences
    )
    executor = Executor(
        parts,
        chunk_cost=lambda start, stop: float(stop - start),
        policy=by_layer,
        choice=priorities.preemption(by_plan if backend.yields else by_layer, priorities.user.pick),
        last_rows_only=True,
    )
    reference = ReferencePass(spec, parts, supply, prefill_log, served, telemetry)
    serving = ServingParts(
        scheduler,
        executor,
        finisher,
        watch,
        plan_of=lambda batch: WHOLE,
        close=supply.close,
        observers=[prefill_log, reference, coalescer],
        batching=batching
        or priorities.batching(_batching(spec.name, backend, config.priority, coalescer)),
    )
    hooks = RankHooks(supply.connect)
    return serving_rank(spec, served, serving, recorded, hooks, channel_address=supply.address)


def _first_shares(spec: RankSpec, half: AttentionHalf) -> Callable[[Sequence[int]], Floats] | None:
    """Return the shares of tokens on workers in the first layer with experts, from a profile.

    Raises CheckpointError for a profile of another model or tokenizer.
    """
    folder, given = Path(spec.model_folder), spec.config.experts.profile
    path = Path(given) if given else folder / ROUTING
    if spec.config.prefill.experts != "shuffled" or not path.is_file():
        return None
    model = half.spec
    first, counts = model.moe_layers[0], RoutingCounts.read(path, folder, model)
    routing = layer_routing(counts, first)
    holds_EW = ExpertPlacement(spec.placement).layer(first).held(model.num_experts)
    tables = share_tables(routing.counts, [(routing.sets_PK, holds_EW)])
    nearest = NearestIds(half.embedding_VD, np.unique(routing.counts.ids_N))
    return lambda ids: tables.predict(nearest.replace(np.array(ids)), None)


def _load_engine(path: str) -> Callable[[RankSpec], Rank]:
    module, _, name = path.partition(":")
    try:
        engine: Callable[[RankSpec], Rank] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"prefill.engine={path}: {error}: give torch or package.module:function"
        ) from None
    return engine


def _batching(
    rank: str, backend: ExpertBackend[Any], config: PriorityConfig, coalescer: DecodeCoalescer
) -> BatchingPolicy:
    if config.preempt and not backend.interleaves:
        event(
            log, "preemption_disabled", rank=rank, reason="a step of all_to_all is of all workers"
        )
    if not config.preempt or not backend.interleaves:
        return one_at_a_time
    return (
        coalesce_decodes(coalescer.slack_s, coalescer.free_places)
        if backend.yields
        else preempt_if_profitable(lambda: backend.copy_s, config.be_share)
    )


def _pool(
    spec: RankSpec,
    half: AttentionHalf,
    schedule: ScheduleConfig,
    served: ServedModel,
    supply: ExpertSupply,
) -> KvPool:
    """Return the KV pool. Without a KV cache it has one layer, for the longest concurrent batches.

    Closes `supply` if the experts leave too little memory.
    """
    config, block_tokens = spec.config, spec.config.kv.block_tokens
    if config.prefill.disable_kv_cache:
        longest = max(schedule.max_batch_tokens, served.max_context_tokens)
        blocks = -(-longest // block_tokens) + 2 * schedule.max_batch_sequences
        blocks *= 2 if config.priority.preempt else 1  # one batch of each class
        return KvPool(half.spec, blocks, block_tokens, half.dtype, half.device, one_layer=True)
    sized, kept_bytes = msgspec.structs.replace(config, schedule=schedule), supply.unwritten_bytes
    copies = spec.prefill_ranks if config.prefill.experts == "all_to_all" else 1
    try:
        return serving_pool(
            half, sized,
            ranks_on_node=spec.ranks_on_node, kept_bytes=kept_bytes, expert_copies=copies,
        )  # fmt: skip
    except ResourceError:
        supply.close()
        raise


class ReferencePass(Observer):
    """Calibrates the worker before its first batch."""

    def __init__(
        self,
        spec: RankSpec,
        parts: ExecutorParts,
        supply: ExpertSupply,
        prefill_log: PrefillLog,
        served: ServedModel,
        telemetry: RankMetrics,
    ) -> None:
        self._telemetry = telemetry
        self._spec, self._parts, self._supply = spec, parts, supply
        self._log, self._served = prefill_log, served
        self._peak_flops_per_s = 0.0

    def begin(self, loop: LoopControl) -> None:
        half = self._parts.half
        peak = self._peak_flops_per_s = product_flops_per_s(half.dtype, half.device, monotonic_s)
        if peak > 0:
            name = self._spec.name
            of = self._log.flops_per_s
            self._telemetry.read(metrics.MODEL_FLOPS_UTILIZATION, name, of=lambda: of() / peak)
        try:
            self._calibrate()
        except ChannelError as error:
            loop.fail(error)
        except NotFiniteError:
            raise unusable_checkpoint(self._spec, half) from None

    def sections(self) -> dict[str, dict[str, float]]:
        """peak_flops_per_s: of a large matrix product; 0 if FLOPs are not counted."""
        found = {"work": {"peak_flops_per_s": self._peak_flops_per_s}}
        shared = self._supply.shared_batches
        return found if shared is None else {**found, "shared_batches": dict(shared)}

    def notes(self) -> dict[str, str]:
        """degraded: peers whose experts are read elsewhere, and why."""
        return {"degraded": self._supply.degraded()}

    def _calibrate(self) -> None:
        prefill, kv = self._spec.config.prefill, self._parts.kv
        pool_tokens = kv.num_blocks * kv.block_tokens
        context_tokens = min(self._served.max_context_tokens, pool_tokens)
        max_tokens = min(prefill.max_batch_tokens, pool_tokens // 2)
        if prefill.saturation is not None or max_tokens == 0 or prefill.experts == "all_to_all":
            return  # in lockstep a layer takes as long as on the slowest worker
        self._log.calibrated(
            calibrate(self._time_layers, max_tokens=max_tokens, context_tokens=context_tokens)
        )

    def _time_layers(self, lengths: Sequence[int]) -> list[float]:
        block_tokens = self._parts.kv.block_tokens
        slices = reference_slices(lengths, self._served.vocab_size, block_tokens)
        return time_layers(self._parts, slices)


_NUMBER = -1  # not a scheduler's
_POLL_S = 0.1


def time_layers(parts: ExecutorParts, slices: Sequence[SequenceSlice]) -> list[float]:
    """Return the wall seconds of each layer with experts; no batch may be in flight.

    Raises ChannelError, and NotFiniteError if the logits are not finite.
    """
    half, kv, backend, clock = parts.half, parts.kv, parts.backend, parts.clock
    inputs = AttentionBatch.build(list(slices), block_tokens=kv.block_tokens, device=kv.device)
    half.prepare(inputs)
    hidden_TD = half.embed(inputs)
    wait_for_device(half.device)
    times_l = []
    for layer in range(half.spec.num_layers):
        start_s = clock()
        attended = half.attend(layer, hidden_TD, inputs, kv)
        hidden_TD, routed = attended.hidden_TD, attended.routed
        if routed is not None:
            key = TaskKey(_NUMBER, layer, 0, Priority.LS)
            pending = backend.dispatch(key, hidden_TD, routed, Plan())
            shared_TD = half.shared(layer, routed.router_input)
            while not pending.is_complete:
                backend.poll(_POLL_S, idle=False)
            run_to_end(backend.combine(hidden_TD, pending, shared_TD))
        wait_for_device(half.device)
        if routed is not None:
            times_l.append(clock() - start_s)
    if not half.logits(hidden_TD[-1:]).max().isfinite():
        raise NotFiniteError("the logits of a timing pass are not finite")
    return times_l
