"""Joins a worker to the peers that it gathers weights from, on its own threads.

    introduce(addresses) ──> a thread per peer:  dial ──> handshake ──> take() returns the link
    reconnect(peer) ──────>                      ^ REDIAL_S, or a new address │ on failure
                                                 └────────────────────────────┘

An unreachable peer delays no other one and is dialed until it answers. At most one thread dials a
peer: the server keeps the last connection of a name, which must be the one kept here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import NamedTuple

from actors.channels.handshake import Identity
from actors.gather.protocol import Terms
from actors.gather.weight_link import WeightLink, join
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, HandshakeBrokenError, HandshakeError
from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

REDIAL_S = 5.0


class _Attempt(NamedTuple):
    """Result of the last dial to a peer. error None: it succeeded."""

    address: str
    error: ChannelError | None


class PeerDialer:
    """Dials peers. Thread-safe. Call `close` before closing the links that `take` returned."""

    def __init__(self, me: Identity, terms: Terms, config: ChannelConfig) -> None:
        self._me, self._terms, self._config = me, terms, config
        self._changed = threading.Condition()  # guards all below
        self._addresses: dict[str, str] = {}
        self._epochs: dict[str, int] = {}  # the newest seen of each name
        self._scheduled: set[str] = set()  # peers to dial
        self._attempts: dict[str, _Attempt] = {}
        self._arrived: dict[str, WeightLink] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._closing = False

    def introduce(self, addresses: Mapping[str, str], timeout_s: float) -> None:
        """Dial peers with new addresses and wait until each was tried, timeout_s at most.

        Raises the HandshakeError of a peer that refuses us or does not match, after all were tried.
        """
        with self._changed:
            new = {p: at for p, at in addresses.items() if self._addresses.get(p) != at}
            self._addresses.update(new)
            for peer in new:
                self._schedule(peer, at_once=True)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._tried(new), timeout_s)
            tried = [self._attempts[peer] for peer in new if peer in self._attempts]
        for _, error in tried:
            if isinstance(error, HandshakeError) and not isinstance(error, HandshakeBrokenError):
                raise type(error)(*error.args)  # a copy, to keep no frame alive

    def reconnect(self, peer: str) -> None:
        """Dial a peer whose link was lost, unless a new link has arrived."""
        with self._changed:
            if peer in self._addresses and peer not in self._arrived:
                self._schedule(peer, at_once=False)

    def take(self) -> dict[str, WeightLink]:
        """Return the links that came up since the last call."""
        with self._changed:
            arrived, self._arrived = self._arrived, {}
            return arrived

    def problem(self, peer: str) -> str:
        """Return why the last dial failed, or ""."""
        with self._changed:
            tried = self._attempts.get(peer)
            return "" if tried is None or tried.error is None else tried.error.message

    def close(self) -> None:
        """End all threads and close links that were not taken."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(self._config.connect_timeout_s)
        for link in self.take().values():
            link.close()

    # --- under the lock

    def _schedule(self, peer: str, *, at_once: bool) -> None:
        self._scheduled.add(peer)
        if peer not in self._threads and not self._closing:
            last = "" if at_once else self._addresses[peer]
            name = f"{self._me.name}-dial-{peer}"
            thread = threading.Thread(target=self._dial, args=(peer, last), name=name, daemon=True)
            self._threads[peer] = thread
            thread.start()

    def _tried(self, addresses: Mapping[str, str]) -> bool:
        """Return whether each peer was tried at this or a newer address."""
        return all(
            peer in self._attempts and self._attempts[peer].address == self._addresses[peer]
            for peer in addresses
        )

    # --- a peer's thread

    def _dial(self, peer: str, last: str) -> None:
        """Dial a peer until it need not be. last: the address tried last."""
        while (address := self._due(peer, last)) is not None:
            config = self._config
            self._try(
                peer,
                address,
                config.heartbeat_timeout_s if address == last else config.connect_timeout_s,
            )
            last = address

    def _due(self, peer: str, last: str) -> str | None:
        """Return the next address to try once it is due; None: stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended(peer) or self._addresses[peer] != last, REDIAL_S
            )
            if self._ended(peer):
                del self._threads[peer]
                return None
            return self._addresses[peer]

    def _ended(self, peer: str) -> bool:
        return self._closing or peer not in self._scheduled

    def _try(self, peer: str, address: str, deadline_s: float) -> None:
        newest = self._epochs.get(peer, 0)
        link: WeightLink | None = None
        failed: ChannelError | None = None
        try:
            link = join(peer, address, self._me, self._terms, newest, deadline_s)
        except ChannelError as error:
            failed = type(error)(f"cannot join {peer}: {error.message}", *error.args[1:])
        with self._changed:
            self._note(peer, _Attempt(address, failed))
            before = None
            if link is not None:
                before, self._arrived[peer] = self._arrived.get(peer), link
                self._epochs[peer] = max(newest, link.epoch)
                if self._addresses[peer] == address:
                    self._scheduled.discard(peer)
            self._changed.notify_all()
        if before is not None:
            before.close()

    def _note(self, peer: str, tried: _Attempt) -> None:
        before = self._attempts.get(peer)
        self._attempts[peer] = tried
        if tried.error is not None and (before is None or before.error is None):  # once
            event(
                log, "weights_peer_connect_failed", logging.WARNING, peer=peer, reason=tried.error
            )
