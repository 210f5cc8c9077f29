"""How long a prefill worker's batches take, and how much of its capacity is used by that."""

from __future__ import annotations

from collections.abc import Sequence

from actors.batching.scheduled_batch import ScheduledBatch
from actors.planning.calibration import TimedBatch
from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.clock import Clock
from contracts.metrics import Pipeline
from contracts.worker import Group, WorkerSpec
from planner.online.prefill_capacity import Batch, PrefillCapacity, ReferenceTime
from planner.routing.request_work import RequestWork


class BatchTiming:
    """Owned by the loop's thread. A batch beside which another ran has no time of its own."""

    def __init__(self, spec: WorkerSpec, work: RequestWork, clock: Clock) -> None:
        prefill = spec.config.prefill
        self._spec, self._work, self._clock = spec, work, clock
        self._running: dict[int, float | None] = {}  # by number: since when; None: not alone
        self._capacity = PrefillCapacity(
            max_tokens=prefill.max_batch_tokens,
            max_sequences=prefill.max_batch_sequences,
            started_s=clock(),
        )

    def refer(self, batches: Sequence[TimedBatch]) -> None:
        """To what they took, before the first one is formed."""
        self._capacity.refer(
            [
                ReferenceTime(sum(self._work(0, tokens) for tokens in prompts), 1e3 * seconds)
                for prompts, seconds in batches
            ]
        )

    def show(self, telemetry: Telemetry) -> None:
        """Has it read at each scrape. One more worker adds as much as each has."""
        telemetry.read(
            metrics.CAPACITY_USED,
            Pipeline.PREFILL,
            self._spec.name,
            of=lambda: self._capacity.used_fraction(self._clock()),
        )
        workers = max(1, self._spec.config.groups.prefill_ranks)
        telemetry.set(metrics.CAPACITY_GAIN, Pipeline.PREFILL, Group.PREFILL, to=1 / workers)

    def formed(self, batch: ScheduledBatch) -> None:
        if self._running:
            self._running = dict.fromkeys((*self._running, batch.number))
        else:
            self._running[batch.number] = self._clock()

    def dropped(self, batch: ScheduledBatch) -> None:
        self._running.pop(batch.number, None)

    def completed(self, batch: ScheduledBatch) -> None:
        begun_s, now_s = self._running.pop(batch.number, None), self._clock()
        self._capacity.add(
            Batch(
                ended_s=now_s,
                flops=sum(self._work(chunk.start, chunk.stop) for chunk in batch.chunks),
                tokens=batch.tokens,
                sequences=len(batch.chunks),
                ms=None if begun_s is None else 1e3 * (now_s - begun_s),
            )
        )
