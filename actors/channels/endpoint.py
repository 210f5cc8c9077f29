"""Everything of an endpoint that does not depend on how a payload moves: joining, polling, losing.

owner's thread      listen connect reserve commit poll close
accept thread       takes connections          ┐ hand their findings to the owner
handshake threads   prove strangers, join      │ through `_inbox` (a deque) and an eventfd
pulse thread        heartbeats, silence        ┘
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
    Happening,
    Header,
    Packet,
    Part,
    PeerJoined,
    PeerLost,
    Reservation,
)
from actors.channels.handshake import Identity
from actors.channels.joiner import Joiner
from actors.channels.link import Joint, Link
from actors.channels.loop_watch import LoopWatch
from actors.channels.pulse import Pulse
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

_TEND_S = 1.0


class _Loss(msgspec.Struct, frozen=True):
    link: Link
    error: PeerError


class BaseEndpoint(abc.ABC):
    """See `base.Endpoint`."""

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
        """placement: digest of the placement of experts: peers must have the same."""
        self.name = name
        self.epoch = epoch
        self.config = config
        self.clock = clock
        self.device = device
        self._links: dict[str, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._lost: dict[str, PeerError] = {}
        self._inbox: deque[Packet | Link | _Loss] = deque()
        self._lock = threading.Lock()  # guards _pulse, _closed and the wake descriptor
        self._making = threading.Lock()
        self._joiner = Joiner(
            Identity(name=name, token=token, epoch=epoch),
            self.backend,
            config.deadline_s,
            clock,
            linked=self._is_linked,
            joined=self._accepted,
            placement=placement,
        )
        self._watch = LoopWatch(name, config.stuck_s, clock)
        self._pulse: Pulse[Link] | None = None
        self._closed = False
        self._moved = [0, 0]  # by links that are gone
        self._tended_s = clock()
        self._spin_s = config.spin_s or 0.0
        self._spin_until_s = 0.0
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    # --- what a backend adds

    @abc.abstractmethod
    def _listen(self, host: str) -> tuple[socket.socket, str]:
        """A listening socket and its address."""

    @abc.abstractmethod
    def _join(self, joint: Joint) -> Link:
        """A link over two proven sockets. Called on a handshake's thread or the owner's. Owns the
        sockets, also when it raises ChannelError."""

    def _offer(self) -> bytes:
        """What the initiator tells the acceptor's `_join` ahead (NCCL: the unique ids)."""
        return b""

    # --- joining

    def listen(self, host: str = "127.0.0.1") -> str:
        if self._joiner.listening:
            raise ChannelError(f"{self.name} listens already")
        sock, address = self._listen(host)
        self._joiner.listen(sock)
        return address

    def connect(self, peer: str, address: str) -> None:
        if peer in self._links:
            raise ChannelError(f"{self.name} is linked to {peer} already")
        link = self._dialled(peer, address)
        self._beat(link)
        self._adopt(link)

    def join(self, peer: str, address: str) -> None:
        link = self._dialled(peer, address)
        self._beat(link)
        with self._lock:
            if not self._closed:
                self._inbox.append(link)
                os.eventfd_write(self._wake_fd, 1)
                return
        link.heart.close()
        link.close()
        raise ChannelError(f"{self.name} is closed: it joins nobody")

    def _dialled(self, peer: str, address: str) -> Link:
        joint = self._joiner.connect(peer, address, self._offer())
        try:
            with self._making:  # NCCL: one communicator after the other
                return self._join(joint)
        except OSError as error:
            joint.close()
            raise ChannelError(f"cannot join {peer}: {error}") from None

    def _is_linked(self, peer: str, epoch: int) -> bool:
        """To that one or a newer one. From any thread."""
        link = self._links.get(peer)
        return link is not None and link.epoch >= epoch

    def _accepted(self, joint: Joint) -> None:
        """Joins a peer that has connected (handshake thread)."""
        try:
            link = self._join(joint)
        except (ChannelError, OSError) as error:  # the peer sees its sockets close
            joint.close()
            event(
                log, "join_failed", logging.WARNING, rank=self.name, peer=joint.peer, reason=error
            )
            return
        self._beat(link)
        self._tell(link)

    def _beat(self, link: Link) -> None:
        with self._lock:
            if self._closed:
                return
            if self._pulse is None:
                self._pulse = Pulse(
                    self.name, self.config, self.clock, self._tell_loss, self._watch
                )
                self._pulse.start()
            self._pulse.add(link)

    def _adopt(self, link: Link) -> None:
        self._links[link.peer] = link
        self._lost.pop(link.peer, None)
        if link.poll_fd is not None:
            self._by_fd[link.poll_fd] = link
            self._epoll.register(link.poll_fd, select.EPOLLIN)
        link.start()

    # --- sending

    def peers(self) -> Sequence[str]:
        return tuple(self._links)

    def reserve(self, peer: str, parts: Sequence[Part]) -> Reservation:
        try:
            return self._link(peer).reserve(parts)
        except OSError as error:  # no descriptors, no memory
            raise ChannelError(f"cannot send to {peer}: {error}") from None

    def commit(self, reservation: Reservation, header: Header) -> None:
        link = self._link(reservation.peer)
        try:
            link.commit(reservation, header)
        except OSError as error:
            raise ChannelError(f"cannot send to {link.peer}: {error}") from None
        if link.pending and link.poll_fd is not None:
            self._epoll.modify(link.poll_fd, select.EPOLLIN | select.EPOLLOUT)

    def drop(self, peer: str, reason: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._tell_loss(link, PeerError(reason, peer))

    def _link(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is not None:
            return link
        error = self._lost.get(peer)
        if error is not None:
            raise type(error)(error.message, peer)
        raise ChannelError(f"{self.name} has no link to {peer} (linked: {', '.join(self._links)})")

    # --- receiving

    def poll(self, timeout_s: float) -> list[Happening]:
        self._watch.moved()
        happenings: list[Happening] = []
        for fd, mask in self._wait(timeout_s):
            if fd == self._wake_fd:
                self._drain_wake()
            elif (link := self._by_fd.get(fd)) is not None:
                if mask & select.EPOLLOUT:
                    self._resume(link)
                if mask & ~select.EPOLLOUT:
                    self._receive(link, happenings)
        for link in self._coming():
            self._receive(link, happenings)
        while self._inbox:
            self._take(self._inbox.popleft(), happenings)
        now_s = self.clock()
        if happenings:
            self._spin_until_s = now_s + self._spin_s
        if now_s - self._tended_s >= _TEND_S:
            self._tended_s = now_s
            self._tend(now_s, happenings)
        return happenings

    def watch(self, descriptor: int) -> None:
        self._epoll.register(descriptor, select.EPOLLIN)

    def _wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """What epoll tells, after at most timeout_s. Soon after a payload, and while one is on its
        way of which nothing tells, it does not sleep."""
        events = self._epoll.poll(0)
        if events or self._inbox or timeout_s <= 0.0:
            return events
        now_s = self.clock()
        deadline_s = now_s + timeout_s
        coming = self._coming()
        while now_s < (deadline_s if coming else min(self._spin_until_s, deadline_s)):
            os.sched_yield()
            events = self._epoll.poll(0)
            if events or self._inbox or any(link.has_come for link in coming):
                return events
            now_s = self.clock()
        return self._epoll.poll(max(0.0, deadline_s - now_s))

    def _coming(self) -> Sequence[Link]:
        """Links on which packets are under way that epoll does not tell of: none of most kinds."""
        return ()

    def _tend(self, now_s: float, happenings: list[Happening]) -> None:
        for link in tuple(self._links.values()):
            try:
                link.tend(now_s)
            except PeerError as error:
                self._lose(link, error, happenings)

    def _receive(self, link: Link, happenings: list[Happening]) -> None:
        try:
            packets = link.receive()
        except PeerError as error:
            self._lose(link, error, happenings)
            return
        for packet in packets:
            self._deliver(packet, happenings)

    def _deliver(self, packet: Packet, happenings: list[Happening]) -> None:
        link = self._links.get(packet.peer)
        if link is None or packet.header.epoch < min(self.epoch, link.epoch):
            packet.release()
            return
        packet.sent_s -= link.clock_ahead_s
        happenings.append(packet)

    def _take(self, item: Packet | Link | _Loss, happenings: list[Happening]) -> None:
        if isinstance(item, Packet):
            self._deliver(item, happenings)
        elif isinstance(item, _Loss):
            self._lose(item.link, item.error, happenings)
        elif self._is_linked(item.peer, item.epoch):  # two at once: the first one stays
            self._forget(item)
        else:
            before = self._links.get(item.peer)
            if before is not None:
                reason = f"{item.peer} has been replaced: another has its name, at a later epoch"
                self._lose(before, PeerDeadError(reason, item.peer), happenings)
            self._adopt(item)
            happenings.append(PeerJoined(item.peer))

    def _resume(self, link: Link) -> None:
        link.flush()
        if not link.pending and link.poll_fd is not None:
            self._epoll.modify(link.poll_fd, select.EPOLLIN)

    def _lose(self, link: Link, error: PeerError, happenings: list[Happening]) -> None:
        if self._links.get(link.peer) is not link:
            return
        del self._links[link.peer]
        self._lost[link.peer] = error
        self._forget(link)
        happenings.append(PeerLost(link.peer, error, link.epoch))

    def _forget(self, link: Link) -> None:
        if self._pulse is not None:
            self._pulse.remove(link)
        fd = link.poll_fd
        if fd is not None and self._by_fd.get(fd) is link:
            del self._by_fd[fd]
            self._epoll.unregister(fd)
        self._moved[0] += link.sent_bytes
        self._moved[1] += link.received_bytes
        link.heart.close()
        link.close()

    # --- news from other threads

    def _tell(self, item: Packet | Link | _Loss) -> None:
        self._inbox.append(item)
        self.wake()

    def _tell_loss(self, link: Link, error: PeerError) -> None:
        self._tell(_Loss(link, error))

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    # --- the end

    @property
    def stuck(self) -> str:
        return self._watch.problem

    def tell_stacks(self, after_s: float) -> None:
        self._watch.stacks_after_s = after_s

    def bytes_moved(self) -> tuple[int, int]:
        links = tuple(self._links.values())  # any thread may ask while the owner's changes it
        return (
            self._moved[0] + sum(link.sent_bytes for link in links),
            self._moved[1] + sum(link.received_bytes for link in links),
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._joiner.close()
        if self._pulse is not None:
            self._pulse.close(self.config.deadline_s)
        waiting = [item for item in self._inbox if isinstance(item, Link)]
        for link in (*self._links.values(), *waiting):
            self._forget(link)
        self._links.clear()
        self._inbox.clear()
        self._epoll.close()
        os.close(self._wake_fd)
