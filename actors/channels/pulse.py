"""Heartbeats of all links of one endpoint, on one thread, apart from the data.

Each link has a second socket that carries nothing but heartbeats. So a rank in a three-second GEMM
still beats, no heartbeat waits behind a payload, and a payload under way on a slow link (whose
bytes count as life, see `Heart.heard`) accuses nobody. Silence is judged here, after the sockets
are drained, and only over time during which this process itself was running. A silent process of
this machine that is neither stopped nor gone gets longer: on a busy machine it waits for a core;
one that is stopped gets less. An endpoint whose owner's loop is stuck sends no heartbeats: its
peers then lose it as one that hangs.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from actors.channels import neighbour
from actors.channels.loop_watch import LoopWatch
from actors.channels.neighbour import STOPPED, is_hung
from contracts.clock import Clock, monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import PeerDeadError, PeerError, PeerHungError

_MIN_WAIT_S = 0.01
_BEAT = b"\x01"


class Heart:
    """The heartbeat socket to `peer`. Used by the Pulse thread, except `heard` and `close`."""

    def __init__(self, sock: socket.socket, peer: str, now_s: float) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.heard_s = now_s
        self.gone = False  # the other end was closed; the data socket will say so too
        self._sock = sock
        self.process = neighbour.behind(sock)
        self._lock = threading.Lock()

    @property
    def may_starve(self) -> bool:
        """Whether the peer is a process of this machine that is neither stopped nor gone."""
        return self.process is not None and self.process.runs

    def heard(self, now_s: float) -> None:
        """Notes a sign of life that came another way."""
        self.heard_s = now_s

    def exchange(self, now_s: float, *, beats: bool = True) -> None:
        """Reads all heartbeats that wait, and sends one if it `beats` (skipped if the peer reads
        none)."""
        with self._lock:
            if self.gone or self._sock.fileno() < 0:
                return
            try:
                self._drain(now_s)
                if beats:
                    self._sock.send(_BEAT)
            except BlockingIOError:
                pass
            except OSError:
                self.gone = True

    def _drain(self, now_s: float) -> None:
        while True:
            try:
                beats = self._sock.recv(4096)
            except BlockingIOError:
                return
            if not beats:
                self.gone = True
                return
            self.heard_s = now_s

    def close(self) -> None:
        with self._lock:
            self._sock.close()
            if self.process is not None:
                self.process.close()


class Beating(Protocol):
    """What the Pulse needs of a link."""

    peer: str
    heart: Heart

    @property
    def blocked_since_s(self) -> float | None:
        """Since when a send has made no progress; None: nothing is blocked."""

    def flush(self) -> None:
        """Tries again what the kernel did not take. Never raises, never waits."""


L = TypeVar("L", bound=Beating)


class Pulse(Generic[L]):
    """The thread. `lost` is called on it, once per link; the link is then forgotten."""

    def __init__(
        self,
        name: str,
        config: ChannelConfig,
        clock: Clock,
        lost: Callable[[L, PeerError], None],
        watch: LoopWatch,
    ) -> None:
        self._watch = watch
        self._config = config
        self._clock = clock
        self._lost = lost
        self._links: list[L] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, link: L) -> None:
        with self._lock:
            self._links.append(link)
        self._wake.set()

    def remove(self, link: L) -> None:
        with self._lock:
            if link in self._links:
                self._links.remove(link)

    def close(self, deadline_s: float) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    def _run(self) -> None:
        wait_s, slept_at_s = 0.0, monotonic_s()
        while not self._stopping:
            self._wake.wait(wait_s)
            self._wake.clear()
            stopped_s = monotonic_s() - slept_at_s - wait_s
            wait_s = self.tick(stopped_s if stopped_s > self._config.silence_s / 4 else 0.0)
            slept_at_s = monotonic_s()

    def tick(self, stopped_s: float) -> float:
        """One round over all links; returns the seconds until the next.

        `stopped_s`: how long this process did not run though it should have (SIGSTOP, a laptop's
        lid, a starved machine): that long nobody could be heard, so it is not held against them.
        """
        with self._lock:
            links = list(self._links)
        now_s = self._clock()
        wait_s = self._config.heartbeat_s
        beats = not self._watch.look()
        for link in links:
            link.heart.heard_s = min(link.heart.heard_s + stopped_s, now_s)
            link.heart.exchange(now_s, beats=beats)
            link.flush()
            error = self._judge(link, now_s)
            if error is not None:
                self.remove(link)
                self._lost(link, error)
            wait_s = min(wait_s, self._until_judged_s(link, now_s))
        return max(wait_s, _MIN_WAIT_S)

    def _until_judged_s(self, link: L, now_s: float) -> float:
        silence_s, silent_s = self._config.silence_s, now_s - link.heart.heard_s
        limits_s = (STOPPED * silence_s, silence_s)
        left_s = (limit_s - silent_s for limit_s in limits_s if limit_s > silent_s)
        return min(left_s, default=math.inf)

    def _judge(self, link: L, now_s: float) -> PeerError | None:
        peer, silence_s = link.peer, self._config.silence_s
        silent_s = now_s - link.heart.heard_s
        if silent_s >= silence_s and link.heart.gone:
            return PeerDeadError(f"{peer} closed its connection", peer)
        if is_hung(silent_s, silence_s, link.heart.process):
            return PeerHungError(f"{peer} has been silent for {silent_s:.1f} s", peer)
        blocked_s = link.blocked_since_s
        if blocked_s is not None and now_s - blocked_s >= self._config.deadline_s:
            return PeerHungError(
                f"{peer} has taken nothing for {self._config.deadline_s:g} s", peer
            )
        return None
