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
from cluster.api.callers import Callers
from contracts import metrics
from contracts.config import HttpConfig
from contracts.errors import ConfigError
from contracts.keys_file import Keys, decode_keys, keys_bytes
from contracts.logs import event

log = logging.getLogger("tandem.ingress")

LOOK_PERIOD_S = 1.0


class KeysFollower:
    """Gives `callers` what stands in http.keys_file. On their event loop.

    What has changed is taken when it has stood there for a whole period: whoever writes the file in
    place is not overtaken in the middle of it. A file that cannot be used is told and counted once;
    the keys before it stay.
    """

    def __init__(
        self,
        http: HttpConfig,
        callers: Callers,
        telemetry: Telemetry,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        assert http.keys_file is not None
        self._path, self._metrics_key = Path(http.keys_file), http.metrics_key
        self._callers, self._telemetry, self._sleep = callers, telemetry, sleep
        self._seen: bytes | ConfigError | None = None  # at the last look
        self._judged: bytes | str | None = None  # what was taken or refused last
        self.problem = ""  # of the file as it stands; empty: its keys are those that count

    async def begin(self) -> None:
        """Takes the keys. Raises ConfigError."""
        data = await asyncio.to_thread(keys_bytes, self._path)
        self._take(decode_keys(data, self._path))
        self._judged = data

    async def follow(self) -> None:
        """Until it is cancelled."""
        for outcome in ("taken", "refused"):
            self._telemetry.count(metrics.KEYS_READ, outcome, by=0)
        while True:
            await self._sleep(LOOK_PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Once."""
        seen: bytes | ConfigError
        try:
            seen = await asyncio.to_thread(keys_bytes, self._path)
        except ConfigError as error:
            seen = error
        before, self._seen = self._seen, seen
        if isinstance(seen, ConfigError):
            if isinstance(before, ConfigError):  # not in the middle of a change
                self._refuse(seen, seen.message)
        elif seen == before and seen != self._judged:
            self._judge(seen)

    def _judge(self, data: bytes) -> None:
        try:
            keys = decode_keys(data, self._path)
        except ConfigError as error:
            self._refuse(error, data)
            return
        self._take(keys)
        self._judged, self.problem = data, ""
        self._telemetry.count(metrics.KEYS_READ, "taken")
        event(log, "keys_taken", keys=len(keys.api_keys), path=self._path)

    def _take(self, keys: Keys) -> None:
        self._callers.take(keys.clients, keys.metrics_key or self._metrics_key)

    def _refuse(self, error: ConfigError, what: bytes | str) -> None:
        """Told once, and again when it is wrong in another way."""
        if self._judged == what:
            return
        self._judged, self.problem = what, error.message
        self._telemetry.count(metrics.KEYS_READ, "refused")
        event(log, "keys_refused", logging.ERROR, reason=f"{error.message}; the old keys stay")
