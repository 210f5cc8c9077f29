"""A request between its admission and its answer, whichever ranks it meets on the way."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Callable

import msgspec

from cluster.routing.finish_reason import finish_reason_of
from cluster.routing.rank_client import RankClient
from contracts.clock import Clock, monotonic_s
from contracts.errors import (
    ChannelError,
    HandedOverError,
    OverloadError,
    RankError,
    TandemError,
)
from contracts.messages import Failed, Finished, SequenceEvent, Submit, Tokens
from contracts.metrics import Pipeline
from contracts.requests import Usage
from contracts.routing_messages import RequestKey
from planner.scheduling.drain_rate import SHORTEST_S

_LOST_CODES = frozenset(
    {"not_ready", "peer_lost", "peer_dead", "peer_hung", "channel_error", HandedOverError.code}
)


class Ticket:
    """A `rank_client.Sink`. lost: called when its rank is lost, or says that it cannot work.

    kind: its pipeline and class, as metrics name them. submit: what a rank is to be asked now; once
    another one goes on with it (`resume`) it ends with the tokens so far. patient: it is not
    the first sequence of its client's request. waits: for a first answer. client: of the rank that
    has it; None: it has not been sent. failed_on: ranks that failed with it, the last one last,
    each with the connection on which it did so last. attempts: failures that
    count (`count_failure`). failure: the first one.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        wait_for_slot: bool,
        on_lost: Callable[[Ticket, Failed], None],
        clock: Clock = monotonic_s,
    ) -> None:
        self.kind = _kind_of(submit)
        self.submit = submit
        self.wait_for_slot = wait_for_slot
        self.waits = True
        self.ended = False
        self.client: RankClient | None = None
        self.failed_on: dict[RankClient, int] = {}
        self.attempts = 0
        self.failure: Failed | None = None
        self._on_lost = on_lost
        self._clock = clock
        self._created_s = clock()
        self._request_id = self._connection = 0
        self._tokens = array.array("q")  # that have come since it was sent
        self._reset_at_tokens = 0  # how many had come in all when earlier failures ceased to count
        self._cached_tokens = 0  # where it was sent first
        self._hashes: tuple[bytes, ...] | None = None
        self._events: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether tokens of it have come."""
        return bool(self._tokens or self.submit.generated)

    def hashes(self, block_tokens: int) -> tuple[bytes, ...]:
        """Of the full blocks of its prompt."""
        if self._hashes is None:
            self._hashes = tuple(self.submit.block_hashes(block_tokens))
        return self._hashes

    # ---- towards a rank

    def send(self, client: RankClient, key: RequestKey | None = None) -> None:
        """Raises what `RankClient.post` does."""
        waited_s = self._clock() - self._created_s
        self._request_id = client.post(self.submit, self, key, waited_s)
        self.client, self._connection = client, client.connections

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if not self.ended and self.client is not None:
            self.client.cancel(self._request_id)
        self.ended = True

    def record_failure(self, cause: Failed) -> bool:
        """Of the rank that has it. Whether that is the first one of this connection."""
        assert self.client is not None
        self.failure = self.failure or cause
        client, self.client = self.client, None
        known = self.failed_on.pop(client, None)
        self.failed_on[client] = self._connection
        return known != self._connection

    def count_failure(self, *, counts: bool, attempt_reset_tokens: int) -> None:
        """One more, if it counts, once the tokens that it has given have made up for earlier ones.
        What ends every rank that it meets gives none, or few."""
        generated_tokens = self.submit.generated + len(self._tokens)
        if generated_tokens - self._reset_at_tokens >= attempt_reset_tokens:
            self.attempts, self._reset_at_tokens = 0, generated_tokens
        self.attempts += counts

    def failed_clients(self) -> list[RankClient]:
        """Ranks that have failed it and have not begun anew since, the last one last."""
        return [client for client, number in self.failed_on.items() if client.connections == number]

    def resume(self) -> bool:
        """Makes `submit` what is still wanted, for another rank: which draws what this one would
        have drawn. False: all that was missing is how it ended, and so it has ended."""
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
            if not self.has_tokens:
                self._cached_tokens = event.cached_tokens or 0
            self._tokens.extend(event.token_ids)
        elif isinstance(event, Failed) and event.code in _LOST_CODES:
            if not self.ended:
                self._on_lost(self, event)
            return
        self._deliver(self._with_total_usage(event) if self.submit.generated else event)

    def on_rank_lost(self, error: ChannelError) -> None:
        if not self.ended:
            self._on_lost(self, _failed(error))

    def fail(self, error: TandemError | Failed) -> None:
        self._deliver(error if isinstance(error, Failed) else _failed(error))

    def _with_total_usage(self, event: SequenceEvent) -> SequenceEvent:
        """As if one rank had done it all."""
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

    # ---- towards the client

    async def next_batch(self) -> list[SequenceEvent]:
        """All events that arrived since the last call, at least one; none come after the end."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch, self._events = self._events, []
        return batch


def _kind_of(submit: Submit) -> tuple[str, str]:
    pipeline = Pipeline.PREFILL if submit.prefill_only else Pipeline.GENERATION
    return pipeline.value, submit.priority.label


def _failed(error: TandemError) -> Failed:
    retry_after_s = error.retry_after_s if isinstance(error, OverloadError) else None
    return Failed(0, error.code, error.message, error.status, retry_after_s)


def failure_of(event: SequenceEvent) -> TandemError:
    if isinstance(event, Failed) and event.code == OverloadError.code:
        return OverloadError(event.message, event.retry_after_s or SHORTEST_S)
    if isinstance(event, Failed):
        return RankError(event.message, event.code, event.status)
    return RankError(f"expected a score, got {type(event).__name__}", "no_answer", 500)
