"""Life-cycle helpers: connection to peers, drain, and termination by SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from actors.batching.observer import LoopControl, Observer
from actors.channels.base import Endpoint
from contracts.clock import Clock, monotonic_s
from contracts.errors import ChannelError
from contracts.logs import event
from contracts.ranks import DRAINED

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
