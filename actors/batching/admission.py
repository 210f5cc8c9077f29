"""Admission checks of a rank, and Retry-After for the requests that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.observer import Observer
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence, owner_of
from contracts.clock import Clock
from contracts.errors import OverloadError, RequestError, TooLongError
from contracts.messages import Submit
from contracts.requests import (
    INT64,
    MAX_LOGPROBS,
    Priority,
    check_ids,
    check_integer,
    check_lengths,
    check_sampling,
)
from planner.scheduling.admission import BACKLOG, SHORTEST_S, DrainRate, retry_after_s


class RankAdmission(NamedTuple):
    """Limits of a rank. retry_after_s: time until that many waiting sequences have started."""

    rank: str
    vocabulary: int
    max_context_tokens: int
    pool_tokens: int
    max_waiting: int
    retry_after_s: Callable[[Priority, int], float] = lambda priority, excess: SHORTEST_S

    def check(self, client: int, submit: Submit, scheduler: Scheduler) -> None:
        """Raise RequestError, OverloadError or TooLongError."""
        if scheduler.has((client, submit.request_id)):
            raise RequestError(f"request_id {submit.request_id} is in use", "request_id")
        self._check_fields(submit)
        self._check_queue(client, submit, scheduler)
        tokens = len(submit.token_ids)
        if submit.sampling is not None:
            most = submit.prompt_tokens + submit.sampling.max_tokens
            tokens = min(most, self.max_context_tokens)
        fits = 0 < len(submit.token_ids) <= self.max_context_tokens - bool(submit.generated)
        if not fits or tokens > self.pool_tokens:
            limit = min(self.pool_tokens, self.max_context_tokens)
            raise TooLongError(
                f"{tokens} tokens do not fit {self.rank}'s {limit} tokens; shorten the prompt "
                "or raise kv.pool_tokens",
                "prompt",
            )

    def _check_queue(self, client: int, submit: Submit, scheduler: Scheduler) -> None:
        """Bound the queue of each class so that no request or class fills it for others.

        Beyond max_waiting, the first sequence of each request is still accepted, up to twice as
        many in all. Sequences that another rank started are always accepted.
        """
        priority, limit = submit.priority, self.max_waiting
        waiting = scheduler.num_waiting(priority)
        if waiting < limit or submit.generated:
            return
        if scheduler.sequence_counts.count(owner_of(client, submit)) or waiting >= 2 * limit:
            raise OverloadError(
                f"{self.rank}: {waiting} {priority.name} sequences wait, the limit is {limit} "
                "(schedule.max_waiting)",
                self.retry_after_s(priority, waiting - limit + 1),
            )

    def _check_fields(self, submit: Submit) -> None:
        """Repeat the HTTP checks: one bad value must not break a whole batch."""
        for field, ids in (("token_ids", submit.token_ids), ("candidates", submit.candidates)):
            check_ids(field, ids or (), self.vocabulary)
        if submit.score_from is not None:
            check_integer("score_from", submit.score_from, 1, INT64 - 1)
        check_integer("score_top", submit.score_top, 0, MAX_LOGPROBS)
        if submit.sampling is not None:
            check_integer("max_tokens", submit.sampling.max_tokens, 1, INT64 - 1)
            check_sampling(submit.sampling, self.vocabulary)
            check_lengths(submit.sampling)
        most = 0 if submit.sampling is None else submit.sampling.max_tokens - 1
        most = min(most, max(0, len(submit.token_ids) - 1))
        check_integer("generated", submit.generated, 0, most)


class QueueDrain(Observer):
    """Rate at which sequences start, by class, while enough of them wait to measure it."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._rates = {priority: DrainRate() for priority in Priority}
        self._started = dict.fromkeys(Priority, 0)  # in all
        self._is_backlog = dict.fromkeys(Priority, False)

    def retry_after_s(self, priority: Priority, excess: int) -> float:
        """Return the time until `excess` more sequences of that class have started."""
        return retry_after_s(excess, self._rates[priority].per_second(self._clock()))

    def accepted(self, sequence: Sequence) -> None:
        """Note the start of a backlog. Called before the sequence is queued."""
        priority = sequence.priority
        enough = self._scheduler.num_waiting(priority) + 1 >= BACKLOG
        if enough and not self._is_backlog[priority]:
            self._rates[priority].begin(self._clock())
        self._is_backlog[priority] = enough

    def formed(self, batch: ScheduledBatch) -> None:
        for priority in Priority:
            total = self._scheduler.started_total[priority]
            started, self._started[priority] = total - self._started[priority], total
            enough = self._scheduler.num_waiting(priority) >= BACKLOG
            if started:
                self._rates[priority].leave(started, self._clock(), last=not enough)
                self._is_backlog[priority] = enough
