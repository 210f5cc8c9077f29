"""What an ingress asks of the launcher of the ranks, which is another replica."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from ray.exceptions import RayError

from actors.telemetry.telemetry import merge_expositions
from cluster.fleet.codec import decode_scale, decode_trace, encode_scale
from cluster.fleet.tracing import ROUNDS, offset_of
from contracts.clock import monotonic_s
from contracts.errors import NotReadyError
from contracts.logs import event
from contracts.scaling import ScaleState, ScaleWanted
from contracts.traces import ClockOffset, TraceAnswer, this_boot
from contracts.worker import RankStatus

log = logging.getLogger("tandem.ingress")


class AskGroups(NamedTuple):
    """What the launcher of the ranks tells of them. Raises RayError."""

    metrics: Callable[[], Awaitable[list[str]]]
    status: Callable[[], Awaitable[list[RankStatus]]]
    trace: Callable[[float], Awaitable[bytes]]
    clock: Callable[[], Awaitable[tuple[float, str]]]
    scale: Callable[[bytes], Awaitable[tuple[bytes, bytes]]]


class Launcher:
    """As the application asks it. Raises NotReadyError where it does not answer."""

    def __init__(self, ask: AskGroups) -> None:
        self._ask = ask

    async def metrics(self) -> str:
        """In Prometheus text format; nothing where it does not answer: the ingress's own are still
        worth a scrape."""
        try:
            return merge_expositions(await self._ask.metrics())
        except RayError as error:
            event(log, "rank_metrics_failed", logging.WARNING, error=error)
            return ""

    async def status(self) -> list[RankStatus]:
        with _answers("rank_status_failed"):
            return await self._ask.status()

    async def trace(self, seconds: float) -> TraceAnswer:
        with _answers("trace_failed"):
            return decode_trace(await self._ask.trace(seconds))

    async def scale(self, wanted: ScaleWanted | None) -> ScaleState:
        with _answers("scale_not_asked"):
            body = b"" if wanted is None else encode_scale(wanted)
            return decode_scale(*await self._ask.scale(body))

    async def offset(self) -> ClockOffset:
        """By how much our clock is ahead of its own."""
        rounds, boot = [], ""
        with _answers("trace_failed"):
            for _ in range(ROUNDS):
                asked_s = monotonic_s()
                shown_s, boot = await self._ask.clock()
                rounds.append((-monotonic_s(), -shown_s, -asked_s))  # ours, as seen from there
        return offset_of(rounds, same_boot=bool(boot) and boot == this_boot())


@contextlib.contextmanager
def _answers(event_name: str) -> Iterator[None]:
    try:
        yield
    except RayError as error:
        event(log, event_name, logging.WARNING, error=error)
        raise NotReadyError("the launcher of the ranks does not answer") from None
