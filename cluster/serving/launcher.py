"""Requests of an ingress to the launcher, which is another replica."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from ray.exceptions import RayError

from actors.telemetry.telemetry import merge_expositions
from cluster.fleet.replies import checked
from cluster.fleet.tracing import ROUNDS, estimate_offset
from cluster.http.admin import FIRST_RANK_PID
from contracts.clock import monotonic_s
from contracts.errors import NotReadyError
from contracts.logs import event
from contracts.ranks import RankStatus
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import ClockOffset, TraceResponse, boot_identity

log = logging.getLogger("tandem.ingress")


class Launcher:
    """Client of the launcher for the HTTP application. Raises NotReadyError without a reply.

    groups: handle of the deployment `Groups`.
    """

    def __init__(self, groups: Any) -> None:
        self._groups = groups

    async def metrics(self) -> str:
        try:
            return merge_expositions(await self._groups.metrics.remote())
        except RayError as error:
            event(log, "rank_metrics_failed", logging.WARNING, error=error)
            return ""

    async def status(self) -> list[RankStatus]:
        with _answers("rank_status_failed"):
            found: list[RankStatus] = await self._groups.status.remote()
        return found

    async def trace(self, seconds: float) -> TraceResponse:
        with _answers("trace_failed"):
            found: TraceResponse = await self._groups.trace.remote(seconds, FIRST_RANK_PID)
        return found

    async def scale(self, requested: ScaleTarget | None) -> ScaleState:
        with _answers("scale_request_failed"):
            found: ScaleState = checked(await self._groups.scale.remote(requested))
        return found

    async def offset(self) -> ClockOffset:
        """Return by how much this process's clock is ahead of the launcher's."""
        rounds, boot = [], ""
        with _answers("trace_failed"):
            for _ in range(ROUNDS):
                sent_s = monotonic_s()
                shown_s, boot = await self._groups.clock.remote()
                rounds.append(
                    (-monotonic_s(), -shown_s, -sent_s)
                )  # this clock, as seen by the launcher
        return estimate_offset(rounds, same_boot=bool(boot) and boot == boot_identity())


@contextlib.contextmanager
def _answers(event_name: str) -> Iterator[None]:
    try:
        yield
    except RayError as error:
        event(log, event_name, logging.WARNING, error=error)
        raise NotReadyError("the launcher of the ranks does not answer") from None
