"""A request from its admission to its answer, across all ranks that run it."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import msgspec

from cluster.routing.rank_client import RankClient
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, HandedOverError, OverloadError, RankError, TandemError
from contracts.messages import Failed, Finished, Scored, SequenceEvent, Submit, Tokens
from contracts.metrics import Pipeline
from contracts.requests import Usage
from contracts.routing_messages import RequestKey
from contracts.token_trie import ChoiceMatcher
from planner.scheduling.admission import SHORTEST_S

_LOST_CODES = frozenset(
    {"not_ready", "peer_lost", "peer_dead", "peer_hung", "channel_error", HandedOverError.code}
)

MAX_TIMINGS = 32  # of a request


class SequenceTiming(msgspec.Struct):
    """Times of a sequence on this process's clock. queued_s: until its first batch started."""

    created_s: float
    rank: str = ""
    attempts: int = 0
    queued_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None

    def phases(self, now_s: float) -> Iterator[tuple[str, float, float]]:
        """Yield name, start and end of each phase that began. now_s: end of one that has none."""
        end_s = now_s if self.end_s is None else self.end_s
        first_s = end_s if self.first_s is None else self.first_s
        if self.queued_s is None:
            yield "queue", self.created_s, first_s
            return
        started_s = min(self.created_s + self.queued_s, first_s)
        yield "queue", self.created_s, started_s
        yield "prefill", started_s, first_s
        if end_s > first_s:
            yield "decode", first_s, end_s


# Set while a traced request runs: each of its sequences adds its timing, up to MAX_TIMINGS.
TIMINGS: ContextVar[list[SequenceTiming] | None] = ContextVar("timings", default=None)


class Ticket:
    """An `EventSink` that survives the loss of ranks.

    kind: pipeline and class, as metrics name them.
    submit: the request to send now; after `resume` its prompt ends with the tokens so far.
    wait_for_slot: it is not the first sequence of its client's request.
    awaits_first_event: no event has arrived.
    client: of the rank that runs it; None: it is not sent.
    failed_on: clients of ranks that failed it, the last one last, with the number of the
    connection.
    attempts: failures that count (`count_failure`).
    on_lost: called when its rank is lost or reports that it cannot work.
    """

    def __init__(
        self, submit: Submit, *, wait_for_slot: bool, on_lost: Callable[[Ticket, Failed], None]
    ) -> None:
        pipeline = Pipeline.PREFILL if submit.prefill_only else Pipeline.GENERATION
        self.kind = pipeline.value, submit.priority.label
        self.submit = submit
        self.wait_for_slot = wait_for_slot
        self.awaits_first_event = True
        self.ended = False
        self.client: RankClient | None = None
        self.failed_on: dict[RankClient, int] = {}
        self.attempts = 0
        self._on_lost = on_lost
        self._created_s = monotonic_s()
        self.timing: SequenceTiming | None = None
        if (timings := TIMINGS.get()) is not None and len(timings) < MAX_TIMINGS:
            self.timing = SequenceTiming(self._created_s)
            timings.append(self.timing)
            self.submit = msgspec.structs.replace(submit, timed=True)
        self._request_id = self._connection = 0
        self._tokens = array.array("q")  # since it was sent
        self._reset_at_tokens = 0  # total tokens at the last reset of attempts
        self._cached_tokens = 0  # on the first rank
        self._hashes: tuple[bytes, ...] | None = None
        self._events: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    def hashes(self, block_tokens: int) -> tuple[bytes, ...]:
        if self._hashes is None:
            self._hashes = tuple(self.submit.block_hashes(block_tokens))
        return self._hashes

    # ---- to a rank

    def send(self, client: RankClient, key: RequestKey | None = None) -> None:
        """Send it to a rank. Raises what `RankClient.post` raises."""
        waited_s = monotonic_s() - self._created_s
        self._request_id = client.post(self.submit, self, key, waited_s)
        self.client, self._connection = client, client.connections
        if self.timing is not None:
            self.timing.rank = client.name
            self.timing.attempts += 1

    def cancel(self) -> None:
        """End it; its rank stops."""
        if self.timing is not None and self.timing.end_s is None:
            self.timing.end_s = monotonic_s()
        if not self.ended and self.client is not None:
            self.client.cancel(self._request_id)
        self.ended = True

    def record_failure(self) -> bool:
        """Record a failure of its rank. Return whether it is the first one on this connection."""
        assert self.client is not None
        client, self.client = self.client, None
        known = self.failed_on.pop(client, None)
        self.failed_on[client] = self._connection
        return known != self._connection

    def count_failure(self, *, counts: bool, attempt_reset_tokens: int) -> None:
        """Count a failure if it `counts`. Enough generated tokens reset the count first.

        A request that ends every rank generates no or few tokens.
        """
        generated_tokens = self.submit.generated + len(self._tokens)
        if generated_tokens - self._reset_at_tokens >= attempt_reset_tokens:
            self.attempts, self._reset_at_tokens = 0, generated_tokens
        self.attempts += counts

    def failed_clients(self) -> list[RankClient]:
        """Return the ranks that failed it and have not restarted since, the last one last."""
        return [client for client, number in self.failed_on.items() if client.connections == number]

    def resume(self) -> bool:
        """Make `submit` the rest of the request, with the same draws; False: nothing is left."""
        if not self._tokens:
            return True
        self.submit = submit = msgspec.structs.replace(
            self.submit,
            token_ids=[*self.submit.token_ids, *self._tokens],
            generated=self.submit.generated + len(self._tokens),
        )
        self._tokens, self._hashes = array.array("q"), None
        reason = finish_reason_of(submit)
        if reason is None:
            return True
        usage = Usage(
            prompt_tokens=submit.prompt_tokens,
            completion_tokens=submit.generated,
            cached_tokens=self._cached_tokens,
        )
        self._deliver(Finished(0, reason, usage))
        return False

    # ---- from a rank

    def put(self, event: SequenceEvent) -> None:
        if isinstance(event, Tokens):
            if not (self._tokens or self.submit.generated):
                self._cached_tokens = event.cached_tokens or 0
                self._record_first(event)
            self._tokens.extend(event.token_ids)
        elif isinstance(event, Failed) and event.code in _LOST_CODES:
            if not self.ended:
                self._on_lost(self, event)
            return
        elif isinstance(event, Scored):
            self._record_first(event)
        self._deliver(self._with_total_usage(event) if self.submit.generated else event)

    def on_rank_lost(self, error: ChannelError) -> None:
        if not self.ended:
            self._on_lost(self, _failed(error))

    def fail(self, error: TandemError | Failed) -> None:
        self._deliver(error if isinstance(error, Failed) else _failed(error))

    def _record_first(self, event: Tokens | Scored) -> None:
        if self.timing is not None:
            self.timing.queued_s, self.timing.first_s = event.queued_s, monotonic_s()
            if isinstance(event, Scored):  # without decode
                self.timing.end_s = self.timing.first_s

    def _with_total_usage(self, event: SequenceEvent) -> SequenceEvent:
        """Report the usage as if one rank had run all of it."""
        if not isinstance(event, Finished):
            return event
        usage = msgspec.structs.replace(event.usage, cached_tokens=self._cached_tokens)
        return msgspec.structs.replace(event, usage=usage)

    def _deliver(self, event: SequenceEvent) -> None:
        if self.ended:
            return
        self.ended = not isinstance(event, Tokens)
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- to the client

    async def next_batch(self) -> list[SequenceEvent]:
        """Return all events since the last call, at least one. The last event ends the request."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch, self._events = self._events, []
        return batch


def _failed(error: TandemError) -> Failed:
    retry_after_s = error.retry_after_s if isinstance(error, OverloadError) else None
    return Failed(0, error.code, error.message, error.status, retry_after_s)


def failure_of(event: SequenceEvent) -> TandemError:
    if isinstance(event, Failed) and event.code == OverloadError.code:
        return OverloadError(event.message, event.retry_after_s or SHORTEST_S)
    if isinstance(event, Failed):
        return RankError(event.message, event.code, event.status)
    return RankError(f"expected a score, got {type(event).__name__}", "no_answer", 500)


def finish_reason_of(submit: Submit) -> str | None:
    """Return why a generation is complete, "stop" or "length"; None: it is not.

    As the rank that generated it would report (actors/batching/finisher.py).
    """
    sampling = submit.sampling
    if sampling is None or not submit.generated:
        return None
    generated = submit.token_ids[submit.prompt_tokens :]
    if generated[-1] in submit.end_token_ids:
        return "stop"
    if sampling.choices is not None and _completes_choice(sampling.choices, generated):
        return "stop"
    return "length" if submit.generated >= sampling.max_tokens else None


def _completes_choice(choices: Sequence[Sequence[int]], generated: Sequence[int]) -> bool:
    matcher = ChoiceMatcher(choices)
    for token in generated:
        matcher.step(token)
    return matcher.is_complete
