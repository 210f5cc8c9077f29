"""API keys: authentication, priority classes, quotas, cache salts, and reloading of http.keys_file.

Keys are compared in constant time. Only digests of a key leave this module. They are the same in
every ingress replica, so that a client's cached prefixes are found by all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.api_keys import ApiKey, Keys, decode_keys, keys_bytes
from contracts.clock import Clock, monotonic_s
from contracts.config import HttpConfig
from contracts.errors import ConfigError, OverloadError, UnauthorizedError
from contracts.logs import event
from contracts.requests import DIGEST_BYTES, Caller
from planner.scheduling.admission import TokenBucket

PROVE = "prove"  # in scope["state"], set by our HTTP server: call it when the key is valid
TENANT_BYTES = 8
_TENANT, _NAMED_TENANT = b"tandem-tenant", b"tandem-named"  # domains of digests
_KEY_SALT, _CACHE_SALT = b"tandem-key-salt", b"tandem-salt"
CONCURRENCY_RETRY_S = 1.0  # a running request may have ended by then
POLL_PERIOD_S = 1.0


class Client(NamedTuple):
    """The holder of a key. caller: shared by its requests. quota: None: unlimited."""

    api_key: ApiKey
    caller: Caller
    quota: KeyQuota | None


_ANYONE = Client(ApiKey(""), Caller(), None)


class Authenticator:
    """The API keys of one ingress. Belongs to one event loop.

    With http.keys_file, all requests are rejected until `set_keys` is called.
    share_between_keys: all keys share cached prefixes.
    """

    def __init__(self, http: HttpConfig, *, share_between_keys: bool = False) -> None:
        self._is_open = not http.has_keys
        self._operator_key, self._is_local = http.operator_key, http.is_local
        self._shares = share_between_keys
        self.clients: dict[str, Client] = {}
        self._numbers = itertools.count(1)
        self.set_keys(http.clients, http.metrics_key)

    def set_keys(self, api_keys: Sequence[ApiKey], metrics_key: str | None) -> None:
        """Replace the keys for new requests. An unchanged key keeps its quota's state."""
        before, self._metrics_key = self.clients, metrics_key
        self.clients = {}
        for each in api_keys:
            known = before.get(each.key)
            is_same = known is not None and known.api_key == each
            self.clients[each.key] = known if known and is_same else self._client(each)

    def _client(self, api_key: ApiKey) -> Client:
        salt = b"" if self._shares else _salt(api_key.key.encode(), _KEY_SALT)
        return Client(api_key, Caller(_tenant(api_key), 0, salt), KeyQuota(api_key, monotonic_s))

    def check(self, request: Request) -> Client:
        """Return the sender of a request. Raises UnauthorizedError."""
        if self._is_open:
            return _ANYONE
        needed = "a valid API key is needed (Authorization: Bearer KEY)"
        return self.clients[_check(self.clients, request, needed)]

    def check_metrics(self, request: Request) -> None:
        """Raise UnauthorizedError unless the request has the metrics key, if there is one."""
        if self._metrics_key is not None:
            needed = "the metrics key is needed (Authorization: Bearer KEY, http.metrics_key)"
            _check([self._metrics_key], request, needed)

    def check_operator(self, request: Request) -> None:
        """Raise UnauthorizedError unless the request has the operator's key.

        Without any keys, every client on this machine is an operator.
        """
        needed = "the operator's key is needed (Authorization: Bearer KEY, http.operator_key)"
        if self._operator_key is not None:
            _check([self._operator_key], request, needed)
        elif not (self._is_open and self._is_local):
            raise UnauthorizedError(
                f"{needed}: this server was started without one, though it has API keys or others "
                "than this machine reach it"
            )

    def caller(self, client: Client, name: str = "") -> Caller:
        """Return the caller of a client's request. name: the request's id."""
        return Caller(client.caller.tenant, next(self._numbers), client.caller.salt, name)


def with_cache_salt(caller: Caller, cache_salt: str | None) -> Caller:
    """Return the caller with the salt of its request mixed in."""
    if cache_salt is None:
        return caller
    salt = _salt(cache_salt.encode(), _CACHE_SALT, caller.salt)
    return msgspec.structs.replace(caller, salt=salt)


def _tenant(api_key: ApiKey) -> bytes:
    name, domain = api_key.key, _TENANT
    if api_key.tenant is not None:
        name, domain = api_key.tenant, _NAMED_TENANT
    return hashlib.blake2b(name.encode(), digest_size=TENANT_BYTES, person=domain).digest()


def _salt(text: bytes, domain: bytes, within: bytes = b"") -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, key=within, person=domain).digest()


def _check(keys: Iterable[str], request: Request, message: str) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = key.strip()
    known = [hmac.compare_digest(given.encode(), one.encode()) for one in keys]
    if scheme.lower() != "bearer" or not any(known):
        raise UnauthorizedError(message)
    prove = request.scope.get("state", {}).get(PROVE)
    if prove is not None:
        prove()
    return given


class RateLimitError(OverloadError):
    """The key's quota is exhausted. Other keys are not affected."""

    code = "rate_limit_exceeded"


class KeyQuota:
    """Requests and tokens per second, and concurrent requests, of one key.

    Tokens count once they are computed: a key is admitted while tokens are left, and waits after an
    overdraft until they are refilled. Every ingress replica counts separately. Belongs to one event
    loop.
    """

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        now_s = clock()
        self._clock = clock
        self._most_open = key.concurrency
        self._requests = (
            None if key.requests_per_s is None else TokenBucket(key.requests_per_s, now_s)
        )
        self._tokens = None if key.tokens_per_s is None else TokenBucket(key.tokens_per_s, now_s)
        self.open = 0

    def acquire(self) -> None:
        """Admit a request, which must `release` once. Raises RateLimitError."""
        now_s = self._clock()
        if self._most_open is not None and self.open >= self._most_open:
            raise _refused(
                f"{self.open} requests are open",
                "concurrency",
                self._most_open,
                CONCURRENCY_RETRY_S,
            )
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0, now_s)) > 0:
            used = f"{1.0 - self._tokens.level(now_s):.0f} tokens too many were used"
            raise _refused(used, "tokens_per_s", self._tokens.per_s, wait_s)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1.0, now_s)
            if wait_s > 0:
                used = "too many requests were sent"
                raise _refused(used, "requests_per_s", self._requests.per_s, wait_s)
            self._requests.take(1.0, now_s)
        self.open += 1

    def release(self) -> None:
        self.open -= 1

    def consume(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """Return OpenAI's rate limit headers; empty without limits per second."""
        now_s, fields = self._clock(), dict[str, str]()
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                fields[f"x-ratelimit-limit-{name}"] = f"{bucket.burst:.0f}"
                left = max(0, math.floor(bucket.level(now_s)))
                fields[f"x-ratelimit-remaining-{name}"] = str(left)
                fields[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.burst, now_s):.3f}s"
        return fields


def _refused(used: str, field: str, limit: float, wait_s: float) -> RateLimitError:
    return RateLimitError(
        f"{used} with this API key ({field}: {limit:g}): try again in {math.ceil(wait_s)} s", wait_s
    )


log = logging.getLogger("tandem.ingress")


class ApiKeyReloader:
    """Loads http.keys_file into `authenticator` and polls it for changes, on its event loop.

    The content is compared: a file mounted from a Kubernetes Secret changes by a symbolic link
    above it. A change is applied after it has been stable for a whole period, because an editor may
    write in place. An invalid file is logged and counted once; the previous keys stay.
    """

    def __init__(
        self, http: HttpConfig, authenticator: Authenticator, telemetry: Telemetry
    ) -> None:
        assert http.keys_file is not None
        self._path, self._metrics_key = Path(http.keys_file), http.metrics_key
        self._authenticator, self._telemetry = authenticator, telemetry
        self._last_read: bytes | ConfigError | None = None  # at the last poll
        self._last_result: bytes | str | None = None  # last loaded or rejected
        self.problem = ""  # of the current file; empty: its keys are loaded

    async def load(self) -> None:
        """Load the keys. Raises ConfigError."""
        data = await asyncio.to_thread(keys_bytes, self._path)
        self._set_keys(decode_keys(data, self._path))
        self._last_result = data

    async def run(self) -> None:
        """Poll until cancelled."""
        for outcome in ("loaded", "rejected"):
            self._telemetry.count(metrics.KEYS_RELOADED, outcome, by=0)
        while True:
            await asyncio.sleep(POLL_PERIOD_S)
            await self.poll()

    async def poll(self) -> None:
        current: bytes | ConfigError
        try:
            current = await asyncio.to_thread(keys_bytes, self._path)
        except ConfigError as error:
            current = error
        previous, self._last_read = self._last_read, current
        if isinstance(current, ConfigError):
            if isinstance(previous, ConfigError):  # not during a change
                self._reject(current, current.message)
        elif current == previous and current != self._last_result:
            self._evaluate(current)

    def _evaluate(self, data: bytes) -> None:
        try:
            keys = decode_keys(data, self._path)
        except ConfigError as error:
            self._reject(error, data)
            return
        self._set_keys(keys)
        self._last_result, self.problem = data, ""
        self._telemetry.count(metrics.KEYS_RELOADED, "loaded")
        event(log, "api_keys_reloaded", keys=len(keys.api_keys), path=self._path)

    def _set_keys(self, keys: Keys) -> None:
        self._authenticator.set_keys(keys.clients, keys.metrics_key or self._metrics_key)

    def _reject(self, error: ConfigError, result: bytes | str) -> None:
        """Log and count the error, unless it was the last result."""
        if self._last_result == result:
            return
        self._last_result, self.problem = result, error.message
        self._telemetry.count(metrics.KEYS_RELOADED, "rejected")
        event(log, "api_keys_rejected", logging.ERROR, reason=f"{error.message}; the old keys stay")
