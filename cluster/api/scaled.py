"""/scale: POST changes the number of ranks while they serve, GET says how far that has come. For
whoever has the operator's key (`tandem scale`)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answers import json_response
from cluster.api.body import read_body
from cluster.api.errors import BodyTimeoutError, MediaTypeError
from cluster.api.session import Services
from contracts.errors import NotReadyError
from contracts.logs import event
from contracts.scaling import ScaleState, ScaleWanted, check_counts, in_words

log = logging.getLogger("tandem.ingress")

MAX_BODY_BYTES: Final = 4096
ANSWER_S: Final = 15.0


async def scaled(services: Services, request: Request) -> Response:
    services.callers.check_operator(request)
    return json_response(await _asked(services, None))


async def begin_scale(services: Services, request: Request) -> Response:
    """200 once it has begun: it may take minutes."""
    services.callers.check_operator(request)
    if "content-type" not in request.headers:  # what a page of another site may send unasked
        raise MediaTypeError("content-type: expected application/json, got none", None)
    services.ending.check()
    wanted = await _wanted(services, request)
    check_counts(wanted)
    event(log, "scale_asked", logging.WARNING, wanted=in_words(wanted.counts))
    return json_response(await _asked(services, wanted))


async def _wanted(services: Services, request: Request) -> ScaleWanted:
    account, limit_s = services.open_requests.open(), services.http.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await read_body(request, ScaleWanted, MAX_BODY_BYTES, account)
    except TimeoutError:
        raise BodyTimeoutError(f"the body was not there within {limit_s:g} s", None) from None
    finally:
        account.close()


async def _asked(services: Services, wanted: ScaleWanted | None) -> ScaleState:
    if services.scale is None:
        raise NotReadyError("nobody is there who could start or end ranks")
    try:
        async with asyncio.timeout(ANSWER_S):
            return await services.scale(wanted)
    except TimeoutError:
        raise NotReadyError(
            f"the launcher of the ranks has not answered within {ANSWER_S:g} s"
        ) from None
