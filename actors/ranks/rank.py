"""The life cycle of a rank of any kind: start, stop, status, metrics, spans and failure.

A plain class; Ray (actors/ranks/remote.py) and plain processes (tests/support/rank_process.py) are
thin shells around it. The kind of rank is its loop, made by `attention_rank` and the like.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from actors.batching.observer import LoopControl, Observer
from actors.telemetry.exporter import Exporter, ScrapeKey
from actors.telemetry.telemetry import RankMetrics, Recorded, Telemetry, Timeline
from contracts.clock import Clock, monotonic_s
from contracts.errors import ChannelError, LaunchError
from contracts.logs import event
from contracts.placement import PlacementState, PlacementUpdate
from contracts.plan import Plan
from contracts.ranks import DRAINED, RankReady, RankSpec, RankStatus
from contracts.traces import RankTrace

if TYPE_CHECKING:  # the planner's process has no endpoint, nor torch
    from actors.channels.endpoint import Endpoint

SETTLING_S: Final = 1.0  # time in which a new link may be missing among the peers


class PeerConnector:
    """Connects to peers by name: those without a link, and those at a new address.

    Each peer is dialled by its own thread, so that a silent one does not delay the others. Not
    thread-safe.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """timeout_s: for one call; slow peers stay in progress for the next call."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._joined: dict[str, tuple[str, float]] = {}  # address and time
        self._dialling: dict[str, tuple[str, Future[None]]] = {}  # address

    def __call__(self, addresses: dict[str, str]) -> None:
        """Connect to all peers, then raise the first ChannelError, if any."""
        dials = {
            peer: self._start_dial(peer, address)
            for peer, address in addresses.items()
            if not self._is_joined(peer, address)
        }
        done, _ = wait(dials.values(), self._timeout_s)
        for peer, dial in dials.items():
            if dial not in done:
                reason = f"it has not answered for {self._timeout_s:g} s"
                raise ChannelError(f"cannot join {peer}: {reason}")
            dial.result()

    def _is_joined(self, peer: str, address: str) -> bool:
        at, since_s = self._joined.get(peer, ("", 0.0))
        is_new = monotonic_s() - since_s < SETTLING_S
        return at == address and (is_new or peer in self._endpoint.peers())

    def _start_dial(self, peer: str, address: str) -> Future[None]:
        """Return the pending or new attempt."""
        at, known = self._dialling.get(peer, ("", Future()))
        if at == address and not known.done():
            return known
        dial: Future[None] = Future()
        self._dialling[peer] = address, dial
        arguments = (peer, address, dial)
        threading.Thread(
            target=self._dial, args=arguments, name=f"dials-{peer}", daemon=True
        ).start()
        return dial

    def _dial(self, peer: str, address: str, dial: Future[None]) -> None:
        try:
            self._endpoint.join(peer, address)
        except ChannelError as error:  # its message may lack the peer's name
            message = f"cannot join {peer}: {error.message}"
            dial.set_exception(type(error)(message, *error.args[1:]))
        else:
            self._joined[peer] = address, monotonic_s()
            dial.set_result(None)
        finally:
            if not dial.done():  # unexpected error
                dial.set_exception(ChannelError(f"cannot join {peer}: see this rank's log"))


log = logging.getLogger("tandem.worker")

_STOP_S = 10.0

IN_TRANSIT_S = 0.3  # wait for requests sent before the drain was known


class RankDrain(Observer):
    """Drains a serving loop. drained: set when nothing is left; thread-safe."""

    def __init__(self, rank: str, clock: Clock) -> None:
        self.drained = threading.Event()
        self._rank, self._clock = rank, clock
        self._until_s: float | None = None
        self._announced_s: float | None = None
        self._loop: LoopControl

    def drain(self, within_s: float) -> None:
        """Start the drain, or shorten it. Thread-safe."""
        until_s = self._clock() + within_s
        self._until_s = until_s if self._until_s is None else min(until_s, self._until_s)

    def begin(self, loop: LoopControl) -> None:
        self._loop = loop

    def stepped(self) -> None:
        until_s = self._until_s
        if until_s is None or self.drained.is_set():
            return
        now_s, sequences = self._clock(), sum(self._loop.load)
        if self._announced_s is None:
            self._announced_s = now_s
            self._loop.announce_drain()
            event(log, "rank_draining", logging.WARNING, rank=self._rank, sequences=sequences)
        if sequences and now_s < until_s:
            return
        if sequences:
            event(log, "handed_over", logging.WARNING, rank=self._rank, sequences=sequences)
            self._loop.hand_over()
        if now_s - self._announced_s >= IN_TRANSIT_S:
            self.drained.set()

    def notes(self) -> dict[str, str]:
        if self._until_s is None:
            return {}
        if self.drained.is_set():
            return {"leaving": DRAINED}
        return {"leaving": f"within {max(0.0, self._until_s - self._clock()):.0f} s"}


def on_sigterm(drain: Callable[[], None]) -> None:
    """Call `drain` at the first SIGTERM and exit when it returns, or at the second signal.

    Without effect outside the main thread, where a rank is not a process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    watching = threading.Thread(
        target=_watch, args=(reading, writing, drain), name="sigterm", daemon=True
    )
    watching.start()


def _watch(reading: socket.socket, writing: socket.socket, drain: Callable[[], None]) -> None:
    """Run `drain` at the first SIGTERM, exit at the second. writing: kept open meanwhile."""
    _wait(reading)
    threading.Thread(target=_drain, args=(drain,), name="leaving", daemon=True).start()
    _wait(reading)
    writing.close()
    os._exit(128 + signal.SIGTERM)


def _wait(reading: socket.socket) -> None:
    while signal.SIGTERM not in reading.recv(64):
        pass


def _drain(drain: Callable[[], None]) -> None:
    try:
        drain()
    except BaseException as error:  # noqa: BLE001 - logged; the process exits in any case
        event(log, "drain_failed", logging.ERROR, error)
    os._exit(0)


class RankLoop:
    """The work of a rank, in one thread. drained: set when a drain is complete."""

    drained: threading.Event

    @property
    def problem(self) -> str:
        """Reason for which the rank cannot serve; empty if it can."""
        return ""

    def run(self, stopping: threading.Event) -> None:
        """Serve until `stopping` is set. Any exception is the failure of the rank."""
        stopping.wait()

    def refuse(self, reason: str, stopping: threading.Event) -> None:
        """After a failure: answer requests with its reason until `stopping` is set."""

    def wake(self) -> None:
        """End a wait. Thread-safe."""

    def drain(self, within_s: float) -> None:
        """Accept nothing new; complete or hand over all work in time. Thread-safe."""
        self.drained.set()

    def close(self) -> None:
        """Close all threads and links. Thread-safe; may be called twice."""

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting sequences. Thread-safe."""
        return 0, 0

    def sections(self) -> dict[str, dict[str, float]]:
        """Return totals by topic for the status. Thread-safe."""
        return {}

    def notes(self) -> dict[str, str]:
        """Return notes for the status. Thread-safe."""
        return {}


def _no_placement(update: PlacementUpdate | None = None) -> NoReturn:
    raise LaunchError("only an expert rank has a placement")


class RankHooks(NamedTuple):
    """Operations of some kinds of ranks; by default they do nothing."""

    connect: Callable[[dict[str, str]], None] = lambda addresses: None  # name -> channel address
    join_planner: Callable[[str], None] = lambda address: None
    pin_plan: Callable[[Plan | None], None] = lambda plan: None  # of all later batches
    resize: Callable[[int, int], None] = lambda attention, expert: None  # numbers of ranks
    place: Callable[[PlacementUpdate], None] = _no_placement
    placed: Callable[[], PlacementState] = _no_placement


_NO_HOOKS = RankHooks()


class Recording(NamedTuple):
    """A rank's timeline and metrics. bytes_moved: sent to and received from other ranks."""

    timeline: Timeline
    metrics: RankMetrics
    bytes_moved: Callable[[], tuple[int, int]]

    def sections(self) -> dict[str, dict[str, float]]:
        """exposed_s: time in which the rank waited while a payload for it was in transit."""
        sent, received = self.bytes_moved()
        return {
            "stage_s": dict(self.timeline.stage_seconds),
            "channel_bytes": {"sent": sent, "received": received},
            "totals": {"exposed_s": self.timeline.exposed_s},
        }


def recording(
    spec: RankSpec,
    metrics: RankMetrics,
    bytes_moved: Callable[[], tuple[int, int]],
    *observers: Callable[[Recorded], None],
) -> Recording:
    """Return the recording of a rank. observers: receive every span."""

    def observe(span: Recorded) -> None:
        metrics.span(span)
        for each in observers:
            each(span)

    timeline = Timeline(spec.config.trace.spans, observe)
    metrics.attach(timeline, bytes_moved)
    return Recording(timeline, metrics, bytes_moved)


class Rank:
    """A rank with weights loaded, listening. Then: connect, start; status at any time; stop.

    recording: None for ranks without tasks; `timeline` replaces it.
    """

    def __init__(
        self,
        spec: RankSpec,
        ready: RankReady,
        loop: RankLoop,
        telemetry: Telemetry,
        recording: Recording | None,
        hooks: RankHooks = _NO_HOOKS,
        timeline: Timeline | None = None,
    ) -> None:
        self.spec = spec
        self.ready = ready
        self.loop = loop
        self.hooks = hooks
        self._recording = recording
        self._timeline = timeline if recording is None else recording.timeline
        self._telemetry = telemetry
        self._exporter: Exporter | None = None
        self._failure = ""
        self._started_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{spec.name}-loop")

    def start(self) -> None:
        self._started_s = monotonic_s()
        self._thread.start()

    def stop(self) -> None:
        """Stop the loop, threads and links. Waiting requests receive an error."""
        self._stopping.set()
        self.loop.wake()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self.loop.close()
        if self._exporter is not None:
            self._exporter.close()

    def drain(self, within_s: float) -> None:
        """Drain the loop; a rank that does not run is drained already."""
        is_at_work = self._thread.is_alive() and not self._failure
        if is_at_work and not self._stopping.is_set():
            self.loop.drain(within_s)
            self.loop.wake()
        else:
            self.loop.drained.set()

    def wait_drained(self, timeout_s: float) -> bool:
        return self.loop.drained.wait(timeout_s)

    def status(self) -> RankStatus:
        reason = self._failure or self.loop.problem
        running, waiting = self.loop.load
        sections = {} if self._recording is None else self._recording.sections()
        for name, numbers in self.loop.sections().items():
            sections[name] = sections.get(name, {}) | numbers
        return RankStatus(
            name=self.spec.name,
            healthy=not reason,
            reason=reason,
            running=running,
            waiting=waiting,
            epoch=self.spec.epoch,
            uptime_s=monotonic_s() - self._started_s if self._started_s else 0.0,
            sections=sections,
            notes=self.loop.notes(),
        )

    def metrics(self) -> str:
        return self._telemetry.exposition()

    def export_metrics(self) -> str:
        """Serve the metrics; return the address for `RankReady`."""
        config = self.spec.config
        if not config.metrics.exporters:
            return ""
        key = ScrapeKey(config.http)
        self._exporter = Exporter(self._telemetry, key=key, name=self.spec.name)
        return self._exporter.open(config.metrics.host or self.spec.host)

    def trace(self, since_s: float) -> RankTrace:
        """Return the recorded activity since a time on the rank's clock."""
        if self._timeline is None:
            return RankTrace(rank=self.spec.name)
        return self._timeline.since(self.spec.name, since_s)

    def _run(self) -> None:
        """Run the loop; any exception fails the rank with its name."""
        try:
            self.loop.run(self._stopping)
        except BaseException as error:  # noqa: BLE001 - logged, with its traceback
            self._failure = f"{self.spec.name} failed: {type(error).__name__}: {error}"
            event(log, "rank_failed", logging.CRITICAL, error, reason=self._failure)
            traceback.clear_frames(error.__traceback__)  # frames hold memory of links
            self.loop.refuse(self._failure, self._stopping)
