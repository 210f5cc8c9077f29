"""The spans of an executor's tasks. One that is interrupted has several, of running time only."""

from __future__ import annotations

from actors.engine.micro_batch import MicroBatch
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.events import TaskSpan


class TaskSpans:
    """name: of the rank."""

    def __init__(self, name: str, timeline: Timeline, clock: Clock) -> None:
        self._name, self._timeline, self._clock = name, timeline, clock
        self._since_s = 0.0  # when what is noted next began
        self._parked: MicroBatch | None = None  # what ran last, where it stands at a yield
        self._parked_s = 0.0

    def runs(self, micro_batch: MicroBatch, now_s: float) -> None:
        """From now on. If it is what ran last, it was not interrupted."""
        if self._parked is not micro_batch:
            self.close()
            self._since_s = now_s
        self._parked = None

    def yields(self, micro_batch: MicroBatch, now_s: float) -> None:
        self._parked, self._parked_s = micro_batch, now_s

    def note(self, micro_batch: MicroBatch) -> None:
        """It has ended what it was `doing`."""
        self._add(micro_batch, self._clock())

    def close(self) -> None:
        """Others run next, or none."""
        if self._parked is not None:
            self._add(self._parked, self._parked_s)
            self._parked = None

    def _add(self, micro_batch: MicroBatch, end_s: float) -> None:
        stage, layer = micro_batch.doing
        number, index = micro_batch.batch.scheduled.number, micro_batch.index
        start_s, self._since_s = self._since_s, end_s
        self._timeline.add(
            TaskSpan(self._name, stage, start_s, end_s, number, layer, index, 0, micro_batch.tokens)
        )
