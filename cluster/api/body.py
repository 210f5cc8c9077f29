"""From the bytes of a request to a typed body, within limits."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from cluster.api.errors import BodyTooLargeError, MediaTypeError
from contracts.errors import ClientGoneError, RequestError

Body = TypeVar("Body", bound=msgspec.Struct)

_PATH = re.compile(r"`\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """The body as `kind`. Checked in this order: declared size, media type, actual size, JSON,
    types. Raises RequestError; a wrong field is named in `param`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise MediaTypeError(f"content-type: expected application/json, got {media_type}", None)
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                raise _too_large(len(data), max_bytes)
    except ClientDisconnect:
        raise ClientGoneError("the client left while sending its request") from None
    return decode_body(bytes(data), kind)


def decode_body(data: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", None) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}", None) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", None) from None


def _wrong_field(message: str) -> RequestError:
    """ "Expected `int`, got `str` - at `$.n`" with n as the param."""
    missing = _MISSING.search(message)
    path = _PATH.search(message)
    where = [path[1]] if path and path[1] else []
    param = ".".join([*where, missing[1]] if missing else where) or None
    text = "missing" if missing else message.partition(" - at ")[0]
    return RequestError(f"{param}: {text}" if param else text, param)


def _too_large(got_bytes: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {got_bytes} bytes, at most {max_bytes} are accepted (http.max_body_bytes)",
        None,
    )
