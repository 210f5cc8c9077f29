"""Operators' endpoints: /scale, /trace, /load, /status and /metrics.

`POST /scale` changes the number of ranks of a running server, `GET /scale` reports the progress.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from actors.telemetry.chrome_trace import request_events
from actors.telemetry.telemetry import CONTENT_TYPE, merge_expositions
from cluster.http import response_types
from cluster.http.body import read_small_body
from cluster.http.errors import MediaTypeError
from cluster.http.request_context import AppState, LauncherApi
from cluster.http.responses import json_response
from contracts import metrics
from contracts.clock import Clock, monotonic_s
from contracts.errors import NotReadyError, OverloadError, RequestError, TandemError
from contracts.import_path import version
from contracts.logs import event
from contracts.metrics import Pipeline
from contracts.ranks import RankStatus
from contracts.requests import Priority
from contracts.scaling import ScaleState, ScaleTarget, check_counts, format_counts
from contracts.traces import (
    MAX_TRACE_S,
    ClockOffset,
    RankTraceInfo,
    RequestSpan,
    TraceInfo,
    TraceResponse,
)

log = logging.getLogger("tandem.ingress")

MAX_BODY_BYTES: Final = 4096
REPLY_TIMEOUT_S: Final = 15.0

PlainEndpoint = Callable[[AppState, Request], Awaitable[Response]]

# Traces
DEFAULT_S = 5.0
EXTRA_S = 30.0  # beyond the traced seconds, for collecting and encoding
INGRESS_PID = 1
FIRST_RANK_PID = 2
INGRESS = "ingress"

# Scrapes
SCRAPE_TIMEOUT_S = 5.0
SHARE = 0.05  # maximum fraction of the event loop's time
MAX_PAUSE_S = 1.0
ANSWER_S = 0.0003  # time of the event loop per response


async def get_scale(app_state: AppState, request: Request) -> Response:
    app_state.authenticator.check_operator(request)
    return json_response(await _request_scale(app_state, None))


async def start_scale(app_state: AppState, request: Request) -> Response:
    """Answer 200 once the change has started: it may take minutes."""
    app_state.authenticator.check_operator(request)
    if not request.headers.get("content-type", "").strip():  # a cross-site form has none
        raise MediaTypeError("content-type: expected application/json, got none")
    app_state.drainer.check()
    requested = await read_small_body(app_state, request, ScaleTarget, MAX_BODY_BYTES)
    check_counts(requested)
    event(log, "scale_requested", logging.WARNING, requested=format_counts(requested.counts))
    return json_response(await _request_scale(app_state, requested))


async def _request_scale(app_state: AppState, requested: ScaleTarget | None) -> ScaleState:
    launcher = _launcher(app_state)
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            return await launcher.scale(requested)
    except TimeoutError:
        raise NotReadyError(
            f"the launcher of the ranks has not answered within {REPLY_TIMEOUT_S:g} s"
        ) from None


def _launcher(app_state: AppState) -> LauncherApi:
    if app_state.launcher is None:
        raise NotReadyError("this server has no access to its ranks")
    return app_state.launcher


async def trace(app_state: AppState, request: Request) -> Response:
    app_state.authenticator.check_metrics(request)
    seconds = _seconds(request)
    launcher, started_s = _launcher(app_state), monotonic_s()
    try:
        async with asyncio.timeout(seconds + EXTRA_S):
            clock = await launcher.offset()
            answer = await launcher.trace(seconds)
    except TimeoutError:
        raise NotReadyError(
            f"the ranks' traces did not arrive within {seconds + EXTRA_S:g} s"
        ) from None
    if answer.refused_s is not None:
        raise OverloadError(
            f"another trace is under way: try again in {math.ceil(answer.refused_s)} s",
            answer.refused_s,
        )
    recent_requests = (
        [] if seconds == 0 else [one for one in app_state.recent_requests if one.end_s >= started_s]
    )
    event(log, "trace_recorded", seconds=seconds, missing=" ".join(answer.note.missing) or "none")
    return Response(_file(answer, recent_requests, clock), media_type="application/json")


def _seconds(request: Request) -> float:
    given = request.query_params.get("seconds", f"{DEFAULT_S:g}")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_TRACE_S:
        shown = given[:20] if given.isprintable() else ascii(given[:20])
        message = f"seconds={shown}: give 0 (clocks only) to {MAX_TRACE_S:g}"
        raise RequestError(message, "seconds")
    return seconds


def _file(answer: TraceResponse, recent_requests: list[RequestSpan], clock: ClockOffset) -> bytes:
    """Return Chrome's JSON in pieces."""
    own = msgspec.json.encode(request_events(recent_requests, INGRESS_PID, clock.applied_s))
    note = answer.note
    ranks = {INGRESS: RankTraceInfo(clock=clock, spans=len(recent_requests)), **note.ranks}
    merged_note = TraceInfo(seconds=note.seconds, ranks=ranks, missing=note.missing)
    others = bytes(answer.events)
    joined = own[:-1] + (b"," if len(others) > 2 else b"") + others[1:]
    head = b'{"displayTimeUnit":"ms","otherData":{"tandem":' + msgspec.json.encode(merged_note)
    return head + b'},"traceEvents":' + joined + b"}"


async def load(app_state: AppState, request: Request) -> Response:
    """Answer with the requests under way and the sequences that wait for a first answer."""
    app_state.authenticator.check_metrics(request)
    return json_response(
        response_types.ServerLoad(
            server_load=len(app_state.active_requests), pipelines=_pipelines(app_state)
        )
    )


def _pipelines(app_state: AppState) -> dict[str, response_types.PipelineLoad]:
    requests = Counter(ctx.pipeline for ctx in app_state.active_requests)
    waiting = app_state.backend.waiting()
    return {
        pipeline.value: response_types.PipelineLoad(
            requests=requests[pipeline],
            waiting={one.label: waiting.get((pipeline.value, one.label), 0) for one in Priority},
        )
        for pipeline in Pipeline
    }


def status_of(app_state: AppState) -> PlainEndpoint:
    return _coalesced(lambda: _status(app_state), "application/json")


def _coalesced(make: Callable[[], Awaitable[str]], content_type: str) -> PlainEndpoint:
    scrapes = ScrapeCoalescer(make, monotonic_s)

    async def answer(app_state: AppState, request: Request) -> Response:
        app_state.authenticator.check_metrics(request)
        return Response(await scrapes.text(), headers={"Content-Type": content_type})

    return answer


async def _status(app_state: AppState) -> str:
    problems, ranks = list(app_state.backend.problems()), list[RankStatus]()
    if app_state.launcher is not None:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                ranks = await app_state.launcher.status()
        except TimeoutError:
            limit = f"{SCRAPE_TIMEOUT_S:g} s"
            problems.append(f"the ranks have not reported their state within {limit}")
        except TandemError as error:
            problems.append(error.message)
    found = response_types.Status(
        model=app_state.model.name,
        version=version(),
        problems=problems,
        pipelines=_pipelines(app_state),
        ranks=ranks,
    )
    return msgspec.json.encode(found).decode()


def metrics_of(app_state: AppState) -> PlainEndpoint:
    app_state.telemetry.read_each(
        metrics.REQUESTS_WAITING,
        lambda: {(one, label): n for (one, label), n in app_state.backend.waiting().items()},
    )
    return _coalesced(lambda: _scrape(app_state), CONTENT_TYPE)


async def _scrape(app_state: AppState) -> str:
    texts = [app_state.telemetry.exposition()]
    if app_state.launcher is not None:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                texts.append(await app_state.launcher.metrics())
        except TimeoutError:  # the ingress's own metrics are still useful
            reason = f"none within {SCRAPE_TIMEOUT_S:g} s"
            event(log, "rank_metrics_failed", logging.WARNING, error=reason)
    return merge_expositions(texts)


class ScrapeCoalescer:
    """Shares one call of `make` among concurrent callers of `text`.

    A caller gets a text whose collection started after its call. The next collection is delayed
    until the previous one and its responses are at most SHARE of the time, so a client that scrapes
    in a loop slows down itself and not the requests.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[str]],
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._make = make
        self._clock = clock
        self._sleep = sleep
        self._next: asyncio.Future[str] | None = None
        self._waiters = 0
        self._free_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def text(self) -> str:
        """Return the text; raises what `make` raises. Other callers survive cancellation."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            # Mark an exception as retrieved if every caller was cancelled.
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiters += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> None:
        try:
            while self._next is not None:
                pause_s = self._free_s - self._clock()
                if pause_s > 0:
                    await self._sleep(pause_s)
                answer, waiters = self._next, self._waiters
                self._next, self._waiters = None, 0
                start_s = self._clock()
                try:
                    answer.set_result(await self._make())
                except Exception as error:  # noqa: BLE001 - raised by every caller
                    answer.set_exception(error)
                end_s = self._clock()
                cost_s = end_s - start_s + ANSWER_S * waiters
                self._free_s = end_s + min(MAX_PAUSE_S, cost_s * (1 / SHARE - 1))
        finally:
            self._task = None
