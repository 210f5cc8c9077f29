"""From the bytes of a request to a typed body, within limits."""

from __future__ import annotations

import difflib
import gc
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from cluster.http.cost import decoded_bytes
from cluster.http.errors import BodyTooLargeError, MediaTypeError, UnknownFieldError
from cluster.http.memory_budget import MemoryAccount
from cluster.http.request_context import AppState, RequestContext
from cluster.http.schemas import (
    NESTED,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    ScoreBody,
    TokenizeBody,
)
from contracts.errors import ClientGoneError, RequestError
from contracts.json_input import wrong_field
from contracts.logs import event
from contracts.scaling import ScaleTarget

Body = TypeVar("Body", bound=msgspec.Struct)

log = logging.getLogger("tandem.prompts")

MAX_SHOWN_CHARACTERS = 64
MAX_LOGGED_BYTES = 16 << 10
_KINDS = (
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    ScaleTarget,
    ScoreBody,
    TokenizeBody,
)
# Made here: where two threads make the first one of a type at once, msgspec crashes.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in _KINDS
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?([^`]*)`)?", re.DOTALL)


async def read_request_body(
    app_state: AppState, ctx: RequestContext, request: Request, kind: type[Body]
) -> Body:
    """The request's body, if it comes in its time; charged to the session's account."""
    limit = app_state.http.max_body_bytes
    log_body = partial(_log_body, ctx.request_id) if app_state.logs_prompts else None
    return await ctx.read(read_body(request, kind, limit, ctx.account, log_body))


def _log_body(request_id: str, data: bytearray) -> None:
    """In the log, for log.prompts wants it."""
    body = data[:MAX_LOGGED_BYTES].decode("utf-8", "replace")
    event(log, "request_body", request_id=request_id, bytes=len(data), body=body)


async def read_body(
    request: Request,
    kind: type[Body],
    max_bytes: int,
    account: MemoryAccount,
    log_body: Callable[[bytearray], None] | None = None,
) -> Body:
    """The body as `kind`. Checked in this order: declared size, media type, actual size, JSON,
    types. Raises RequestError; a wrong field is named in `param`.

    account: charged as the body grows; of that, what the decoded body holds stays charged. show: is
    given it as it came.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise MediaTypeError(f"content-type: expected application/json, got {media_type}", None)
    data = bytearray()
    try:
        async for chunk in request.stream():
            if len(data) + len(chunk) > max_bytes:
                raise _too_large(len(data) + len(chunk), max_bytes)
            account.charge(len(chunk))
            data += chunk
    except ClientDisconnect:
        raise ClientGoneError("the client left while sending its request") from None
    if log_body is not None:
        log_body(data)
    account.charge(decoded_bytes(data))
    body = decode_body(data, kind)
    account.release(len(data))
    return body


def decode_body(data: bytes | bytearray, kind: type[Body]) -> Body:
    collects = gc.isenabled()
    gc.disable()  # all that is decoded is kept: to look through it again and again takes longest
    try:
        body: Body = _DECODERS[kind].decode(data)
        return body
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", None) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}", None) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", None) from None
    finally:
        if collects:
            gc.enable()


def _wrong_field(message: str, kind: type[msgspec.Struct]) -> RequestError:
    """ "Expected `int`, got `str` - at `$.n`" with n as the param."""
    unknown = _UNKNOWN.fullmatch(message)
    if unknown:
        return _unknown_field(unknown[1], unknown[2] or "", kind)
    param, text = wrong_field(message)
    return RequestError(f"{param}: {text}" if param else text, param or None)


def _unknown_field(name: str, path: str, kind: type[msgspec.Struct]) -> RequestError:
    """Refused with the nearest field of the object that it stands in."""
    shown = name if name.isprintable() else repr(name)[1:-1]
    if len(shown) > MAX_SHOWN_CHARACTERS:
        shown = f"{shown[:MAX_SHOWN_CHARACTERS]}..."
    param = f"{path}.{shown}" if path else shown
    inner = path.rpartition(".")[2].partition("[")[0]
    known = [field.encode_name for field in msgspec.structs.fields(NESTED.get(inner, kind))]
    matches = difflib.get_close_matches(shown, known, n=1)
    hint = f": did you mean {matches[0]}?" if matches else "; it would have no effect: leave it out"
    return UnknownFieldError(f"{param} is not a field of this request{hint}", param)


def _too_large(got_bytes: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {got_bytes} bytes, at most {max_bytes} are accepted (http.max_body_bytes)",
        None,
    )
