"""A prefill worker without a model, to measure everything around the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.batching.scheduler import Scheduler
from actors.channels.loop_watchdog import LoopWatchdog
from actors.kv.block_manager import BlockManager
from actors.planning.planner_inputs import shape_of
from actors.ranks.prefill_log import PrefillLog
from actors.ranks.rank import Rank, RankHooks, recording
from actors.ranks.serving_loop import ServingParts
from actors.ranks.serving_rank import ServedModel, prefill_limits, serving_rank
from actors.telemetry.rank_metrics import RankMetrics
from contracts.clock import monotonic_s
from contracts.plan import Plan
from contracts.ranks import RankSpec
from models.weights.checkpoint import check_checkpoint, resolve_dtype
from planner.routing.request_work import work_of
from tests.support.stub_executor import StubExecutor

CACHED_BLOCKS = 1 << 16  # where kv.pool_tokens does not say


def stub_rank(spec: RankSpec) -> Rank:
    """Make the rank. Raises CheckpointError."""
    started_s, config = monotonic_s(), spec.config
    model = check_checkpoint(Path(spec.model_folder))
    context_tokens = config.model.context_tokens(model.max_context_tokens)
    pool_tokens = config.kv.pool_tokens or CACHED_BLOCKS * config.kv.block_tokens
    blocks = BlockManager(max(1, pool_tokens // config.kv.block_tokens), journal=True)
    work = work_of(shape_of(model, resolve_dtype(model, config.model.dtype)))
    telemetry = RankMetrics(spec, monotonic_s)
    prefill_log = PrefillLog(spec, work, blocks, context_tokens, telemetry)
    watch = LoopWatchdog(
        spec.name, config.channel.step_timeout_s, monotonic_s, config.log.stall_threshold_s
    )
    executor: Any = StubExecutor(model.vocab_size)
    serving = ServingParts(
        Scheduler(prefill_limits(config), blocks, on_end=prefill_log.ended),
        executor,
        executor,
        watch,
        plan_of=lambda batch: Plan(),
        close=lambda: None,
        observers=[prefill_log],
    )
    served = ServedModel(model.vocab_size, context_tokens)
    recorded = recording(telemetry, spec.config.trace.spans)
    return serving_rank(spec, served, serving, recorded, RankHooks(), started_s=started_s)
