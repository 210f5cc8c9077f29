"""Heartbeats of all links of one endpoint, on a thread and sockets of their own.

A rank in a three-second GEMM still sends heartbeats, and no heartbeat waits behind a payload.
Payload bytes count as signs of life (`HeartbeatMonitor.record`). Silence is judged after the
sockets are drained and only over time in which this process ran. A silent process of this machine
that is neither stopped nor gone gets longer, because it may wait for a core; a stopped one gets
less.

Heartbeats have their own thread, so a rank whose loop hangs would look healthy forever. A watchdog
checks the loop: an endpoint whose owner's loop stalls stops sending, and its peers lose it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from actors.channels import local_process
from actors.channels.base import connection_closed
from actors.channels.local_process import STOPPED_FACTOR, is_hung
from contracts.clock import Clock, monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import PeerError, PeerHungError
from contracts.interpreter import thread_stacks
from contracts.logs import event

if TYPE_CHECKING:  # links have monitors
    from actors.channels.link import Link

log = logging.getLogger("tandem.worker")

_MIN_WAIT_S = 0.01
_HEARTBEAT = b"\x01"


MAX_CHECK_S = 1.0  # counted per check, in case the whole process stood still (SIGSTOP)
CHECK_PERIOD_S = 0.5  # between two checks of an event loop


class LoopWatchdog:
    """Detects a loop that makes no progress.

    The loop calls `record_progress` after each piece of work; a heartbeat thread calls `check`.
    Time counts from the first `record_progress`, and only while `check` is called.

    problem: result of the last check, "" while the loop makes progress. stall_threshold_s: time in
    one step after which all stacks are logged, once until the next progress.
    """

    def __init__(
        self, name: str, step_timeout_s: float, clock: Clock, stall_threshold_s: float = math.inf
    ) -> None:
        self.problem = ""
        self.stall_threshold_s = stall_threshold_s
        self._is_reported = False
        self._name, self._step_timeout_s, self._clock = name, step_timeout_s, clock
        self._moves = self._seen = 0
        self._stalled_s = 0.0
        self._checked_s = clock()

    def record_progress(self) -> None:
        self._moves += 1

    def check(self) -> str:
        """Update and return `problem`."""
        now_s = self._clock()
        passed_s, self._checked_s = now_s - self._checked_s, now_s
        if self._moves != self._seen:
            self._seen, self._stalled_s, self._is_reported = self._moves, 0.0, False
        elif self._moves:
            self._stalled_s += min(passed_s, MAX_CHECK_S)
        if self._stalled_s > self.stall_threshold_s and not self._is_reported:
            self._is_reported = True
            stalled_s, stacks = self._stalled_s, thread_stacks()
            event(
                log,
                "event_loop_blocked",
                logging.WARNING,
                rank=self._name,
                stalled_s=stalled_s,
                stacks=stacks,
            )
        is_stalled = self._stalled_s > self._step_timeout_s
        if is_stalled and not self.problem:
            self.problem = (
                f"{self._name} has been stuck in one step for more than {self._step_timeout_s:g} s "
                "(channel.step_timeout_s)"
            )
            event(log, "event_loop_stalled", logging.ERROR, reason=self.problem)
        elif not is_stalled and self.problem:
            event(log, "event_loop_resumed", logging.WARNING, name=self._name)
            self.problem = ""
        return self.problem


class EventLoopWatchdog:
    """Watches an asyncio loop from its own thread. name: the process's."""

    def __init__(self, name: str, stall_threshold_s: float) -> None:
        self._watch = LoopWatchdog(name, math.inf, monotonic_s, stall_threshold_s)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-watch", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start watching. Call it on the loop's thread, or before the loop runs."""
        self._beat(loop)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Thread-safe; may be called twice."""
        self._ended.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch.record_progress()
        if not self._ended.is_set():
            loop.call_later(CHECK_PERIOD_S, self._beat, loop)

    def _run(self) -> None:
        while not self._ended.wait(CHECK_PERIOD_S):
            self._watch.check()


class HeartbeatMonitor:
    """The heartbeat socket to `peer`, used by the heartbeat thread except `record` and `close`."""

    def __init__(self, sock: socket.socket, peer: str, now_s: float) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.last_seen_s = now_s
        self.gone = False  # the other end was closed; the data socket reports it too
        self._sock = sock
        self.local_process = local_process.peer_process(sock)
        self._lock = threading.Lock()

    def record(self, now_s: float) -> None:
        """Record a sign of life from another path."""
        self.last_seen_s = now_s

    def exchange(self, now_s: float, *, beats: bool = True) -> None:
        """Read all waiting heartbeats, and send one if `beats` and the socket accepts it."""
        with self._lock:
            if self.gone or self._sock.fileno() < 0:
                return
            try:
                with contextlib.suppress(BlockingIOError):
                    while self._sock.recv(4096):
                        self.last_seen_s = now_s
                    self.gone = True
                with contextlib.suppress(BlockingIOError):
                    if beats:
                        self._sock.send(_HEARTBEAT)
            except OSError:
                self.gone = True

    def close(self) -> None:
        with self._lock:
            self._sock.close()
            if self.local_process is not None:
                self.local_process.close()


class HeartbeatThread:
    """Thread that checks links; it calls `lost` once per lost link and then forgets it."""

    def __init__(
        self,
        name: str,
        config: ChannelConfig,
        clock: Clock,
        lost: Callable[[Link, PeerError], None],
        watch: LoopWatchdog,
    ) -> None:
        self._watch = watch
        self._config = config
        self._clock = clock
        self._lost = lost
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-heartbeat", daemon=True)

    def add(self, link: Link) -> None:
        """Check a link from now on. The first one starts the thread."""
        with self._lock:
            self._links.append(link)
            if self._thread.ident is None and not self._stopping:
                self._thread.start()
        self._wake.set()

    def remove(self, link: Link) -> None:
        with self._lock:
            if link in self._links:
                self._links.remove(link)

    def close(self, deadline_s: float) -> None:
        with self._lock:
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
            is_late = stopped_s > self._config.heartbeat_timeout_s / 4
            wait_s = self.tick(stopped_s if is_late else 0.0)
            slept_at_s = monotonic_s()

    def tick(self, stopped_s: float) -> float:
        """Check all links once. Returns the seconds until the next round.

        stopped_s: how long this process did not run though it should have (SIGSTOP, suspend, a
        starved machine). It could not receive then, so peers are not blamed for that time.
        """
        with self._lock:
            links = list(self._links)
        now_s = self._clock()
        wait_s = self._config.heartbeat_interval_s
        beats = not self._watch.check()
        for link in links:
            link.monitor.last_seen_s = min(link.monitor.last_seen_s + stopped_s, now_s)
            link.monitor.exchange(now_s, beats=beats)
            link.flush()
            error = self._check_link(link, now_s)
            if error is not None:
                self.remove(link)
                self._lost(link, error)
            wait_s = min(wait_s, self._until_next_limit_s(link, now_s))
        return max(wait_s, _MIN_WAIT_S)

    def _until_next_limit_s(self, link: Link, now_s: float) -> float:
        timeout_s, silent_s = self._config.heartbeat_timeout_s, now_s - link.monitor.last_seen_s
        limits_s = (STOPPED_FACTOR * timeout_s, timeout_s)
        left_s = (limit_s - silent_s for limit_s in limits_s if limit_s > silent_s)
        return min(left_s, default=math.inf)

    def _check_link(self, link: Link, now_s: float) -> PeerError | None:
        peer, timeout_s = link.peer, self._config.heartbeat_timeout_s
        silent_s = now_s - link.monitor.last_seen_s
        if silent_s >= timeout_s and link.monitor.gone:
            return connection_closed(peer)
        if is_hung(silent_s, timeout_s, link.monitor.local_process):
            return PeerHungError(f"{peer} has been silent for {silent_s:.1f} s", peer)
        blocked_s = link.blocked_since_s
        if blocked_s is not None and now_s - blocked_s >= self._config.connect_timeout_s:
            return PeerHungError(
                f"{peer} has received nothing for {self._config.connect_timeout_s:g} s", peer
            )
        return None
