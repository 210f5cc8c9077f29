"""One HTTP request, from its arrival to the last byte: watches the client and the clock, counts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actors.telemetry.telemetry import Telemetry
from cluster.api.allowances import Allowance
from cluster.api.callers import Callers
from cluster.api.cost import TOKEN_BYTES, Bounds
from cluster.api.ending import Ending
from cluster.api.errors import BodyTimeoutError, error_body, outcome_of
from cluster.api.open_requests import OpenRequests
from cluster.api.request_log import REQUEST_ID
from cluster.api.schemas import ServedModel
from cluster.api.tokenizing import Tokenizing
from cluster.routing.backend import Backend
from contracts import metrics
from contracts.clock import Clock
from contracts.config import HttpConfig
from contracts.errors import ClientGoneError, ForbiddenError, RequestTimeoutError, TandemError
from contracts.metrics import Outcome, Pipeline
from contracts.requests import Caller, Priority, Usage
from contracts.scaling import ScaleState, ScaleWanted
from contracts.traces import ClockOffset, RequestSpan, TraceAnswer
from contracts.worker import RankStatus
from models.text.tokenizer import Tokenizer

Result = TypeVar("Result")
ExtraMetrics = Callable[[], Awaitable[str]]
MAX_SEEN = 4096  # latest requests, for a trace
AskRanks = Callable[[], Awaitable[list[RankStatus]]]
Scale = Callable[[ScaleWanted | None], Awaitable[ScaleState]]
"""Begins to make the ranks as many as wanted; None: only says how far that has come."""

# In scope["state"], from a front of our own: to be called with what to do once the client has left,
# or with None when that matters no more. Elsewhere a task waits for it, which takes longer.
WATCH = "watch"
Watch = Callable[[Callable[[], None] | None], None]


class AskTrace(msgspec.Struct, frozen=True):
    """Whoever owns the ranks. trace: theirs of the next seconds, on that one's clock. offset: by
    how much ours is ahead of it."""

    trace: Callable[[float], Awaitable[TraceAnswer]]
    offset: Callable[[], Awaitable[ClockOffset]]


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What every endpoint works with. extra: metrics of the ranks, in Prometheus text format.
    ranks: what they say of themselves. trace: what they have done. scale: how many there are to
    be. sessions: of the requests under
    way. ending: whether the server is about to. seen: the latest that have ended."""

    backend: Backend
    tokenizer: Tokenizer
    tokenizing: Tokenizing
    bounds: Bounds
    open_requests: OpenRequests
    model: ServedModel
    http: HttpConfig
    callers: Callers
    telemetry: Telemetry
    clock: Clock
    extra: ExtraMetrics | None
    ranks: AskRanks | None = None
    trace: AskTrace | None = None
    scale: Scale | None = None
    logs_prompts: bool = False
    sessions: set[Session] = msgspec.field(default_factory=set)
    ending: Ending = msgspec.field(default_factory=Ending)
    seen: deque[RequestSpan] = msgspec.field(default_factory=lambda: deque(maxlen=MAX_SEEN))


class _Cut:
    """Around what a task is at: ends it, with the first reason given. As `asyncio.timeout`, but for
    several reasons, and in a third of its time."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer: asyncio.TimerHandle | None = None
        self._reason: Callable[[], TandemError] | None = None
        self._over = False

    def at(self, when_s: float, reason: Callable[[], TandemError]) -> None:
        """when_s: by the event loop's clock."""
        self._timer = self._task.get_loop().call_at(when_s, self.now, reason)

    def now(self, reason: Callable[[], TandemError]) -> None:
        if self._reason is None and not self._over:
            self._reason = reason
            self._task.cancel()

    def __enter__(self) -> _Cut:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._reason is None:
            return
        others = self._task.uncancel()  # somebody else cancels the request, too
        if kind is asyncio.CancelledError and not others:
            raise self._reason() from None


def _client_gone() -> TandemError:
    return ClientGoneError("the client left before its answer was complete")


class Session:
    """Knows when the request came, whether its client is still there, and counts it once.

    pipeline and priority: an endpoint sets them when it has read the body, to no other priority
    than its key's if is_priority_fixed.
    caller: whose all that it submits is (cluster/api/callers.py). account: what it holds; whoever
    makes the session closes it. state: the request's, in its scope.
    """

    def __init__(self, services: Services, receive: Receive, state: Mapping[str, Any]) -> None:
        self.request_id: str = state.get(REQUEST_ID, "")
        self.pipeline = Pipeline.GENERATION
        self.priority = Priority.LS
        self.is_priority_fixed = False
        self.caller = Caller()
        self.account = services.open_requests.open()
        self._services = services
        self._telemetry = services.telemetry
        self._clock = services.clock
        self._receive = receive
        self._watch: Watch = state.get(WATCH) or self._watch_by_task
        self._arrived_s = services.clock()
        self._loop_s = asyncio.get_running_loop().time()
        self._watching: asyncio.Task[None] | None = None
        self._allowance: Allowance | None = None
        self._is_let_in = False
        self._first_s: float | None = None  # when its first token came
        self._finished = False
        self._counts = True
        services.sessions.add(self)

    def begin(self, allowance: Allowance | None) -> None:
        """Counts against what its key may use; None: that is not bounded. Raises RateLimitError."""
        self._allowance = allowance
        if allowance is not None:
            allowance.enter()
            self._is_let_in = True

    def limits_left(self) -> dict[str, str]:
        """Headers."""
        return {} if self._allowance is None else self._allowance.headers()

    def set_priority(self, priority: Priority) -> None:
        """The class of its key, or the one that its body names. Raises ForbiddenError."""
        if self.is_priority_fixed and priority is not self.priority:
            raise ForbiddenError(
                f"priority: this API key is for {self.priority.label} only: leave it out",
                "priority",
            )
        self.priority = priority
        self.account.best_effort = priority is Priority.BE

    def charge_tokens(self, count: int) -> None:
        """For tokens that are kept. Raises what `Account.charge` does."""
        self.account.charge(count * TOKEN_BYTES)

    async def read(self, body: Awaitable[Result]) -> Result:
        """The request's body. Raises BodyTimeoutError if it does not come in its time, or what
        reading it raises.

        A deadline for the whole: a pace could be kept by a client that trickles for ever, and a
        body of http.max_body_bytes takes seconds.
        """
        with _Cut() as cut:
            cut.at(self._loop_s + self._body_limit_s, self._body_late)
            return await body

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which is cancelled when the client leaves or time is up.

        Raises ClientGoneError, RequestTimeoutError, or what `work` raises. Only after the body has
        been read: from then on the client can only say that it is gone.
        """
        try:
            with _Cut() as cut:
                cut.at(self._loop_s + self._services.http.request_timeout_s, self._late)
                self._watch(lambda: cut.now(_client_gone))
                return await work
        finally:
            self._watch(None)

    @property
    def _body_limit_s(self) -> float:
        http = self._services.http
        return min(http.body_timeout_s, http.request_timeout_s)

    def _body_late(self) -> TandemError:
        limit_s, http = self._body_limit_s, self._services.http
        name = "body_timeout_s" if limit_s == http.body_timeout_s else "request_timeout_s"
        return BodyTimeoutError(f"the body did not arrive within {limit_s:g} s (http.{name})", None)

    def _late(self) -> TandemError:
        limit_s = self._services.http.request_timeout_s
        return RequestTimeoutError(f"not done within {limit_s:g} s (http.request_timeout_s)")

    def _watch_by_task(self, leave: Callable[[], None] | None) -> None:
        """As every ASGI server lets us."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if leave is not None:
            self._watching = asyncio.ensure_future(self._until_gone())
            self._watching.add_done_callback(lambda _: leave())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def on_token(self) -> None:
        """Call with every arrival; the first one counts as TTFT."""
        if self._first_s is None:
            self._first_s = self._clock()
            waited_s = self._first_s - self._arrived_s
            self._observe(metrics.TTFT, *self._labels(), value=waited_s)

    def on_sequence_end(self, usage: Usage, first_s: float, last_s: float) -> None:
        """Counts one sequence's tokens; first_s, last_s: when its first and last tokens came."""
        self._telemetry.count(metrics.PROMPT_TOKENS, self.pipeline, by=usage.prompt_tokens)
        self._telemetry.count(metrics.CACHED_TOKENS, self.pipeline, by=usage.cached_tokens)
        if self._allowance is not None:
            self._allowance.used(usage.prompt_tokens + usage.completion_tokens)
        label = self.priority.label
        self._telemetry.count(metrics.GENERATED_TOKENS, label, by=usage.completion_tokens)
        if usage.completion_tokens > 1:
            per_token_s = (last_s - first_s) / (usage.completion_tokens - 1)
            self._observe(metrics.TPOT, label, value=per_token_s)

    def not_counted(self) -> None:
        """It is no request to a pipeline."""
        self._counts = False
        self._services.sessions.discard(self)

    def finish(self, outcome: Outcome) -> None:
        if self._finished:
            return
        self._finished = True
        if self._is_let_in and self._allowance is not None:
            self._allowance.leave()
        self._services.sessions.discard(self)
        if not self._counts:
            return
        self._telemetry.count(metrics.REQUESTS, *self._labels(), outcome)
        ended_s, first_s = self._clock(), self._first_s
        told = self.request_id, *self._labels(), outcome.value
        self._services.seen.append(RequestSpan(*told, self._arrived_s, first_s, ended_s))
        if outcome is Outcome.OK:
            spent_s = ended_s - self._arrived_s
            self._observe(metrics.TURNAROUND, *self._labels(), value=spent_s)

    def _observe(self, metric: metrics.Metric, *labels: str, value: float) -> None:
        self._telemetry.observe(metric, *labels, value=value, request_id=self.request_id)

    def _labels(self) -> tuple[str, str]:
        return self.pipeline, self.priority.label


class EventStream(Response):
    """Server-sent events, each flushed as it comes.

    `open` waits for the first one, so that what fails before it still gets its HTTP status; what
    fails later is sent as an error event.
    """

    def __init__(self, session: Session, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._session = session
        self._first = first
        self._rest = rest

    @classmethod
    async def open(cls, session: Session, frames: AsyncGenerator[bytes, None]) -> EventStream:
        """Inside of `session.run`."""
        try:
            first = await anext(frames)
        except BaseException:
            await frames.aclose()
            raise
        return cls(session, first, frames)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._rest):
                await self._session.run(self._pump(send))
        except TandemError as error:
            self._session.finish(outcome_of(error))
            if not isinstance(error, ClientGoneError):
                await self._send(send, sse(error_body(error)) + DONE, more=False)
        except asyncio.CancelledError:
            self._session.finish(Outcome.CLIENT_GONE)
            raise
        finally:
            self._session.finish(Outcome.ERROR)

    async def _pump(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await self._send(send, self._first, more=True)
        async for frame in self._rest:
            await self._send(send, frame, more=True)
        self._session.finish(Outcome.OK)  # before the client can see the end and ask for metrics
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


DONE = b"data: [DONE]\n\n"


def sse(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
