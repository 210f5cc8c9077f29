"""What an attention rank has run, counted for the planner: of what traffic, and how much."""

from __future__ import annotations

from actors.batching.scheduled_batch import ScheduledBatch
from contracts.clock import Clock
from contracts.planning import TrafficReport

REPORT_S = 1.0


class TrafficCount:
    """Owned by the rank's loop thread."""

    def __init__(self, rank: str, pool_tokens: int, clock: Clock) -> None:
        self._rank, self._pool_tokens, self._clock = rank, pool_tokens, clock
        self._begin()

    def add(self, batch: ScheduledBatch) -> TrafficReport | None:
        """A batch that has run; a report every REPORT_S, of all since the last one."""
        for chunk in batch.chunks:
            new = chunk.stop - chunk.start
            if new == 1:
                self._decode_tokens += 1
                self._positions += chunk.start
            else:
                self._prompts += 1
                self._prompt_tokens += new
                self._starts += chunk.start
        seconds = self._clock() - self._begun_s
        if seconds < REPORT_S:
            return None
        report = TrafficReport(
            rank=self._rank,
            seconds=seconds,
            pool_tokens=self._pool_tokens,
            decode_tokens=self._decode_tokens,
            positions=self._positions,
            prompts=self._prompts,
            prompt_tokens=self._prompt_tokens,
            starts=self._starts,
        )
        self._begin()
        return report

    def _begin(self) -> None:
        self._begun_s = self._clock()
        self._decode_tokens = self._positions = 0
        self._prompts = self._prompt_tokens = self._starts = 0
