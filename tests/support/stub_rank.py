"""A prefill worker without a model, to measure everything around the engine."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence as TokenSequence
from actors.channels.heartbeat import LoopWatchdog
from actors.kv.block_manager import BlockManager
from actors.moe.backend import ExpertBackend
from actors.planning.planner_inputs import shape_of
from actors.ranks.prefill_log import PrefillLog
from actors.ranks.rank import Rank, RankHooks, recording
from actors.ranks.serving_loop import ServingParts
from actors.ranks.serving_rank import ServedModel, prefill_limits, serving_rank
from actors.telemetry.telemetry import RankMetrics
from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.messages import Event, Finished, Submit, Tokens
from contracts.plan import Plan
from contracts.ranks import RankSpec
from contracts.requests import Usage
from models.weights.checkpoint import check_checkpoint, element_bytes
from planner.routing.open_requests import work_of
from planner.scheduling.batching import LiveBatch
from tests.support.fake_rank import scored

CACHED_BLOCKS = 1 << 16  # if kv.pool_tokens is not set


class StubExecutor:
    """Executor and finisher: `answers` collects (sequence, event) pairs."""

    layers = 1
    backend = ExpertBackend[Any]()

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._batches: list[ScheduledBatch] = []
        self._woken = threading.Event()
        self.answers: list[tuple[TokenSequence, Event]] = []
        self.failure: ChannelError | None = None

    @property
    def in_flight(self) -> int:
        return len(self._batches)

    @property
    def live(self) -> Sequence[LiveBatch]:
        return [
            LiveBatch(batch.priority, batch.tokens, 1, batch.number, batch.phase)
            for batch in self._batches
        ]

    def wake(self) -> None:
        self._woken.set()

    def submit(self, scheduled: ScheduledBatch, plan: Plan) -> None:
        self._batches.append(scheduled)

    def step(self, timeout_s: float) -> list[ScheduledBatch]:
        """Complete all batches, or wait."""
        if not self._batches:
            self._woken.wait(timeout_s)
            self._woken.clear()
        done, self._batches = self._batches, []
        for batch in done:
            for chunk in batch.chunks:
                if chunk.stop == len(chunk.sequence.token_ids) and not chunk.sequence.done:
                    self._answer(chunk.sequence)
        return done

    def drop(self, number: int) -> ScheduledBatch | None:
        found = next((batch for batch in self._batches if batch.number == number), None)
        if found is not None:
            self._batches.remove(found)
        return found

    def fail_all(self) -> list[ScheduledBatch]:
        dropped, self._batches = self._batches, []
        return dropped

    def _answer(self, sequence: TokenSequence) -> None:
        sequence.done = True
        submit, cached = sequence.submit, sequence.num_cached or 0
        events: list[Event] = [scored(submit, cached)]
        if submit.sampling is not None:
            events = self._generated(submit, submit.sampling.max_tokens, cached)
        self.answers += [(sequence, event) for event in events]

    def _generated(self, submit: Submit, max_tokens: int, cached: int) -> list[Event]:
        token_ids = [n % self._vocab_size for n in range(submit.generated, max_tokens)]
        usage = Usage(
            prompt_tokens=submit.prompt_tokens, completion_tokens=max_tokens, cached_tokens=cached
        )
        tokens = Tokens(submit.request_id, token_ids, None, cached)
        return [tokens, Finished(submit.request_id, "length", usage)]


def stub_rank(spec: RankSpec) -> Rank:
    """Make the rank. Raises CheckpointError."""
    config = spec.config
    model = check_checkpoint(Path(spec.model_folder))
    context_tokens = config.model.context_tokens(model.max_context_tokens)
    pool_tokens = config.kv.pool_tokens or CACHED_BLOCKS * config.kv.block_tokens
    blocks = BlockManager(max(1, pool_tokens // config.kv.block_tokens), journal=True)
    work = work_of(shape_of(model, element_bytes(model, config.model.dtype)))
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
    recorded = recording(spec, telemetry, lambda: (0, 0))
    return serving_rank(spec, served, serving, recorded, RankHooks())
