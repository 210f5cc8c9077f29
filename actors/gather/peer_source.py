"""AsyncEP's gather (MoE-Prefill, Section 6): each of N workers shares 1/N of every layer.

    copy(layer, into)     into:  | peer 0's part | own part | peer 2's part |
                                   socket or       memory     socket or
                                   its segment                its segment      all at once

A peer that dies or falls silent costs one wait of `channel.heartbeat_timeout_s` (four times as long
for a local process that may wait for a core). Its part then comes from the fallback (checkpoint or
host store): slower, but correct. It is dialed again periodically, and rejoined when `connect` names
its new address (actors/gather/peer_source.py).

Joining runs on its own threads:

    introduce(addresses) ──> a thread per peer:  dial ──> handshake ──> take() returns the link
    reconnect(peer) ──────>                      ^ REDIAL_S, or a new address │ on failure
                                                 └────────────────────────────┘

An unreachable peer delays no other one and is dialed until it answers. At most one thread dials a
peer: the server keeps the last connection of a name, which must be the one kept here.
"""

import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from actors.channels.cuda import COPY_POLL_S, wait_for_stream
from actors.channels.handshake import Identity
from actors.channels.local_process import is_hung
from actors.gather.nccl_exchange import NcclExchange
from actors.gather.weight_link import Segment, Terms, WeightLink, digest, join
from actors.gather.weight_server import WeightServer
from actors.gather.weight_shard import ExpertRange, Shard
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import (
    ChannelError,
    HandshakeBrokenError,
    HandshakeError,
    PeerError,
    PeerHungError,
)
from contracts.logs import event
from contracts.ranks import Group, RankSpec, rank_name
from models.experts.expert_layout import ExpertBuffer, ExpertLayout
from models.experts.host_experts import HostSource
from planner.placement.slots import expert_ranges

REDIAL_S = 5.0


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer to dial. epoch: the newest seen. is_tried: at this address.

    error: of the last attempt. link: came up, not taken yet. thread: while the peer is dialed.
    """

    name: str
    address: str = ""
    epoch: int = 0
    is_tried: bool = False
    error: ChannelError | None = None
    link: WeightLink | None = None
    thread: threading.Thread | None = None


class PeerDialer:
    """Dials peers. Thread-safe. Call `close` before closing the links that `take` returned."""

    def __init__(
        self,
        me: Identity,
        terms: Terms,
        config: ChannelConfig,
        connect: Callable[[socket.socket, str], Segment] | None = None,
    ) -> None:
        """connect: as of `join`."""
        self._me, self._terms, self._config, self._connect = me, terms, config, connect
        self._changed = threading.Condition()  # guards all below
        self._peers: dict[str, _Peer] = {}
        self._closing = False

    def introduce(self, addresses: Mapping[str, str], timeout_s: float) -> None:
        """Dial peers with new addresses and wait until each was tried, timeout_s at most.

        Raises the HandshakeError of a peer that refuses us or does not match, after all were tried.
        """
        new: list[_Peer] = []
        with self._changed:
            for name, address in addresses.items():
                peer = self._peers.setdefault(name, _Peer(name))
                if peer.address != address:
                    peer.address, peer.is_tried = address, False
                    new.append(peer)
                    self._start(peer)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closing or all(peer.is_tried for peer in new), timeout_s
            )
            errors = [peer.error for peer in new]
        for error in errors:
            if isinstance(error, HandshakeError) and not isinstance(error, HandshakeBrokenError):
                raise type(error)(*error.args)  # a copy, to keep no frame alive

    def reconnect(self, name: str) -> None:
        """Dial a peer whose link was lost, unless a new link has arrived."""
        with self._changed:
            peer = self._peers.get(name)
            if peer is not None and peer.link is None:
                self._start(peer)

    def take(self) -> dict[str, WeightLink]:
        """Return the links that came up since the last call."""
        arrived: dict[str, WeightLink] = {}
        with self._changed:
            for peer in self._peers.values():
                if peer.link is not None:
                    arrived[peer.name], peer.link = peer.link, None
        return arrived

    def problem(self, name: str) -> str:
        """Return why the last dial failed, or ""."""
        with self._changed:
            peer = self._peers.get(name)
            return "" if peer is None or peer.error is None else peer.error.message

    def close(self) -> None:
        """End all threads and close links that were not taken."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = [peer.thread for peer in self._peers.values() if peer.thread is not None]
        for thread in threads:
            thread.join(self._config.connect_timeout_s)
        for link in self.take().values():
            link.close()

    def _start(self, peer: _Peer) -> None:
        """Start dialing, under the lock."""
        if peer.thread is None and not self._closing:
            name = f"{self._me.name}-dial-{peer.name}"
            peer.thread = threading.Thread(target=self._dial, args=(peer,), name=name, daemon=True)
            peer.thread.start()

    # --- a peer's thread

    def _dial(self, peer: _Peer) -> None:
        """Dial a peer until it answers at its latest address."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not peer.is_tried, REDIAL_S)
                if self._closing:
                    return
                address, is_retry, newest = peer.address, peer.is_tried, peer.epoch
            config = self._config
            deadline_s = config.heartbeat_timeout_s if is_retry else config.connect_timeout_s
            link: WeightLink | None = None
            failed: ChannelError | None = None
            try:
                terms = self._terms
                link = join(peer.name, address, self._me, terms, newest, deadline_s, self._connect)
            except ChannelError as error:
                failed = type(error)(f"cannot join {peer.name}: {error.message}", *error.args[1:])
            if self._record(peer, address, link, failed):
                return

    def _record(
        self, peer: _Peer, address: str, link: WeightLink | None, failed: ChannelError | None
    ) -> bool:
        """Record an attempt; return whether the peer need not be dialed any more."""
        if failed is not None and peer.error is None:  # once
            event(
                log, "weights_peer_connect_failed", logging.WARNING, peer=peer.name, reason=failed
            )
        before = None
        with self._changed:
            is_latest = peer.address == address
            peer.is_tried, peer.error = is_latest, failed
            if link is not None:
                before, peer.link = peer.link, link
                peer.epoch = max(peer.epoch, link.epoch)
            is_done = link is not None and is_latest
            if is_done:
                peer.thread = None
            self._changed.notify_all()
        if before is not None:
            before.close()
        return is_done


log = logging.getLogger(f"tandem.{__name__}")


def own_part(spec: RankSpec, layout: ExpertLayout) -> ExpertRange:
    """Return the experts that this worker keeps."""
    return ExpertRange(layout, *expert_ranges(spec.placement)[spec.rank])


def _is_far(host: str) -> bool:
    """Return whether peers may be on other machines, as a replaced one may."""
    return host not in ("localhost", "::1") and not host.startswith("127.")


class PeerSource:
    """An ExpertSource over peers. fallbacks: parts that did not come from their peer."""

    def __init__(self, spec: RankSpec, shard: Shard, fallback: HostSource) -> None:
        """shard: of the experts that `own_part` returns."""
        self.name = spec.name
        self._spec, self._config = spec, spec.config.channel
        self.shard = shard
        self.address = ""
        self._fallback = fallback
        self._bounds = {
            rank_name(Group.PREFILL, rank): bounds
            for rank, bounds in enumerate(expert_ranges(spec.placement))
        }
        layout = shard.part.layout
        model_digest = digest(layout.spec, str(layout.dtype))
        self._me = Identity(name=spec.name, token=spec.token, epoch=None)
        self._terms = Terms(
            spec.epoch,
            model_digest,
            layout.digest,
            spec.placement.digest,
            shard.payload_bytes,
            b"" if shard.segment is None else shard.segment.handle,
        )
        exchange = self._exchange = self._nccl_exchange()
        connect = None if exchange is None else partial(exchange.connect, serves=False)
        self._server = WeightServer(self._me, self._terms, shard, self._config, exchange)
        self._dialer = PeerDialer(self._me, self._terms, self._config, connect)
        self._links: dict[str, WeightLink] = {}
        self._lost: dict[str, str] = {}  # peer -> reason
        self._copying = threading.Lock()
        self._introduced = threading.Event()
        self._closing = threading.Event()
        self._before_bytes = 0  # received on closed links
        self._stuck: list[WeightLink] = []  # with a copy that did not end: their memory stays open
        self.fallbacks = 0

    def listen(self, host: str) -> str:
        """Start serving the peers. Returns the address for their `connect`."""
        on_gpu = self.shard.segment is not None
        shared = self._spec.backend == "shm" or on_gpu
        tcp = not shared or (_is_far(host) and not on_gpu) or self._exchange is not None
        self.address = self._server.listen(host, shared_memory=shared, tcp=tcp)
        return self.address

    def _nccl_exchange(self) -> NcclExchange | None:
        """Return what moves parts between GPUs of several nodes, if the channel does."""
        shard, timeout_s = self.shard, self._config.connect_timeout_s
        if shard.segment is None or self._spec.backend != "nccl":
            return None
        return NcclExchange(self.name, shard.part.layout.device, shard.payload_bytes, timeout_s)

    def connect(self, addresses: Mapping[str, str]) -> None:
        """Join the named peers, again where an address is new.

        An unreachable or slow peer delays no other and is dialed until it answers. Raises the
        HandshakeError of a peer that refuses us or does not match, after all were tried.
        """
        peers = {p: at for p, at in addresses.items() if p in self._bounds and p != self.name}
        try:
            self._dialer.introduce(peers, self._config.heartbeat_timeout_s)
        finally:
            self._introduced.set()

    @property
    def lost(self) -> dict[str, str]:
        """Peers whose part comes from the fallback, each with the reason."""
        return {
            peer: self._lost.get(peer)
            or self._dialer.problem(peer)
            or f"{peer} has not been joined yet"
            for peer, (first, last) in self._bounds.items()
            if first < last and peer != self.name and peer not in self._links
        }

    def bytes_moved(self) -> tuple[int, int]:
        links = list(self._links.values())
        received = self._before_bytes + sum(link.received_bytes for link in links)
        return self._server.sent_bytes, received

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        """Copy a layer. Waits for the first `connect`: the peers may still be loading."""
        if len(self._bounds) > 1:
            self._introduced.wait(self._spec.config.groups.ready_timeout_s)
        with self._copying:
            self._copy(layer, into)

    def _copy(self, layer: int, into: ExpertBuffer) -> None:
        self._adopt()
        self._wait_for_device(layer)  # for the compute that reads the buffer: slots are lent late
        links = sorted(self._links.values(), key=lambda link: (link.peer <= self.name, link.peer))
        requested = [
            link for link in links if not link.in_turn and self._request(link, layer, into)
        ]
        turns = (link for link in links if link.in_turn and self._request(link, layer, into))
        # Wait for our own part last, so that we do not hold the others' slots meanwhile.
        slot = self.shard.take(layer)
        if slot is not None:
            self._copy_own(layer, slot, into)
        self._gather({link.fileno(): link for link in requested}, turns)
        if slot is None:
            slot = self.shard.wait(layer, self._config.connect_timeout_s)
            self._copy_own(layer, slot, into)
        self._wait_for_device(layer)
        self.shard.release(layer)
        if self._closing.is_set():
            raise ChannelError(f"{self.name} is closing")
        for peer in self.lost:
            first, last = self._bounds[peer]
            self._fallback.copy_part(layer, first, last, into.part(first, last))
            self.fallbacks += 1

    def abort(self) -> None:
        """End the copy that waits for peers, and all later ones."""
        self._closing.set()
        self._introduced.set()
        for link in list(self._links.values()):
            link.abort()

    def close(self) -> None:
        self.abort()
        self._dialer.close()
        self._server.close()
        links = list(self._links.values())
        for link in links:
            link.abort()
        ended = self._copying.acquire(timeout=self._config.connect_timeout_s)
        for link in links:
            link.close()
        self.shard.close()
        if ended:
            self._copying.release()

    def _request(self, link: WeightLink, layer: int, into: ExpertBuffer) -> bool:
        first, last = self._bounds[link.peer]
        if first == last:
            return False
        try:
            link.request(layer, into.part(first, last))
        except PeerError as error:
            self._lose(link, error)
            return False
        return True

    def _copy_own(self, layer: int, slot: int, into: ExpertBuffer) -> None:
        shard = self.shard
        own_pieces = into.part(shard.part.first, shard.part.last)
        if shard.segment is not None:
            pieces = [piece for piece in own_pieces if piece.numel()]
            if pieces:
                shard.segment.copy(shard.offset_bytes(slot), pieces)
            return
        for out, held in zip(own_pieces, shard.pieces[slot], strict=True):
            out.copy_(held)

    def _wait_for_device(self, layer: int) -> None:
        """Wait for what is queued on the copying stream of a GPU. Raises ChannelError."""
        if self.shard.segment is not None:
            stream = torch.cuda.current_stream(self.shard.part.layout.device)
            what = f"copy of the experts of layer {layer}"
            wait_for_stream(stream, self._config.connect_timeout_s, what)

    def _gather(self, under_way: dict[int, WeightLink], turns: Iterator[WeightLink]) -> None:
        """Receive from the links until each is done or lost. turns: those that go one by one."""
        poll = select.poll()
        for fd in under_way:
            poll.register(fd, select.POLLIN)
        copying: list[WeightLink] = []
        turn: WeightLink | None = None
        while True:
            if turn not in (*under_way.values(), *copying):
                turn = next(turns, None)
                if turn is not None:
                    under_way[turn.fileno()] = turn
                    poll.register(turn.fileno(), select.POLLIN)
            if not under_way and not copying:
                return
            wait_s = COPY_POLL_S if copying else self._silence_left_s(under_way.values())
            ready = {fd for fd, _ in poll.poll(1e3 * wait_s)}
            copying = [link for link in copying if not self._advance_copy(link)]
            for fd, link in list(under_way.items()):
                ended = self._advance(link, overdue=fd not in ready)
                if ended or link.is_copying:
                    del under_way[fd]
                    poll.unregister(fd)
                    copying += [] if ended else [link]

    def _silence_left_s(self, links: Iterable[WeightLink]) -> float:
        """Return the time until a link may count as hung."""
        oldest_s = min(link.progress_s for link in links)
        left_s = oldest_s + self._config.heartbeat_timeout_s - monotonic_s()
        # A silent local peer may only be waiting for a core: check it repeatedly.
        return max(left_s, self._config.heartbeat_interval_s)

    def _advance_copy(self, link: WeightLink) -> bool:
        """Return whether a copy from a peer's GPU has ended; it has a deadline."""
        timeout_s = self._config.heartbeat_timeout_s
        if self._advance(link, overdue=False):
            return True
        if monotonic_s() - link.progress_s < timeout_s:
            return False
        self._stuck.append(link)
        reason = f"a copy from the GPU of {link.peer} has not ended in {timeout_s:g} s"
        self._lose(link, PeerHungError(reason, link.peer))
        return True

    def _advance(self, link: WeightLink, *, overdue: bool) -> bool:
        """Return whether the link has nothing more to deliver."""
        try:
            if not overdue:
                return link.advance()
            timeout_s = self._config.heartbeat_timeout_s
            if monotonic_s() - link.progress_s < timeout_s:
                return False
            if link.advance():  # fewer bytes than SO_RCVLOWAT are a sign of life too
                return True
            silent_s = monotonic_s() - link.progress_s
            if is_hung(silent_s, timeout_s, link.local_process):
                raise PeerHungError(f"{link.peer} sent nothing for {timeout_s:g} s", link.peer)
        except PeerError as error:
            self._lose(link, error)
            return True
        return False

    # --- losing and joining

    def _lose(self, link: WeightLink, error: PeerError) -> None:
        link.close()
        self._before_bytes += link.received_bytes
        del self._links[link.peer]
        self._lost[link.peer] = error.message
        event(log, "weights_fallback_used", logging.WARNING, peer=link.peer, reason=error.message)
        self._dialer.reconnect(link.peer)

    def _adopt(self) -> None:
        """Use the links that the dialer has made."""
        for peer, link in self._dialer.take().items():
            old = self._links.pop(peer, None)
            if old is not None:
                old.close()
                self._before_bytes += old.received_bytes
            if self._lost.pop(peer, None) is not None:
                event(log, "weights_peer_recovered", logging.WARNING, peer=peer)
            self._links[peer] = link
