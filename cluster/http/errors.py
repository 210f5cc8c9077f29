"""The mapping of errors to HTTP: every error becomes an OpenAI error body here."""

import math

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cluster.http.response_types import ErrorDetail, ErrorResponse, ErrorType
from contracts.errors import (
    ClientGoneError,
    OverloadError,
    RequestError,
    RequestTimeoutError,
    TandemError,
    UnauthorizedError,
    UnknownModelError,
)
from contracts.metrics import RequestOutcome

_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


class BodyTooLargeError(RequestError):
    code = "body_too_large"
    status = 413


class BodyTimeoutError(RequestError):
    code = "request_timeout"
    status = 408


class MalformedHttpError(RequestError):
    """The client sent something that is not HTTP, or more of it than is accepted."""

    code = "malformed_http"


class HeadersTooSlowError(RequestError):
    code = "header_timeout"
    status = 408


class TargetTooLongError(RequestError):
    code = "target_too_long"
    status = 414


class HeadersTooLargeError(RequestError):
    code = "headers_too_large"
    status = 431


class TooManyConnectionsError(TandemError):
    """All connections of the server are at work."""

    code = "too_many_connections"
    status = 503


class MediaTypeError(RequestError):
    code = "unsupported_media_type"
    status = 415


class UnsupportedFieldError(RequestError):
    code = "unsupported_parameter"


class UnknownFieldError(RequestError):
    code = "unknown_parameter"


class UnknownObjectError(UnknownModelError):
    """No file or batch of the caller has this id."""

    code = "not_found"


class ConflictError(RequestError):
    """The state of a file or batch does not permit the request."""

    code = "conflict"
    status = 409


class StorageError(RequestError):
    """batch.storage cannot be read or written."""

    code = "storage_failed"
    status = 507


def error_body(error: TandemError) -> ErrorResponse:
    return _body(
        error.status,
        error.message,
        error.code,
        error.param if isinstance(error, RequestError) else None,
    )


def error_response(error: TandemError) -> Response:
    headers = {}
    if isinstance(error, OverloadError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTimeoutError):
        headers["Connection"] = "close"  # do not wait for the rest of the body
    return _response(error.status, error_body(error), headers)


def outcome_of(error: TandemError) -> RequestOutcome:
    if isinstance(error, ClientGoneError):
        return RequestOutcome.CLIENT_GONE
    if isinstance(error, RequestTimeoutError):
        return RequestOutcome.TIMEOUT
    if error.status == OverloadError.status:
        return RequestOutcome.OVERLOAD
    return RequestOutcome.REFUSED if error.status < 500 else RequestOutcome.ERROR


def install_handlers(app: Starlette) -> None:
    """Answer unknown routes, wrong methods and internal errors in the same form."""
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(Exception, bug_response)


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "no such route" if error.status_code == 404 else error.detail
    message = f"{request.method} {request.url.path}: {what}"
    code = ROUTING_CODES.get(error.status_code, "http_error")
    body = _body(error.status_code, message, code, None)
    headers = dict(error.headers or {})
    if "Allow" in headers:  # Starlette's order differs between processes
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    return _response(error.status_code, body, headers)


async def bug_response(*_: object) -> Response:
    """Return the answer for an internal error. Starlette raises it again, for the log."""
    return _response(500, _body(500, "internal error", "internal_error", None), {})


def _body(status: int, message: str, code: str, param: str | None) -> ErrorResponse:
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def _response(status: int, body: ErrorResponse, headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
