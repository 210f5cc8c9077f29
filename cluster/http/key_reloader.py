"""Keys that change while the server runs: http.keys_file, looked at again and again.

A file that is mounted from a Kubernetes Secret changes by a symbolic link above it, so that neither
its own times nor a watch on it tell: its content is compared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from actors.telemetry.telemetry import Telemetry
from cluster.http.authenticator import Authenticator
from contracts import metrics
from contracts.config import HttpConfig
from contracts.errors import ConfigError
from contracts.keys_file import Keys, decode_keys, keys_bytes
from contracts.logs import event

log = logging.getLogger("tandem.ingress")

POLL_PERIOD_S = 1.0


class ApiKeyReloader:
    """Gives `authenticator` what stands in http.keys_file. On their event loop.

    What has changed is taken when it has stood there for a whole period: whoever writes the file in
    place is not overtaken in the middle of it. A file that cannot be used is told and counted once;
    the keys before it stay.
    """

    def __init__(
        self,
        http: HttpConfig,
        authenticator: Authenticator,
        telemetry: Telemetry,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        assert http.keys_file is not None
        self._path, self._metrics_key = Path(http.keys_file), http.metrics_key
        self._authenticator, self._telemetry, self._sleep = authenticator, telemetry, sleep
        self._last_read: bytes | ConfigError | None = None  # at the last look
        self._last_result: bytes | str | None = None  # what was taken or refused last
        self.problem = ""  # of the file as it stands; empty: its keys are those that count

    async def load(self) -> None:
        """Takes the keys. Raises ConfigError."""
        data = await asyncio.to_thread(keys_bytes, self._path)
        self._set_keys(decode_keys(data, self._path))
        self._last_result = data

    async def run(self) -> None:
        """Until it is cancelled."""
        for outcome in ("taken", "refused"):
            self._telemetry.count(metrics.KEYS_RELOADED, outcome, by=0)
        while True:
            await self._sleep(POLL_PERIOD_S)
            await self.poll()

    async def poll(self) -> None:
        """Once."""
        current: bytes | ConfigError
        try:
            current = await asyncio.to_thread(keys_bytes, self._path)
        except ConfigError as error:
            current = error
        previous, self._last_read = self._last_read, current
        if isinstance(current, ConfigError):
            if isinstance(previous, ConfigError):  # not in the middle of a change
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
        self._telemetry.count(metrics.KEYS_RELOADED, "taken")
        event(log, "api_keys_reloaded", keys=len(keys.api_keys), path=self._path)

    def _set_keys(self, keys: Keys) -> None:
        self._authenticator.set_keys(keys.clients, keys.metrics_key or self._metrics_key)

    def _reject(self, error: ConfigError, result: bytes | str) -> None:
        """Told once, and again when it is wrong in another way."""
        if self._last_result == result:
            return
        self._last_result, self.problem = result, error.message
        self._telemetry.count(metrics.KEYS_RELOADED, "refused")
        event(log, "api_keys_rejected", logging.ERROR, reason=f"{error.message}; the old keys stay")
