"""A rank's connection to the planner. A separate thread does all I/O; callers never wait.

loop thread                       link thread                        planner
request_plan ── latest first ──>   PlanRequest ───────────────────────>
plans[bucket]  <── dict entry ──   PlanResponse <──────────────────────
report(make) ──────────────────>   make() ── BatchReport, ... ──────>
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from actors.channels.handshake import Identity, initiate_async
from contracts.clock import Clock
from contracts.errors import HandshakeError
from contracts.messages import FRAME_ERRORS, encode_frame, read_frame
from contracts.placement import Placement
from contracts.plan import Plan
from contracts.planner_messages import (
    MAX_PLANNER_FRAME_BYTES,
    PLANNER_PURPOSE,
    Batch,
    CurrentPlacement,
    FromPlanner,
    NoPlanReason,
    PlacementProposal,
    PlanRequest,
    PlanResponse,
    ToPlanner,
)
from contracts.ranks import RankSpec
from planner.schedule.batch_plan import BatchBucket, bucket_of

log = logging.getLogger("tandem.planner_link")

CONNECT_DEADLINE_S = 5.0
STOP_DEADLINE_S = 2.0
RETRY_S = 1.0
MAX_OUTSTANDING = 2  # requests; further ones are queued, at most as many, the latest first
MAX_PLANS = 4096
MAX_BUFFERED_BYTES = 1 << 20  # reports are dropped while more is unsent
_decode = msgspec.msgpack.Decoder(FromPlanner).decode

MakeReport = Callable[[], ToPlanner | None]


class PlacementCallbacks(NamedTuple):
    """Callbacks on the link's thread. current: returns the first message of a connection."""

    current: Callable[[], CurrentPlacement]
    on_proposal: Callable[[Placement], None]


class KnownPlan(NamedTuple):
    """A response and the batch of its request."""

    batch: Batch
    answer: PlanResponse
    is_trial: bool = False

    @property
    def plan(self) -> Plan | None:
        return self.answer.trial if self.is_trial else self.answer.plan


class _PendingQuery(NamedTuple):
    bucket: BatchBucket
    batch: Batch
    sent_s: float


class PlannerLink:
    """Link of a rank to its planner, without effect until `join`.

    plans: by bucket, for any thread. cold: why the last request got no plan, or empty.
    """

    def __init__(
        self, spec: RankSpec, clock: Clock, placement_callbacks: PlacementCallbacks | None = None
    ) -> None:
        self.plans: dict[BatchBucket, KnownPlan] = {}
        self.cold = ""
        self._identity = Identity(name=spec.name, token=spec.token, epoch=None)
        self._address = ""
        self._answer_timeout_s = spec.config.planner.answer_timeout_s
        self._clock = clock
        self._placement = placement_callbacks
        self._version = 0
        self._last_number = 0
        self._has_tried = False  # to connect
        self._outstanding: dict[int, _PendingQuery] = {}
        self._oldest_sent_s: float | None = None  # of the oldest outstanding request
        self._queued: deque[Batch] = deque(maxlen=MAX_OUTSTANDING)
        self._writer: asyncio.StreamWriter | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name=f"{spec.name}-planner", daemon=True)

    @property
    def is_joined(self) -> bool:
        """True once there is a planner, reachable or not."""
        return bool(self._address)

    def join(self, address: str) -> None:
        """Connect to the planner at this address from now on, and again whenever it is lost."""
        if self.is_joined:
            self._call(self._reconnect, address)
        else:
            self._loop, self._address = asyncio.new_event_loop(), address
            self._thread.start()

    def request_plan(self, batch: Batch) -> None:
        """Request the plan of such a batch; newer requests go first."""
        if self.is_joined:
            self._queued.append(batch)
            self._call(self._send_queued)

    def report(self, make: MakeReport) -> None:
        """Run `make` on the link's thread and send what it returns."""
        self._call(self._send_report, make)

    def is_stale(self, known: KnownPlan) -> bool:
        """Return True if the planner's models have changed since the response."""
        return known.answer.version < self._version

    def unavailable_reason(self) -> NoPlanReason | None:
        """Return why no response can be expected now; None if one can."""
        if not self.is_joined:
            return NoPlanReason.OFF
        if self._writer is None:
            return NoPlanReason.LOST if self._has_tried else NoPlanReason.JOINING
        oldest_s = self._oldest_sent_s
        if oldest_s is not None and self._clock() - oldest_s > self._answer_timeout_s:
            return NoPlanReason.SLOW
        return NoPlanReason.COLD if self.cold else None

    def close(self) -> None:
        if self.is_joined and not self._loop.is_closed():
            self._call(self._cancel)
            self._thread.join(STOP_DEADLINE_S)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if not self.is_joined:
            return
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("%s: the link is closed", self._identity.name)

    def _reconnect(self, address: str) -> None:
        if address != self._address:
            self._address = address
            if self._writer is not None:
                self._writer.transport.abort()

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep_connected())
        except asyncio.CancelledError:
            log.debug("%s: the link ends", self._identity.name)
        finally:
            self._loop.close()

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._run_connection()
            except (HandshakeError, OSError, EOFError, *FRAME_ERRORS) as error:
                log.debug("%s: planner at %s: %s", self._identity.name, self._address, error)
            self._has_tried = True
            await asyncio.sleep(RETRY_S)

    async def _run_connection(self) -> None:
        """Serve one connection until it raises."""
        host, _, port = self._address.removeprefix("tcp:").rpartition(":")
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
        try:
            await initiate_async(
                reader,
                writer,
                self._identity,
                purpose=PLANNER_PURPOSE,
                to=None,
                deadline_s=CONNECT_DEADLINE_S,
            )
            self._writer = writer
            if self._placement is not None:
                self._write(self._placement.current())
            while True:
                body = await read_frame(reader, MAX_PLANNER_FRAME_BYTES)
                self._handle(_decode(body))
        finally:
            self._reset()
            writer.close()

    def _reset(self) -> None:
        """Drop all results of a lost planner."""
        self._writer = None
        self._outstanding.clear()
        self._oldest_sent_s = None
        self._version = 0
        self.plans.clear()
        self.cold = ""

    def _handle(self, message: FromPlanner) -> None:
        if isinstance(message, PlacementProposal):
            if self._placement is not None:
                self._placement.on_proposal(message.placement)
            return
        if not isinstance(message, PlanResponse):
            self._version = max(self._version, message.version)
            return
        pending = self._outstanding.pop(message.number, None)
        self._oldest_sent_s = min((q.sent_s for q in self._outstanding.values()), default=None)
        if pending is not None:
            self.cold = message.reason
            if message.plan is not None:
                if len(self.plans) >= MAX_PLANS:
                    self.plans.clear()
                self.plans[pending.bucket] = KnownPlan(pending.batch, message)
        self._send_queued()

    def _send_queued(self) -> None:
        while (
            self._queued and self._writer is not None and len(self._outstanding) < MAX_OUTSTANDING
        ):
            batch = self._queued.pop()
            bucket = bucket_of(batch)
            if any(pending.bucket == bucket for pending in self._outstanding.values()):
                continue
            self._last_number += 1
            self._outstanding[self._last_number] = _PendingQuery(bucket, batch, self._clock())
            self._oldest_sent_s = min(pending.sent_s for pending in self._outstanding.values())
            self._write(PlanRequest(self._last_number, batch))

    def _send_report(self, make: MakeReport) -> None:
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            return
        report = make()
        if report is not None:
            self._write(report)

    def _write(self, message: ToPlanner) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(self._encoder.encode(message)))
