"""An executor without a model: answers follow from the token ids alone, at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence as TokenSequence
from actors.engine.pseudo_answers import pseudo_answer
from contracts.errors import ChannelError
from contracts.messages import Event
from contracts.plan import Plan
from planner.policies.batching import LiveBatch


class StubExecutor:
    """It is its own sink: `answers` collects (sequence, event) pairs, as a finisher's."""

    layers = 1
    is_engaged = False

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
        """All batches, or it waits."""
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
        events = pseudo_answer(sequence.submit, sequence.num_cached or 0, self._vocab_size)
        self.answers += [(sequence, event) for event in events]
