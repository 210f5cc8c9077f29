"""A process that is no rank has its metrics scraped: an ingress, a bulk job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError

from actors.telemetry.exporter import Exporter
from actors.telemetry.scrape_key import ScrapeKey
from actors.telemetry.telemetry import Telemetry
from cluster.fleet.codec import Target, encode_target
from cluster.fleet.nodes import this_node
from contracts.config import TandemConfig
from contracts.logs import event

log = logging.getLogger("tandem.metrics")

RENEW_S = 5.0

Tell = Callable[[bytes], Awaitable[None]]  # Groups' `export`


class Exported:
    """Of one event loop. What keeps it from being scraped is logged; it works all the same."""

    def __init__(
        self, config: TandemConfig, telemetry: Telemetry, group: str, name: str, tell: Tell
    ) -> None:
        """tell: the launcher of the ranks."""
        self._config, self._group, self._name = config, group, name
        self._tell_launcher = tell
        self._exporter = Exporter(telemetry, key=ScrapeKey(config.http))
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listens, and has the launcher of the ranks told so, now and again until it is closed."""
        if not self._config.metrics.exporters:
            return
        try:
            node = await asyncio.to_thread(this_node)
            address = await self._exporter.open(self._config.metrics.host or node.listen_host)
        except (OSError, RayError) as error:
            event(log, "exporter_failed", logging.WARNING, name=self._name, reason=error)
            return
        told = Target(address=address, group=self._group, rank=self._name, node=node.host)
        self._telling = asyncio.create_task(self._tell(encode_target(told)))

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        await self._exporter.close()

    async def _tell(self, target: bytes) -> None:
        while True:
            try:
                await self._tell_launcher(target)
            except RayError as error:  # another launcher will come, or we shall go with this one
                event(log, "launcher_not_told", logging.WARNING, name=self._name, reason=error)
            await asyncio.sleep(RENEW_S)
