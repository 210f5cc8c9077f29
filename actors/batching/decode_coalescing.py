"""Due times of LS tokens, and coalescing of LS decodes while BE work runs.

A pass over a few tokens delays BE about as much as one over many, because it goes through every
layer of both groups. So while BE runs, a decode of LS starts when its token's due time
(`priority.ls_tbt_s`) requires it. Decodes that are ready by then join it, BE's too as long as such
passes fit into that time.
"""

from __future__ import annotations

import math
from typing import Final

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.observer import Observer
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from contracts.clock import Clock
from contracts.config import PriorityConfig
from contracts.requests import Priority
from planner.scheduling.batching import Phase

MARGIN_PASSES: Final = 3.0  # passes of time reserved before a token is due
MAX_RIDE_PASSES: Final = 2.0  # BE joins while this many passes fit between two tokens
_DECAY: Final = 0.9  # of the longest pass time, per batch


class DueTimes(Observer):
    """Sets arrival and due times of LS sequences (QLLM, Section 4); BE is never due."""

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


class DecodeCoalescer(Observer):
    """Decode coalescing of an attention rank. max_sequences: of a batch."""

    def __init__(
        self, config: PriorityConfig, scheduler: Scheduler, clock: Clock, max_sequences: int
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._tbt_s, self._max_sequences = config.ls_tbt_s, max_sequences
        self._formed_s: dict[int, float] = {}
        self._pass_s = math.inf  # recent longest pass of LS decodes; inf: none has run
        self._wake_s = math.inf  # when a waiting decode must be scheduled

    def slack_s(self) -> float:
        """Return how long idle LS decodes can still wait; <= 0: not at all; inf: none idle."""
        due_s = min(map(_due_s, self._scheduler.started), default=math.inf)
        if due_s == math.inf:
            return math.inf
        begin_s, now_s = due_s - MARGIN_PASSES * self._pass_s, self._clock()
        self._wake_s = begin_s if begin_s > now_s else math.inf
        return begin_s - now_s

    def free_places(self) -> int:
        """Return how many sequences may start while BE's decodes join LS's; -1: BE may not join."""
        in_time = MAX_RIDE_PASSES * self._pass_s <= self._tbt_s
        of_ls = sum(sequence.priority is Priority.LS for sequence in self._scheduler.started)
        if not in_time or of_ls > self._max_sequences // 2:
            return -1
        return max(0, self._max_sequences - self._scheduler.running)

    def stepped(self) -> None:
        if self._clock() >= self._wake_s:
            self._wake_s = math.inf
            self._scheduler.changes += 1

    def formed(self, batch: ScheduledBatch) -> None:
        if batch.priority is Priority.LS and batch.phase is Phase.DECODE:
            self._formed_s[batch.number] = self._clock()

    def completed(self, batch: ScheduledBatch) -> None:
        formed_s = self._formed_s.pop(batch.number, None)
        if formed_s is not None:
            decayed_s = 0.0 if self._pass_s == math.inf else _DECAY * self._pass_s
            self._pass_s = max(self._clock() - formed_s, decayed_s)

    def dropped(self, batch: ScheduledBatch) -> None:
        self._formed_s.pop(batch.number, None)


def _due_s(sequence: Sequence) -> float:
    idle = not (sequence.in_flight or sequence.done) and sequence.phase is Phase.DECODE
    return sequence.due_s if idle else math.inf
