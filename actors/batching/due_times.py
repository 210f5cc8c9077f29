"""When each sequence came, and when its next token is due (QLLM, Section 4: what LS jobs are held
to)."""

from __future__ import annotations

from actors.batching.observer import Observer
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence
from contracts.clock import Clock
from contracts.config import PriorityConfig
from contracts.requests import Priority


class DueTimes(Observer):
    """Of LS sequences; BE's are never due."""

    def __init__(self, config: PriorityConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock

    def accepted(self, sequence: Sequence) -> None:
        sequence.arrived_s = self._clock() - sequence.submit.waited_s
        if sequence.priority is Priority.LS:
            sequence.due_s = sequence.arrived_s + self._config.ls_ttft_s

    def completed(self, batch: ScheduledBatch) -> None:
        if batch.priority is not Priority.LS:
            return
        due_s = self._clock() + self._config.ls_tbt_s
        for chunk in batch.chunks:
            if chunk.sequence.generated and chunk.sequence.priority is Priority.LS:
                chunk.sequence.due_s = due_s
