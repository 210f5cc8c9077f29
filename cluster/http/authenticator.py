"""Who may call, and who calls: bearer keys, compared in constant time; what of a key goes on with a
request, and the salt of its prefix cache.

Of a key only digests leave this file. They are the same in every ingress replica, so that a
client's prefixes are found whichever one takes its request.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from cluster.http.field_bounds import MAX_CACHE_SALT_CHARACTERS
from cluster.http.quotas import KeyQuota
from contracts.api_keys import ApiKey
from contracts.block_hash import DIGEST_BYTES
from contracts.clock import Clock, monotonic_s
from contracts.errors import RequestError, UnauthorizedError
from contracts.requests import Caller, Priority

PROVE = "prove"  # in scope["state"], from a front of our own: to be called when the key is valid
TENANT_BYTES = 8
_TENANT, _NAMED_TENANT = b"tandem-tenant", b"tandem-named"  # domains of digests
_KEY_SALT, _CACHE_SALT = b"tandem-key-salt", b"tandem-salt"


class _Client(NamedTuple):
    api_key: ApiKey
    caller: Caller  # of all its requests
    quota: KeyQuota


class Authenticator:
    """The clients of one ingress, and who watches it. needs_keys: nobody is let in while there are
    none. operator_key: of whoever may change the server; is_local: only this machine reaches it.
    share_between_keys: all keys find each other's prefixes. On one event loop."""

    def __init__(
        self,
        api_keys: Sequence[ApiKey],
        metrics_key: str | None = None,
        *,
        needs_keys: bool = False,
        operator_key: str | None = None,
        is_local: bool = True,
        share_between_keys: bool = False,
        clock: Clock = monotonic_s,
    ) -> None:
        self._is_open = not needs_keys and not api_keys
        self._operator_key, self._is_local = operator_key, is_local
        self._shares, self._clock = share_between_keys, clock
        self._clients: dict[str, _Client] = {}
        self._numbers = itertools.count(1)
        self.set_keys(api_keys, metrics_key)

    def set_keys(self, api_keys: Sequence[ApiKey], metrics_key: str | None) -> None:
        """In place of those before: from now on, for what is under way goes on. A key that stays as
        it was goes on from what it has used."""
        before, self._metrics_key = self._clients, metrics_key
        self._clients = {}
        for each in api_keys:
            known = before.get(each.key)
            is_same = known is not None and known.api_key == each
            self._clients[each.key] = known if known and is_same else self._client(each)

    def _client(self, api_key: ApiKey) -> _Client:
        salt = b"" if self._shares else _salt(api_key.key.encode(), _KEY_SALT)
        return _Client(api_key, Caller(_tenant(api_key), 0, salt), KeyQuota(api_key, self._clock))

    def check(self, request: Request) -> str | None:
        """The key that the request came with; None: none is wanted. Raises UnauthorizedError if the
        bearer token is not among them."""
        if self._is_open:
            return None
        needed = "a valid API key is needed (Authorization: Bearer KEY)"
        return _check(self._clients, request, needed)

    def check_metrics(self, request: Request) -> None:
        """Raises UnauthorizedError if there is a metrics key and the bearer token is another
        one."""
        if self._metrics_key is not None:
            needed = "the metrics key is needed (Authorization: Bearer KEY, http.metrics_key)"
            _check([self._metrics_key], request, needed)

    def check_operator(self, request: Request) -> None:
        """Raises UnauthorizedError unless the bearer token is the operator's. Where there are no
        keys at all, whoever is on this machine is one."""
        needed = "the operator's key is needed (Authorization: Bearer KEY, http.operator_key)"
        if self._operator_key is not None:
            _check([self._operator_key], request, needed)
        elif not (self._is_open and self._is_local):
            raise UnauthorizedError(
                f"{needed}: this server was started without one, though it has API keys or others "
                "than this machine reach it",
                None,
            )

    def caller(self, key: str | None, name: str = "") -> Caller:
        """Of a request that came with this valid key; None: keys are not configured. name: what its
        client calls it."""
        caller = Caller() if key is None else self._clients[key].caller
        return Caller(caller.tenant, next(self._numbers), caller.salt, name)

    def priority(self, key: str | None) -> Priority:
        """Of its requests that name none."""
        if key is None:
            return Priority.LS
        return Priority[self._clients[key].api_key.priority.upper()]

    def has_fixed_priority(self, key: str | None) -> bool:
        """Whether its requests may name no other."""
        return key is not None and self._clients[key].api_key.fixed_priority

    def quota(self, key: str | None) -> KeyQuota | None:
        """What it may use; None: whatever it wants."""
        return None if key is None else self._clients[key].quota


def with_cache_salt(caller: Caller, cache_salt: str | None) -> Caller:
    """The caller with `cache_salt` of its request on top. Raises RequestError."""
    if cache_salt is None:
        return caller
    if not 1 <= len(cache_salt) <= MAX_CACHE_SALT_CHARACTERS:
        raise RequestError(
            f"cache_salt has {len(cache_salt)} characters, expected 1 to"
            f" {MAX_CACHE_SALT_CHARACTERS}",
            "cache_salt",
        )
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
        raise UnauthorizedError(message, None)
    prove = request.scope.get("state", {}).get(PROVE)
    if prove is not None:
        prove()
    return given
