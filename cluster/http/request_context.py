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
from cluster.http.authenticator import Authenticator
from cluster.http.cost import TOKEN_BYTES, Bounds
from cluster.http.drain import DrainController
from cluster.http.errors import BodyTimeoutError, error_body, outcome_of
from cluster.http.memory_budget import MemoryBudget
from cluster.http.quotas import KeyQuota
from cluster.http.request_log import REQUEST_ID
from cluster.http.schemas import ModelInfo
from cluster.http.tokenizer_pool import TokenizerPool
from cluster.routing.backend import Backend
from contracts import metrics
from contracts.clock import Clock
from contracts.config import HttpConfig
from contracts.errors import ClientGoneError, ForbiddenError, RequestTimeoutError, TandemError
from contracts.metrics import Pipeline, RequestOutcome
from contracts.ranks import RankStatus
from contracts.requests import Caller, Priority, Usage
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import ClockOffset, RequestSpan, TraceResponse
from models.text.tokenizer import Tokenizer

Result = TypeVar("Result")
FetchRankMetrics = Callable[[], Awaitable[str]]
MAX_RECENT_REQUESTS = 4096  # latest requests, for a trace
FetchRankStatus = Callable[[], Awaitable[list[RankStatus]]]
ScaleRanks = Callable[[ScaleTarget | None], Awaitable[ScaleState]]
"""Begins to make the ranks as many as wanted; None: only says how far that has come."""

# In scope["state"], from a front of our own: to be called with what to do once the client has left,
# or with None when that matters no more. Elsewhere a task waits for it, which takes longer.
WATCH = "watch"
Watch = Callable[[Callable[[], None] | None], None]


class TraceSource(msgspec.Struct, frozen=True):
    """Whoever owns the ranks. trace: theirs of the next seconds, on that one's clock. offset: by
    how much ours is ahead of it."""

    trace: Callable[[float], Awaitable[TraceResponse]]
    offset: Callable[[], Awaitable[ClockOffset]]


class AppState(msgspec.Struct, frozen=True, kw_only=True):
    """What every endpoint works with. extra: metrics of the ranks, in Prometheus text format.
    ranks: what they say of themselves. trace: what they have done. scale: how many there are to
    be. sessions: of the requests under
    way. ending: whether the server is about to. seen: the latest that have ended."""

    backend: Backend
    tokenizer: Tokenizer
    tokenizer_pool: TokenizerPool
    bounds: Bounds
    memory_budget: MemoryBudget
    model: ModelInfo
    http: HttpConfig
    authenticator: Authenticator
    telemetry: Telemetry
    clock: Clock
    rank_metrics: FetchRankMetrics | None
    ranks: FetchRankStatus | None = None
    trace: TraceSource | None = None
    scale: ScaleRanks | None = None
    logs_prompts: bool = False
    active_requests: set[RequestContext] = msgspec.field(default_factory=set)
    drainer: DrainController = msgspec.field(default_factory=DrainController)
    recent_requests: deque[RequestSpan] = msgspec.field(
        default_factory=lambda: deque(maxlen=MAX_RECENT_REQUESTS)
    )


class _CancelScope:
    """Around what a task is at: ends it, with the first reason given. As `asyncio.timeout`, but for
    several reasons, and in a third of its time."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer: asyncio.TimerHandle | None = None
        self._reason: Callable[[], TandemError] | None = None
        self._exited = False

    def cancel_at(self, when_s: float, reason: Callable[[], TandemError]) -> None:
        """when_s: by the event loop's clock."""
        self._timer = self._task.get_loop().call_at(when_s, self.cancel, reason)

    def cancel(self, reason: Callable[[], TandemError]) -> None:
        if self._reason is None and not self._exited:
            self._reason = reason
            self._task.cancel()

    def __enter__(self) -> _CancelScope:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._exited = True
        if self._timer is not None:
            self._timer.cancel()
        if self._reason is None:
            return
        others = self._task.uncancel()  # somebody else cancels the request, too
        if kind is asyncio.CancelledError and not others:
            raise self._reason() from None


def _client_gone() -> TandemError:
    return ClientGoneError("the client left before its answer was complete")


class RequestContext:
    """Knows when the request came, whether its client is still there, and counts it once.

    pipeline and priority: an endpoint sets them when it has read the body, to no other priority
    than its key's if is_priority_fixed.
    caller: whose all that it submits is (cluster/http/authenticator.py). account: what it holds;
    whoever makes the session closes it. state: the request's, in its scope.
    """

    def __init__(
        self, app_state: AppState, receive: Receive, scope_state: Mapping[str, Any]
    ) -> None:
        self.request_id: str = scope_state.get(REQUEST_ID, "")
        self.pipeline = Pipeline.GENERATION
        self.priority = Priority.LS
        self.is_priority_fixed = False
        self.caller = Caller()
        self.account = app_state.memory_budget.open()
        self._app_state = app_state
        self._telemetry = app_state.telemetry
        self._clock = app_state.clock
        self._receive = receive
        self._watch: Watch = scope_state.get(WATCH) or self._watch_by_task
        self._arrived_s = app_state.clock()
        self._loop_s = asyncio.get_running_loop().time()
        self._watching: asyncio.Task[None] | None = None
        self._quota: KeyQuota | None = None
        self._is_admitted = False
        self._first_s: float | None = None  # when its first token came
        self._finished = False
        self._is_counted = True
        app_state.active_requests.add(self)

    def admit(self, quota: KeyQuota | None) -> None:
        """Counts against what its key may use; None: that is not bounded. Raises RateLimitError."""
        self._quota = quota
        if quota is not None:
            quota.acquire()
            self._is_admitted = True

    def rate_limit_headers(self) -> dict[str, str]:
        """Headers."""
        return {} if self._quota is None else self._quota.headers()

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
        """For tokens that are kept. Raises what `MemoryAccount.charge` does."""
        self.account.charge(count * TOKEN_BYTES)

    async def read(self, body: Awaitable[Result]) -> Result:
        """The request's body. Raises BodyTimeoutError if it does not come in its time, or what
        reading it raises.

        A deadline for the whole: a pace could be kept by a client that trickles for ever, and a
        body of http.max_body_bytes takes seconds.
        """
        with _CancelScope() as cancel_scope:
            cancel_scope.cancel_at(self._loop_s + self._body_limit_s, self._body_timeout_error)
            return await body

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which is cancelled when the client leaves or time is up.

        Raises ClientGoneError, RequestTimeoutError, or what `work` raises. Only after the body has
        been read: from then on the client can only say that it is gone.
        """
        try:
            with _CancelScope() as cancel_scope:
                cancel_scope.cancel_at(
                    self._loop_s + self._app_state.http.request_timeout_s, self._timeout_error
                )
                self._watch(lambda: cancel_scope.cancel(_client_gone))
                return await work
        finally:
            self._watch(None)

    @property
    def _body_limit_s(self) -> float:
        http = self._app_state.http
        return min(http.body_timeout_s, http.request_timeout_s)

    def _body_timeout_error(self) -> TandemError:
        limit_s, http = self._body_limit_s, self._app_state.http
        name = "body_timeout_s" if limit_s == http.body_timeout_s else "request_timeout_s"
        return BodyTimeoutError(f"the body did not arrive within {limit_s:g} s (http.{name})", None)

    def _timeout_error(self) -> TandemError:
        limit_s = self._app_state.http.request_timeout_s
        return RequestTimeoutError(f"not done within {limit_s:g} s (http.request_timeout_s)")

    def _watch_by_task(self, release: Callable[[], None] | None) -> None:
        """As every ASGI server lets us."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if release is not None:
            self._watching = asyncio.ensure_future(self._wait_disconnected())
            self._watching.add_done_callback(lambda _: release())

    async def _wait_disconnected(self) -> None:
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
        if self._quota is not None:
            self._quota.used(usage.prompt_tokens + usage.completion_tokens)
        label = self.priority.label
        self._telemetry.count(metrics.GENERATED_TOKENS, label, by=usage.completion_tokens)
        if usage.completion_tokens > 1:
            per_token_s = (last_s - first_s) / (usage.completion_tokens - 1)
            self._observe(metrics.TPOT, label, value=per_token_s)

    def exclude_from_metrics(self) -> None:
        """It is no request to a pipeline."""
        self._is_counted = False
        self._app_state.active_requests.discard(self)

    def finish(self, outcome: RequestOutcome) -> None:
        if self._finished:
            return
        self._finished = True
        if self._is_admitted and self._quota is not None:
            self._quota.release()
        self._app_state.active_requests.discard(self)
        if not self._is_counted:
            return
        self._telemetry.count(metrics.REQUESTS, *self._labels(), outcome)
        ended_s, first_s = self._clock(), self._first_s
        fields = self.request_id, *self._labels(), outcome.value
        self._app_state.recent_requests.append(
            RequestSpan(*fields, self._arrived_s, first_s, ended_s)
        )
        if outcome is RequestOutcome.OK:
            spent_s = ended_s - self._arrived_s
            self._observe(metrics.E2E_LATENCY, *self._labels(), value=spent_s)

    def _observe(self, metric: metrics.Metric, *labels: str, value: float) -> None:
        self._telemetry.observe(metric, *labels, value=value, request_id=self.request_id)

    def _labels(self) -> tuple[str, str]:
        return self.pipeline, self.priority.label


class EventStream(Response):
    """Server-sent events, each flushed as it comes.

    `open` waits for the first one, so that what fails before it still gets its HTTP status; what
    fails later is sent as an error event.
    """

    def __init__(
        self, ctx: RequestContext, first: bytes, rest: AsyncGenerator[bytes, None]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._ctx = ctx
        self._first = first
        self._rest = rest

    @classmethod
    async def open(cls, ctx: RequestContext, frames: AsyncGenerator[bytes, None]) -> EventStream:
        """Inside of `ctx.run`."""
        try:
            first = await anext(frames)
        except BaseException:
            await frames.aclose()
            raise
        return cls(ctx, first, frames)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._rest):
                await self._ctx.run(self._pump(send))
        except TandemError as error:
            self._ctx.finish(outcome_of(error))
            if not isinstance(error, ClientGoneError):
                await self._send(send, sse(error_body(error)) + DONE, more=False)
        except asyncio.CancelledError:
            self._ctx.finish(RequestOutcome.CLIENT_GONE)
            raise
        finally:
            self._ctx.finish(RequestOutcome.ERROR)

    async def _pump(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await self._send(send, self._first, more=True)
        async for frame in self._rest:
            await self._send(send, frame, more=True)
        self._ctx.finish(RequestOutcome.OK)  # before the client can see the end and ask for metrics
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


DONE = b"data: [DONE]\n\n"


def sse(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
