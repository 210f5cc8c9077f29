"""GET /trace: what all processes have done in the next seconds, as one file for Perfetto."""

from __future__ import annotations

import asyncio
import logging
import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from actors.telemetry.chrome_trace import request_events
from cluster.api.session import Services
from contracts.errors import NotReadyError, OverloadError, RequestError
from contracts.logs import event
from contracts.traces import (
    MAX_TRACE_S,
    ClockOffset,
    RankNote,
    RequestSpan,
    TraceAnswer,
    TraceNote,
)

log = logging.getLogger("tandem.ingress")

DEFAULT_S = 5.0
EXTRA_S = 30.0  # beyond the seconds themselves, for all that is asked and written
INGRESS_PID = 1
FIRST_RANK_PID = 2
ME = "ingress"


async def trace(services: Services, request: Request) -> Response:
    services.callers.check_metrics(request)
    seconds = _seconds(request)
    if services.trace is None:
        raise NotReadyError("nobody is there who could ask the ranks")
    begun_s = services.clock()
    try:
        async with asyncio.timeout(seconds + EXTRA_S):
            clock = await services.trace.offset()
            answer = await services.trace.trace(seconds)
    except TimeoutError:
        raise NotReadyError(
            f"the ranks' traces were not there within {seconds + EXTRA_S:g} s"
        ) from None
    if answer.refused_s is not None:
        raise OverloadError(
            f"another trace is under way: try again in {math.ceil(answer.refused_s)} s",
            answer.refused_s,
        )
    seen = [] if seconds == 0 else [one for one in services.seen if one.end_s >= begun_s]
    event(log, "traced", seconds=seconds, missing=" ".join(answer.note.missing) or "none")
    return Response(_file(answer, seen, clock), media_type="application/json")


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


def _file(answer: TraceAnswer, seen: list[RequestSpan], clock: ClockOffset) -> bytes:
    """Chrome's JSON, put together from pieces of JSON."""
    own = msgspec.json.encode(request_events(seen, INGRESS_PID, clock.applied_s))
    note = answer.note
    ranks = {ME: RankNote(clock=clock, spans=len(seen)), **note.ranks}
    told = TraceNote(seconds=note.seconds, ranks=ranks, missing=note.missing)
    others = bytes(answer.events)
    joined = own[:-1] + (b"," if len(others) > 2 else b"") + others[1:]
    head = b'{"displayTimeUnit":"ms","otherData":{"tandem":' + msgspec.json.encode(told)
    return head + b'},"traceEvents":' + joined + b"}"
