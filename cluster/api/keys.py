"""Who may ask: bearer keys, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.requests import Request

from contracts.config import HttpConfig
from contracts.errors import UnauthorizedError

PROVE = "prove"  # in scope["state"], from a front of our own: to be called when the key is valid


def check_key(http: HttpConfig, request: Request) -> str | None:
    """The key that the request came with; None if http.api_keys is not set. Raises
    UnauthorizedError if the bearer token is not among them."""
    if not http.api_keys:
        return None
    return _check(http.api_keys, request, "a valid API key is needed (Authorization: Bearer KEY)")


def check_metrics_key(http: HttpConfig, request: Request) -> None:
    """Raises UnauthorizedError if http.metrics_key is set and the bearer token is another one."""
    if http.metrics_key is not None:
        _check(
            [http.metrics_key],
            request,
            "the metrics key is needed (Authorization: Bearer KEY, http.metrics_key)",
        )


def _check(keys: Iterable[str], request: Request, message: str) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = key.strip()
    known = [hmac.compare_digest(given.encode(), one.encode()) for one in keys]
    if scheme.lower() != "bearer" or not any(known):
        raise UnauthorizedError(message, None)
    prove = request.scope.get("state", {}).get(PROVE)
    if prove is not None:
        prove()
    return given
