"""Metrics exporter of processes that are not ranks: ingress and bulk job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError

from actors.telemetry.exporter import Exporter
from actors.telemetry.scrape_key import ScrapeKey
from actors.telemetry.telemetry import Telemetry
from cluster.fleet.codec import ScrapeTarget, encode_target
from cluster.fleet.nodes import this_node
from contracts.config import TandemConfig
from contracts.logs import event

log = logging.getLogger("tandem.metrics")

RENEW_S = 5.0

RegisterTarget = Callable[[bytes], Awaitable[None]]  # Groups' `export`


class MetricsEndpoint:
    """Exporter on one event loop. Failures are logged and do not affect the process."""

    def __init__(
        self,
        config: TandemConfig,
        telemetry: Telemetry,
        group: str,
        name: str,
        register: RegisterTarget,
    ) -> None:
        """Create the endpoint. notify: registers the target with the launcher."""
        self._config, self._group, self._name = config, group, name
        self._register = register
        self._telemetry = telemetry
        self._exporter: Exporter | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen, and register with the launcher periodically until closed."""
        if not self._config.metrics.exporters:
            return
        try:
            node = await asyncio.to_thread(this_node)
        except (OSError, RayError) as error:
            event(log, "exporter_failed", logging.WARNING, name=self._name, reason=error)
            return
        key, loop = ScrapeKey(self._config.http), asyncio.get_running_loop()
        self._exporter = Exporter(self._telemetry, key=key, name=self._name, loop=loop)
        host = self._config.metrics.host or node.listen_host
        address = await asyncio.to_thread(self._exporter.open, host)
        if not address:
            return
        own_target = ScrapeTarget(
            address=address, group=self._group, rank=self._name, node=node.host
        )
        self._renewal = asyncio.create_task(self._renew_lease(encode_target(own_target)))

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)

    async def _renew_lease(self, target: bytes) -> None:
        while True:
            try:
                await self._register(target)
            except RayError as error:  # a new launcher will follow, or this process ends too
                event(log, "launcher_notify_failed", logging.WARNING, name=self._name, reason=error)
            await asyncio.sleep(RENEW_S)
