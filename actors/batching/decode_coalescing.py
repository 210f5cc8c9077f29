"""For how long LS decodes can wait for one another while BE work runs, and whether BE's ride along.

What a pass over a few tokens takes from BE is much the same as one over many: it goes through every
layer of both groups. So while BE runs, a decode of LS begins when its tokens' due time wants it
(`priority.ls_tbt_s`), and not before: whoever else's is done meanwhile rides along, BE's too as
long as passes with them are within that time.
"""

from __future__ import annotations

import math
from typing import Final

from actors.batching.observer import Observer
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from contracts.clock import Clock
from contracts.config import PriorityConfig
from contracts.requests import Priority
from planner.scheduling.batching import Phase

MARGIN_PASSES: Final = 3.0  # so many times what a pass takes is left for it
MAX_RIDE_PASSES: Final = 2.0  # BE rides along while that many fit into the time between two tokens
_DECAY: Final = 0.9  # of a longest time, batch by batch: what was once slow is forgotten


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


class DecodeCoalescer(Observer):
    """An attention rank's."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, *, tbt_s: float, max_sequences: int
    ) -> None:
        """tbt_s: in which each next token of LS is due. most_sequences: of a batch."""
        self._scheduler, self._clock = scheduler, clock
        self._tbt_s, self._max_sequences = tbt_s, max_sequences
        self._formed_s: dict[int, float] = {}
        self._pass_s = math.inf  # of LS decodes, about the longest of late; inf: none has run
        self._wake_s = math.inf  # when somebody who waits must be asked for again

    def slack_s(self) -> float:
        """For how long all LS decodes that are in no batch can still wait; <= 0: not at all. inf:
        there are none."""
        due_s = min(map(_due_s, self._scheduler.started), default=math.inf)
        if due_s == math.inf:
            return math.inf
        begin_s, now_s = due_s - MARGIN_PASSES * self._pass_s, self._clock()
        self._wake_s = begin_s if begin_s > now_s else math.inf
        return begin_s - now_s

    def free_places(self) -> int:
        """How many more sequences may begin while BE's decodes ride along with LS's; negative: they
        do not, for LS would be late, or leaves them too little of a batch."""
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
