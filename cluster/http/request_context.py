"""One HTTP request, from its arrival to the last byte: id, log, disconnect, deadlines, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.telemetry.telemetry import Telemetry
from cluster.http.authenticator import Authenticator, KeyQuota
from cluster.http.batch_types import BatchCall
from cluster.http.cost import TOKEN_BYTES, Bounds, MemoryBudget
from cluster.http.errors import BodyTimeoutError
from cluster.http.grammar_compiler import GrammarCompiler
from cluster.http.schemas import ModelInfo
from cluster.http.spans import TRACE, RequestTrace, RequestTracer
from cluster.http.text import TokenizerPool
from cluster.routing.pipeline_backend import Backend
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.config import HttpConfig, TandemConfig
from contracts.errors import (
    ClientGoneError,
    ForbiddenError,
    NotReadyError,
    RequestTimeoutError,
)
from contracts.logs import ACCESS, Line, log_lines
from contracts.metrics import Pipeline, RequestOutcome
from contracts.ranks import RankStatus
from contracts.requests import Caller, Priority, Usage
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import ClockOffset, RequestSpan, TraceResponse
from models.text.tokenizer import Tokenizer

log = logging.getLogger(ACCESS)

REQUEST_ID_HEADER = b"x-request-id"
MAX_PATH_CHARACTERS = 200
WRITTEN_AFTER_S = 0.2
WRITTEN_LINES = 1000
POLL_PERIOD_S = 0.05
MAX_UPLOADS = 8  # of files, at a time
MAX_RECENT_REQUESTS = 4096  # for traces
_USABLE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

# In scope["state"].
REQUEST_ID = "request_id"
# Set by our HTTP server: call it with a callback for the client's disconnect, or with None to reset
# it. On other servers a task waits for the disconnect, which is slower.
WATCH = "watch"
CALLER = "caller"  # set by this process's own requests (`RowClient`)

Result = TypeVar("Result")
Watch = Callable[[Callable[[], None] | None], None]

_bits = random.Random(secrets.randbits(256))  # not secret; faster than a system call each


def fresh_id() -> str:
    """Return a unique id: 32 hexadecimal digits."""
    return f"{_bits.getrandbits(128):032x}"


class AccessLog:
    """Buffer of the access log, on one event loop.

    Lines are written together, at most WRITTEN_AFTER_S after the first: single writes would take a
    twentieth of a small request's time.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def add(self, fields: dict[str, object]) -> None:
        self._lines.append((time.time(), "", fields))
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_later(WRITTEN_AFTER_S, self.write)
        elif len(self._lines) == WRITTEN_LINES:
            self.write()

    def write(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            log_lines(log, lines)


class RequestLog:
    """ASGI middleware, outside of the error handling.

    The log contains no text of a request: of the target only the path, percent-encoded as sent.
    """

    def __init__(self, app: ASGIApp, http: HttpConfig, access_log: AccessLog | None) -> None:
        self._app = app
        self._exclude = frozenset(http.access_log_exclude)
        self._adds_header = http.front == "direct"  # Serve's proxy answers with the id
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        header = (REQUEST_ID_HEADER, request_id.encode())
        scope.setdefault("state", {})[REQUEST_ID] = request_id
        arrived_s = monotonic_s()
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._adds_header:
                    message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            if (
                self._access_log is not None
                and log.isEnabledFor(logging.INFO)
                and not (status < 400 and _route(scope) in self._exclude)
            ):
                spent_ms = 1e3 * (monotonic_s() - arrived_s)
                self._access_log.add(
                    {
                        "method": scope["method"],
                        "path": _path(scope),
                        "status": status,
                        "ms": round(spent_ms, 1),
                        "request_id": request_id,
                    }
                )


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's id if it is usable in headers and logs, else a fresh one."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER:
            if _USABLE.fullmatch(value):
                return value.decode()
            break
    return fresh_id()


def _route(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _path(scope: Scope) -> str:
    raw = scope.get("raw_path") or scope["path"].encode()
    path = raw[: MAX_PATH_CHARACTERS + 1].decode("ascii", "backslashreplace")
    if len(path) > MAX_PATH_CHARACTERS:
        path = path[:MAX_PATH_CHARACTERS] + "..."
    return path if path.isprintable() else ascii(path)


def start_request_metrics(telemetry: Telemetry) -> None:
    """Export all series of requests from 0: the first failure counts as an increase."""
    for pipeline in Pipeline:
        telemetry.start(metrics.PROMPT_TOKENS, pipeline)
        telemetry.start(metrics.CACHED_TOKENS, pipeline)
    for label in (priority.label for priority in Priority):
        telemetry.start(metrics.GENERATED_TOKENS, label)
        telemetry.start(metrics.TPOT, label)
        for pipeline in Pipeline:
            telemetry.start(metrics.TTFT, pipeline, label)
            telemetry.start(metrics.E2E_LATENCY, pipeline, label)
            for outcome in RequestOutcome:
                telemetry.start(metrics.REQUESTS, pipeline, label, outcome)


class DrainController:
    """Rejects new requests and waits for active ones before the server stops."""

    def __init__(self) -> None:
        self.is_draining = False

    def check(self) -> None:
        """Raise NotReadyError while draining."""
        if self.is_draining:
            raise NotReadyError("this server is stopping: try another one, or again later")

    async def drain(self, requests: Collection[object], limit_s: float) -> int:
        """Start draining. Return how many requests are left when all ended, or after limit_s."""
        self.is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                while requests:
                    await asyncio.sleep(POLL_PERIOD_S)
        except TimeoutError:
            pass
        return len(requests)


class LauncherApi(Protocol):
    """The process that owns the ranks. Raises NotReadyError without a reply."""

    async def metrics(self) -> str:
        """Return the ranks' metrics as Prometheus text, empty without a reply."""

    async def status(self) -> list[RankStatus]: ...

    async def trace(self, seconds: float) -> TraceResponse:
        """Record the next seconds, on the launcher's clock."""

    async def offset(self) -> ClockOffset:
        """Return by how much this process's clock is ahead of the launcher's."""

    async def scale(self, requested: ScaleTarget | None) -> ScaleState:
        """Start a change of the number of ranks; None: only report the progress."""


class AppState(msgspec.Struct, frozen=True, kw_only=True):
    """Shared state of all endpoints.

    launcher: None: this process has no access to it. tracer: None: no OpenTelemetry spans.
    recent_requests: the latest completed ones, for traces.
    """

    backend: Backend
    tokenizer: Tokenizer
    tokenizer_pool: TokenizerPool
    grammars: GrammarCompiler
    bounds: Bounds
    memory_budget: MemoryBudget
    model: ModelInfo
    config: TandemConfig
    authenticator: Authenticator
    telemetry: Telemetry
    launcher: LauncherApi | None = None
    tracer: RequestTracer | None = None
    batches: BatchCall | None = None
    uploads: asyncio.Semaphore = msgspec.field(
        default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS)
    )
    active_requests: set[RequestContext] = msgspec.field(default_factory=set)
    drainer: DrainController = msgspec.field(default_factory=DrainController)
    recent_requests: deque[RequestSpan] = msgspec.field(
        default_factory=lambda: deque(maxlen=MAX_RECENT_REQUESTS)
    )

    @property
    def http(self) -> HttpConfig:
        return self.config.http


class RequestContext:
    """State of one request: arrival, caller, priority, memory account and outcome.

    pipeline, priority: set by an endpoint after reading the body. The class must be the key's if
    is_priority_fixed.
    caller: owner of all submitted sequences.
    account: memory; closed by the creator of the context.
    """

    def __init__(
        self, app_state: AppState, receive: Receive, scope_state: Mapping[str, Any]
    ) -> None:
        self.request_id: str = scope_state.get(REQUEST_ID, "")
        self._trace: RequestTrace | None = scope_state.get(TRACE)
        self.pipeline = Pipeline.GENERATION
        self.priority = Priority.LS
        self.is_priority_fixed = False
        self.caller = Caller()
        self.account = app_state.memory_budget.open()
        self._app_state = app_state
        self._telemetry = app_state.telemetry
        self._receive = receive
        self._watch: Watch = scope_state.get(WATCH) or self._watch_by_task
        self._arrived_s = monotonic_s()
        self._loop_s = asyncio.get_running_loop().time()
        self._watching: asyncio.Task[None] | None = None
        self._quota: KeyQuota | None = None
        self._is_admitted = False
        self._first_s: float | None = None  # time of the first token
        self._finished = False
        self._is_counted = True
        app_state.active_requests.add(self)

    def authorize(self, request: Request) -> None:
        """Set caller and priority by the request's key, and count it against the key's quota.

        Raises UnauthorizedError, NotReadyError while draining, or RateLimitError.
        """
        if (caller := request.scope["state"].get(CALLER)) is not None:
            self.caller = caller
            self.set_priority(Priority.BE)
            self.is_priority_fixed = True
            return
        authenticator = self._app_state.authenticator
        client = authenticator.check(request)
        self.caller = authenticator.caller(client, self.request_id)
        self._app_state.drainer.check()
        self._quota = client.quota
        if self._quota is not None:
            self._quota.acquire()
            self._is_admitted = True
        self.set_priority(Priority[client.api_key.priority.upper()])
        self.is_priority_fixed = client.api_key.fixed_priority

    def rate_limit_headers(self) -> dict[str, str]:
        return {} if self._quota is None else self._quota.headers()

    def set_priority(self, priority: Priority) -> None:
        """Set the class that the body names. Raises ForbiddenError if the key does not allow it."""
        if self.is_priority_fixed and priority is not self.priority:
            raise ForbiddenError(
                f"priority: this API key is for {self.priority.label} only: leave it out",
                "priority",
            )
        self.priority = priority
        self.account.best_effort = priority is Priority.BE

    def charge_tokens(self, count: int) -> None:
        """Charge tokens that are kept. Raises what `MemoryAccount.charge` raises."""
        self.account.charge(count * TOKEN_BYTES)

    async def read(self, body: Awaitable[Result]) -> Result:
        """Return the request's body. Raises BodyTimeoutError, or what reading raises.

        The deadline is for the whole body: a client could sustain a minimum rate forever.
        """
        http = self._app_state.http
        limit_s = min(http.body_timeout_s, http.request_timeout_s)
        try:
            async with asyncio.timeout_at(self._loop_s + limit_s):
                return await body
        except TimeoutError:
            name = "body_timeout_s" if limit_s == http.body_timeout_s else "request_timeout_s"
            raise BodyTimeoutError(
                f"the body did not arrive within {limit_s:g} s (http.{name})"
            ) from None

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`; cancel it when the client disconnects or time is up.

        Raises ClientGoneError, RequestTimeoutError, or what `work` raises. Requires that the body
        is read: then the only message left is the disconnect.
        """
        limit_s, is_gone = self._app_state.http.request_timeout_s, False

        def leave() -> None:
            nonlocal is_gone
            is_gone = True
            with contextlib.suppress(RuntimeError):  # the work has ended
                deadline.reschedule(0.0)

        try:
            async with asyncio.timeout_at(self._loop_s + limit_s) as deadline:
                self._watch(leave)
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            if is_gone:
                raise ClientGoneError(
                    "the client disconnected before its answer was complete"
                ) from None
            raise RequestTimeoutError(
                f"not done within {limit_s:g} s (http.request_timeout_s)"
            ) from None
        finally:
            self._watch(None)

    def _watch_by_task(self, release: Callable[[], None] | None) -> None:
        """Watch for a disconnect on any ASGI server."""
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
        """Record an arrival. The first one determines the time to first token."""
        if self._first_s is None:
            self._first_s = monotonic_s()
            waited_s = self._first_s - self._arrived_s
            self._observe(metrics.TTFT, *self._labels(), value=waited_s)

    def on_sequence_end(self, usage: Usage, first_s: float, last_s: float) -> None:
        """Count one sequence's tokens. first_s, last_s: times of its first and last tokens."""
        self._telemetry.count(metrics.PROMPT_TOKENS, self.pipeline, by=usage.prompt_tokens)
        self._telemetry.count(metrics.CACHED_TOKENS, self.pipeline, by=usage.cached_tokens)
        if self._quota is not None:
            self._quota.consume(usage.prompt_tokens + usage.completion_tokens)
        if self._trace is not None:
            self._trace.add_usage(usage)
        label = self.priority.label
        self._telemetry.count(metrics.GENERATED_TOKENS, label, by=usage.completion_tokens)
        if usage.completion_tokens > 1:
            per_token_s = (last_s - first_s) / (usage.completion_tokens - 1)
            self._observe(metrics.TPOT, label, value=per_token_s)

    def exclude_from_metrics(self) -> None:
        """Do not count the request: it does not use a pipeline."""
        self._is_counted = False
        self._app_state.active_requests.discard(self)

    def finish(self, outcome: RequestOutcome) -> None:
        if self._finished:
            return
        self._finished = True
        if self._is_admitted and self._quota is not None:
            self._quota.release()
        self._app_state.active_requests.discard(self)
        if self._trace is not None:
            self._trace.set_result(*self._labels(), outcome)
        if not self._is_counted:
            return
        self._telemetry.count(metrics.REQUESTS, *self._labels(), outcome)
        ended_s, first_s = monotonic_s(), self._first_s
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
