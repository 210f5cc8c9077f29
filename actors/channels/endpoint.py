"""One rank's end of all its links: the part that is independent of how payloads move.

owner's thread      listen connect reserve commit poll close
accept thread       accepts connections         ┐ pass results to the owner through `_inbox`
handshake threads   authenticate peers, join    │ (a deque) and an eventfd
heartbeat thread    heartbeats, silence         ┘
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import torch

from actors.channels.base import (
    ChannelEvent,
    Header,
    Packet,
    PeerJoined,
    PeerLost,
    TensorSpec,
    spec_of,
)
from actors.channels.handshake import Identity
from actors.channels.heartbeat import HeartbeatThread, LoopWatchdog
from actors.channels.link import CallArea, Link, LinkSockets, Reservation
from actors.channels.link_setup import LinkSetup
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

_MAINTAIN_PERIOD_S = 1.0


class _Loss(msgspec.Struct, frozen=True):
    link: Link
    error: PeerError


class Endpoint(abc.ABC):
    """Owned by one thread, except `join`, `wake` and `Packet.release`."""

    backend: str

    def __init__(
        self,
        *,
        name: str,
        token: bytes,
        epoch: int,
        config: ChannelConfig,
        clock: Clock,
        device: torch.device,
        placement: str = "",
    ) -> None:
        """placement: digest of the expert placement, equal on all peers."""
        self.name = name
        self.epoch = epoch
        self.config = config
        self.clock = clock
        self.device = device
        self._links: dict[str, Link] = {}
        self.accepts_calls = False  # else areas that peers open are closed
        self._areas: dict[Link, CallArea] = {}
        self._by_fd: dict[int, Link] = {}
        self._lost: dict[str, PeerError] = {}
        self._inbox: deque[Packet | Link | _Loss] = deque()
        self._lock = threading.Lock()  # guards _closed and the wake descriptor
        self._join_lock = threading.Lock()
        self._link_setup = LinkSetup(
            Identity(name=name, token=token, epoch=epoch),
            self.backend,
            config.connect_timeout_s,
            clock,
            linked=self._is_linked,
            joined=self._on_accepted,
            placement=placement,
        )
        self._watch = LoopWatchdog(name, config.step_timeout_s, clock)
        self._heartbeat = HeartbeatThread(name, config, clock, self._post_loss, self._watch)
        self._closed = False
        self._moved = [0, 0]  # sent and received bytes of closed links
        self._maintained_s = clock()
        self.spin_s = config.spin_s or 0.0
        self._spin_until_s = 0.0
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    # --- what a backend adds

    @abc.abstractmethod
    def _listen(self, host: str) -> tuple[socket.socket, str]:
        """Return a listening socket and its address."""

    @abc.abstractmethod
    def _join(self, link_sockets: LinkSockets) -> Link:
        """Make a link over authenticated sockets, which the caller closes if this raises."""

    def _offer(self) -> bytes:
        """Return data that the initiator sends to the acceptor's `_join` (NCCL: the unique ids)."""
        return b""

    # --- joining

    def listen(self, host: str = "127.0.0.1") -> str:
        """Start accepting links. Returns the address for the peers' `connect`."""
        if self._link_setup.listening:
            raise ChannelError(f"{self.name} listens already")
        sock, address = self._listen(host)
        self._link_setup.listen(sock)
        return address

    def connect(self, peer: str, address: str) -> None:
        """Join `peer` within connect_timeout_s. Raises HandshakeError or ChannelError."""
        if peer in self._links:
            raise ChannelError(f"{self.name} is linked to {peer} already")
        link = self._dial(peer, address)
        self._heartbeat.add(link)
        self._adopt(link)

    def join(self, peer: str, address: str) -> None:
        """Join `peer`, thread-safe; `poll` returns PeerJoined. Replaces an older epoch's link."""
        link = self._dial(peer, address)
        self._heartbeat.add(link)
        with self._lock:
            if not self._closed:
                self._inbox.append(link)
                os.eventfd_write(self._wake_fd, 1)
                return
        link.monitor.close()
        link.close()
        raise ChannelError(f"{self.name} is closed and cannot join {peer}")

    def _dial(self, peer: str, address: str) -> Link:
        link_sockets = self._link_setup.connect(peer, address, self._offer())
        try:
            with self._join_lock:  # NCCL creates one communicator at a time
                return self._join(link_sockets)
        except (ChannelError, OSError) as error:
            link_sockets.close()
            if isinstance(error, ChannelError):
                raise
            raise ChannelError(f"cannot join {peer}: {error}") from None

    def _is_linked(self, peer: str, epoch: int) -> bool:
        """Return whether `peer` is linked at this epoch or a newer one. Thread-safe."""
        link = self._links.get(peer)
        return link is not None and link.epoch >= epoch

    def _on_accepted(self, link_sockets: LinkSockets) -> None:
        """Join a peer that has connected. Runs on a handshake thread."""
        try:
            link = self._join(link_sockets)
        except (ChannelError, OSError) as error:  # the peer sees its sockets close
            link_sockets.close()
            event(
                log,
                "join_failed",
                logging.WARNING,
                rank=self.name,
                peer=link_sockets.peer,
                reason=error,
            )
            return
        self._heartbeat.add(link)
        self._post(link)

    def _adopt(self, link: Link) -> None:
        self._links[link.peer] = link
        self._lost.pop(link.peer, None)
        if link.poll_fd is not None:
            self._by_fd[link.poll_fd] = link
            self._epoll.register(link.poll_fd, select.EPOLLIN)
        link.start()

    # --- sending

    def peers(self) -> Sequence[str]:
        """Return the names of the peers whose links are up."""
        return tuple(self._links)

    def reserve(self, peer: str, parts: Sequence[TensorSpec]) -> Reservation:
        """Return memory for a payload. Never waits for the receiver.

        Raises PeerError if the peer is lost, another ChannelError if this process lacks memory or
        descriptors.
        """
        try:
            return self._link(peer).reserve(parts)
        except OSError as error:  # out of descriptors or memory
            raise ChannelError(f"cannot send to {peer}: {error}") from None

    def commit(self, reservation: Reservation, header: Header) -> None:
        """Send a payload without waiting for its arrival. Raises as `reserve`."""
        link = self._link(reservation.peer)
        try:
            link.commit(reservation, header)
        except OSError as error:
            raise ChannelError(f"cannot send to {link.peer}: {error}") from None
        if link.pending and link.poll_fd is not None:
            self._epoll.modify(link.poll_fd, select.EPOLLIN | select.EPOLLOUT)

    def open_call_area(self, peer: str, num_bytes: int) -> CallArea | None:
        """Share memory for direct calls with a peer. Raises as `reserve`.

        None: the backend has none.
        """
        link = self._link(peer)
        try:
            area = link.open_call_area(num_bytes)
        except OSError as error:
            raise ChannelError(f"cannot call {peer}: {error}") from None
        if area is not None:
            self._areas[link] = area
        return area

    @property
    def call_areas(self) -> tuple[CallArea, ...]:
        """Return the areas of links that are up."""
        return tuple(self._areas.values())

    @property
    def epoll_fd(self) -> int:
        """Return a descriptor that is ready if `poll` has work, or at a direct call."""
        return self._epoll.fileno()

    def drop(self, peer: str, reason: str) -> None:
        """End the link to `peer`; `poll` returns PeerLost with this reason."""
        link = self._links.get(peer)
        if link is not None:
            self._post_loss(link, PeerError(reason, peer))

    def _link(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is not None:
            return link
        error = self._lost.get(peer)
        if error is not None:
            raise type(error)(error.message, peer)
        raise ChannelError(f"{self.name} has no link to {peer} (linked: {', '.join(self._links)})")

    # --- receiving

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        """Return the events since the last call.

        Waits at most timeout_s (0: not at all), less if `wake` is called. Drops packets older than
        either end's epoch. Reports a lost peer as `PeerLost` and never raises for it.
        """
        self._watch.record_progress()
        channel_events: list[ChannelEvent] = []
        for fd, mask in self._wait(timeout_s):
            if fd == self._wake_fd:
                self._drain_wake()
            elif (link := self._by_fd.get(fd)) is not None:
                if mask & select.EPOLLOUT:
                    self._resume(link)
                if mask & ~select.EPOLLOUT:
                    self._receive(link, channel_events)
        for link in self._polled_links():
            self._receive(link, channel_events)
        while self._inbox:
            self._handle(self._inbox.popleft(), channel_events)
        now_s = self.clock()
        if channel_events:
            self._spin_until_s = now_s + self.spin_s
        if now_s - self._maintained_s >= _MAINTAIN_PERIOD_S:
            self._maintained_s = now_s
            self._maintain(now_s, channel_events)
        return channel_events

    def watch(self, descriptor: int) -> None:
        """Make a waiting `poll` return when `descriptor` is readable. The caller reads it."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def _wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Return the ready descriptors, after at most timeout_s.

        It spins instead of sleeping shortly after a payload, and while a transfer is under way that
        epoll cannot report.
        """
        events = self._epoll.poll(0)
        if events or self._inbox or timeout_s <= 0.0:
            return events
        now_s = self.clock()
        deadline_s = now_s + timeout_s
        polled = self._polled_links()
        while now_s < (deadline_s if polled else min(self._spin_until_s, deadline_s)):
            os.sched_yield()
            events = self._epoll.poll(0)
            if events or self._inbox or any(link.has_progress for link in polled):
                return events
            now_s = self.clock()
        return self._epoll.poll(max(0.0, deadline_s - now_s))

    def _polled_links(self) -> Sequence[Link]:
        """Return the links with transfers under way that epoll cannot report."""
        return ()

    def _maintain(self, now_s: float, channel_events: list[ChannelEvent]) -> None:
        for link in tuple(self._links.values()):
            try:
                link.maintain(now_s)
            except PeerError as error:
                self._drop_link(link, error, channel_events)

    def _receive(self, link: Link, channel_events: list[ChannelEvent]) -> None:
        try:
            packets = link.receive()
        except PeerError as error:
            self._drop_link(link, error, channel_events)
            return
        for packet in packets:
            self._deliver(packet, channel_events)
        if link.opened_area is not None:
            self._take_area(link, link.opened_area)

    def _deliver(self, packet: Packet, channel_events: list[ChannelEvent]) -> None:
        link = self._links.get(packet.peer)
        if link is None or packet.header.epoch < min(self.epoch, link.epoch):
            packet.release()
            return
        packet.sent_s -= link.clock_offset_s
        channel_events.append(packet)

    def _take_area(self, link: Link, area: CallArea) -> None:
        link.opened_area = None
        if self.accepts_calls and link not in self._areas:
            self._areas[link] = area
            # Edge-triggered: the event is never read.
            self._epoll.register(area.event, select.EPOLLIN | select.EPOLLET)
        else:
            area.close()

    def _handle(self, item: Packet | Link | _Loss, channel_events: list[ChannelEvent]) -> None:
        if isinstance(item, Packet):
            self._deliver(item, channel_events)
        elif isinstance(item, _Loss):
            self._drop_link(item.link, item.error, channel_events)
        elif self._is_linked(item.peer, item.epoch):  # two at once: the first one is kept
            self._forget(item)
        else:
            before = self._links.get(item.peer)
            if before is not None:
                reason = f"{item.peer} has been replaced by a process at a later epoch"
                self._drop_link(before, PeerDeadError(reason, item.peer), channel_events)
            self._adopt(item)
            channel_events.append(PeerJoined(item.peer))

    def _resume(self, link: Link) -> None:
        link.flush()
        if not link.pending and link.poll_fd is not None:
            self._epoll.modify(link.poll_fd, select.EPOLLIN)

    def _drop_link(self, link: Link, error: PeerError, channel_events: list[ChannelEvent]) -> None:
        if self._links.get(link.peer) is not link:
            return
        del self._links[link.peer]
        self._lost[link.peer] = error
        self._forget(link)
        channel_events.append(PeerLost(link.peer, error, link.epoch))

    def _forget(self, link: Link) -> None:
        self._heartbeat.remove(link)
        fd = link.poll_fd
        if fd is not None and self._by_fd.get(fd) is link:
            del self._by_fd[fd]
            self._epoll.unregister(fd)
        area = self._areas.pop(link, None)
        if area is not None:
            with contextlib.suppress(FileNotFoundError):  # an area of our own is not registered
                self._epoll.unregister(area.event)
            area.close()
        self._moved[0] += link.sent_bytes
        self._moved[1] += link.received_bytes
        link.monitor.close()
        link.close()

    # --- events from other threads

    def _post(self, item: Packet | Link | _Loss) -> None:
        self._inbox.append(item)
        self.wake()

    def _post_loss(self, link: Link, error: PeerError) -> None:
        self._post(_Loss(link, error))

    def wake(self) -> None:
        """Make a `poll` in another thread return now."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    # --- status and close

    @property
    def stall_reason(self) -> str:
        """Reason that heartbeats stopped (no `poll` for channel.step_timeout_s), or ""."""
        return self._watch.problem

    def dump_stacks_after(self, after_s: float) -> None:
        """Log all stacks when `poll` has not been called for after_s."""
        self._watch.stall_threshold_s = after_s

    def bytes_moved(self) -> tuple[int, int]:
        """Return payload bytes sent and received so far."""
        links = tuple(self._links.values())  # the owner may change it meanwhile
        return (
            self._moved[0] + sum(link.sent_bytes for link in links),
            self._moved[1] + sum(link.received_bytes for link in links),
        )

    def count_bytes(self, sent: int, received: int) -> None:
        """Count the payload of direct calls."""
        self._moved[0] += sent
        self._moved[1] += received

    def close(self) -> None:
        """Close every link, end every thread, remove every file. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._link_setup.close()
        self._heartbeat.close(self.config.connect_timeout_s)
        waiting = [item for item in self._inbox if isinstance(item, Link)]
        for link in (*self._links.values(), *waiting):
            self._forget(link)
        self._links.clear()
        self._inbox.clear()
        self._epoll.close()
        os.close(self._wake_fd)


def send_tensors(
    endpoint: Endpoint,
    peer: str,
    header: Header,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Copy `tensors` to channel memory, as `dtype` if given, and send. Raises as `reserve`."""
    reservation = endpoint.reserve(peer, [spec_of(tensor, dtype) for tensor in tensors])
    for slot, tensor in zip(reservation.tensors, tensors, strict=True):
        slot.copy_(tensor)
    endpoint.commit(reservation, header)
