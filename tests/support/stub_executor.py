"""Answers that depend only on the token ids, without a model."""

from __future__ import annotations

import array
import threading
import zlib
from collections.abc import Sequence

from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence as TokenSequence
from contracts.errors import ChannelError
from contracts.messages import Event, Finished, Scored, Submit, TokenLogprob, Tokens
from contracts.plan import Plan
from contracts.requests import Sampling, Usage
from planner.scheduling.batching import LiveBatch

_LOGIT_STEPS = 1 << 12


def pseudo_answer(submit: Submit, cached_tokens: int, vocab_size: int) -> list[Event]:
    """Return an answer drawn from the token ids, equal in every process."""
    if submit.sampling is not None:
        return _generated(submit, submit.sampling, cached_tokens, vocab_size)
    usage = Usage(prompt_tokens=len(submit.token_ids), cached_tokens=cached_tokens)
    seed = _seed(submit.token_ids)
    logits = logprobs = tops = None
    if submit.candidates is not None:
        logits = [_logit(seed, candidate) for candidate in submit.candidates]
    if submit.score_from is not None:
        scored = submit.token_ids[submit.score_from :]
        logprobs = [_logit(seed, token_id) for token_id in scored]
        if submit.score_top:
            tops = [_top(seed, token_id, submit.score_top, vocab_size) for token_id in scored]
    return [Scored(submit.request_id, usage, logits, logits, logprobs, tops)]


def _generated(
    submit: Submit, sampling: Sampling, cached_tokens: int, vocab_size: int
) -> list[Event]:
    seed, steps = _seed(submit.token_ids[: submit.prompt_tokens]), sampling.max_tokens
    token_ids = [(seed + 7919 * step) % vocab_size for step in range(submit.generated, steps)]
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = [
            TokenLogprob(
                _logit(seed, token_id), _top(seed, token_id, sampling.logprobs, vocab_size)
            )
            for token_id in token_ids
        ]
    usage = Usage(
        prompt_tokens=submit.prompt_tokens,
        completion_tokens=sampling.max_tokens,
        cached_tokens=cached_tokens,
    )
    tokens = Tokens(submit.request_id, token_ids, logprobs, cached_tokens)
    return [tokens, Finished(submit.request_id, "length", usage)]


def _seed(token_ids: Sequence[int]) -> int:
    return zlib.crc32(array.array("q", token_ids).tobytes())


def _logit(seed: int, token_id: int) -> float:
    """Return a number in (-8, 0], as a log-probability."""
    mixed = (seed ^ token_id * 2654435761) * 40503 & 0xFFFFFFFF
    return -8.0 * (mixed >> 20) / _LOGIT_STEPS


def _top(seed: int, token_id: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    ids = [(token_id + offset) % vocab_size for offset in range(count)]
    return sorted(((i, _logit(seed, i)) for i in ids), key=lambda pair: -pair[1])


class StubExecutor:
    """Executor and finisher: `answers` collects (sequence, event) pairs."""

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
        events = pseudo_answer(sequence.submit, sequence.num_cached or 0, self._vocab_size)
        self.answers += [(sequence, event) for event in events]
