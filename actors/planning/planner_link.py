"""A rank's connection to the planner. A thread of its own does all I/O: nobody ever waits for it.

loop thread                       link thread                        planner
ask(batch)  ── latest first ────>  PlanQuery ───────────────────────>
plans[bucket]  <── dict entry ──  PlanAnswer <──────────────────────
report(make) ──────────────────>  make() ── BatchReport, ... ──────>
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
from contracts.frames import BAD_FRAME, framed, read_frame
from contracts.placement import Placement
from contracts.planning import (
    MAX_PLANNER_FRAME_BYTES,
    PLANNER_PURPOSE,
    Absence,
    Batch,
    BatchReport,
    ExpertReport,
    FromPlanner,
    PlacementHeld,
    PlacementOutcome,
    PlacementProposal,
    PlanAnswer,
    PlanQuery,
    RoutingReport,
    ToPlanner,
    TrafficReport,
)
from planner.online.buckets import Bucket, bucket_of

log = logging.getLogger("tandem.planner_link")

CONNECT_DEADLINE_S = 5.0
STOP_DEADLINE_S = 2.0
RETRY_S = 1.0
MAX_OUTSTANDING = 2  # questions; while so many wait, the latest as many more are kept
MAX_PLANS = 4096
MAX_BUFFERED_BYTES = 1 << 20  # reports are dropped while this much has not left
# Made here: where two threads make the first one of a type at once, msgspec crashes.
_decode = msgspec.msgpack.Decoder(FromPlanner).decode

Report = (
    BatchReport | ExpertReport | TrafficReport | RoutingReport | PlacementOutcome | PlacementHeld
)
MakeReport = Callable[[], Report | None]


class Placing(NamedTuple):
    """An expert rank's part in placement, both called on the link's thread. held: what it says on
    every connection before anything else."""

    held: Callable[[], PlacementHeld]
    proposed: Callable[[Placement], None]


class KnownPlan(NamedTuple):
    """An answer, and the batch that was asked about."""

    batch: Batch
    answer: PlanAnswer


class _Question(NamedTuple):
    bucket: Bucket
    batch: Batch
    asked_s: float


class PlannerLink:
    """`plans`: by bucket, read by any thread. `cold`: why the planner had no plan when last asked;
    empty if it had one."""

    def __init__(
        self,
        me: Identity,
        address: str,
        *,
        answer_deadline_s: float,
        clock: Clock,
        placing: Placing | None = None,
    ) -> None:
        self.plans: dict[Bucket, KnownPlan] = {}
        self.cold = ""
        self._me = me
        self._address = address
        self._answer_deadline_s = answer_deadline_s
        self._clock = clock
        self._placing = placing
        self._version = 0
        self._numbers = 0
        self._has_tried = False  # to connect; until then nothing is lost
        self._waiting: dict[int, _Question] = {}
        self._oldest_s: float | None = None  # when the question was asked that waits longest
        self._wanted: deque[Batch] = deque(maxlen=MAX_OUTSTANDING)
        self._writer: asyncio.StreamWriter | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{me.name}-planner", daemon=True)
        self._thread.start()

    def ask(self, batch: Batch) -> None:
        """Asks for the plan of a batch like this one, unless newer questions overtake it."""
        self._wanted.append(batch)
        self._call(self._send_wanted)

    def report(self, make: MakeReport) -> None:
        """Runs `make` on the link's thread and sends what it returns."""
        self._call(self._send_report, make)

    def move(self, address: str) -> None:
        """The planner is there now, another process perhaps: connects to it. Without effect if it
        was there before."""
        self._call(self._move, address)

    def is_stale(self, known: KnownPlan) -> bool:
        """Whether the planner's models have moved since this answer."""
        return known.answer.version < self._version

    def absence(self) -> Absence | None:
        """Why no answer can be hoped for now; None if one can."""
        if self._writer is None:
            return Absence.LOST if self._has_tried else Absence.JOINING
        oldest_s = self._oldest_s
        if oldest_s is not None and self._clock() - oldest_s > self._answer_deadline_s:
            return Absence.SLOW
        return Absence.COLD if self.cold else None

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._call(self._cancel)
        self._thread.join(STOP_DEADLINE_S)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("%s: the link is closed", self._me.name)

    def _move(self, address: str) -> None:
        if address != self._address:
            self._address = address
            if self._writer is not None:
                self._writer.transport.abort()

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._stay_connected())
        except asyncio.CancelledError:
            log.debug("%s: the link ends", self._me.name)
        finally:
            self._loop.close()

    async def _stay_connected(self) -> None:
        while True:
            try:
                await self._connect_and_listen()
            except (HandshakeError, OSError, EOFError, *BAD_FRAME) as error:
                log.debug("%s: planner at %s: %s", self._me.name, self._address, error)
            self._has_tried = True
            await asyncio.sleep(RETRY_S)

    async def _connect_and_listen(self) -> None:
        """Returns never, but raises when the connection ends."""
        host, _, port = self._address.removeprefix("tcp:").rpartition(":")
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
        try:
            await initiate_async(
                reader,
                writer,
                self._me,
                purpose=PLANNER_PURPOSE,
                to=None,
                deadline_s=CONNECT_DEADLINE_S,
            )
            self._writer = writer
            if self._placing is not None:
                self._write(self._placing.held())
            while True:
                body = await read_frame(reader, MAX_PLANNER_FRAME_BYTES)
                self._take(_decode(body))
        finally:
            self._forget()
            writer.close()

    def _forget(self) -> None:
        """Nothing that a lost planner has said is used any more."""
        self._writer = None
        self._waiting.clear()
        self._oldest_s = None
        self._version = 0
        self.plans.clear()
        self.cold = ""

    def _take(self, message: FromPlanner) -> None:
        if isinstance(message, PlacementProposal):
            if self._placing is not None:
                self._placing.proposed(message.placement)
            return
        if not isinstance(message, PlanAnswer):
            self._version = max(self._version, message.version)
            return
        question = self._waiting.pop(message.number, None)
        self._oldest_s = min((q.asked_s for q in self._waiting.values()), default=None)
        if question is not None:
            self.cold = message.reason
            if message.plan is not None:
                if len(self.plans) >= MAX_PLANS:
                    self.plans.clear()
                self.plans[question.bucket] = KnownPlan(question.batch, message)
        self._send_wanted()

    def _send_wanted(self) -> None:
        while self._wanted and self._writer is not None and len(self._waiting) < MAX_OUTSTANDING:
            batch = self._wanted.pop()
            bucket = bucket_of(batch)
            if any(question.bucket == bucket for question in self._waiting.values()):
                continue
            self._numbers += 1
            self._waiting[self._numbers] = _Question(bucket, batch, self._clock())
            self._oldest_s = min(question.asked_s for question in self._waiting.values())
            self._write(PlanQuery(self._numbers, batch))

    def _send_report(self, make: MakeReport) -> None:
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            return
        report = make()
        if report is not None:
            self._write(report)

    def _write(self, message: ToPlanner) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(self._encoder.encode(message)))
