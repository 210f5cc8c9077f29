"""The connections of a front: how many there may be, what each waits for from its client, and who
goes first when there is no room.

One rule for everybody who has not proven who he is: a connection is *proven* once it has brought a
valid key, or, where no keys are configured, a complete request. Until then it is the first to make
room, oldest first; then come proven ones that are idle. What a proven connection has at work is
never taken from it.

No clock and no socket in here: time is passed in, connections are told what to do.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from contracts.clock import Clock
from contracts.config import HttpConfig
from contracts.logs import event

log = logging.getLogger("tandem.front")

DEFAULT_CONNECTIONS = 8192  # 16 KiB of headers each are 128 MiB
MIN_OTHER_DESCRIPTORS = 256  # ranks, logs, Ray; and the connections that are closing
CLOSING_S = 5.0  # for the client to take the last answer, and to close its side
LOG_EVERY_S = 10.0
MAX_PER_SWEEP = 200  # so that thousands that end at once do not stop the loop


class WaitState(enum.Enum):
    """What a connection waits for from its client. Not in here: its request is at work."""

    HEAD = "headers"
    IDLE = "another request"
    REST = "the rest of a body that is already answered"
    READER = "its answer to be read"
    CLOSING = "its end"


class Connection(Protocol):
    """What the book needs of a connection."""

    address: str
    wait: WaitState | None

    def time_out(self, wait: WaitState, limit_s: float) -> None:
        """The client has not done within limit_s what it should. May ask to wait again."""

    def drop(self) -> None:
        """Ends at once, whatever is unsent."""


class ConnectionTable:
    """The book. `admit` on accepting, `leave` when the descriptor is closed; on one event loop."""

    def __init__(
        self,
        limit: int,
        per_address: int | None,
        timeouts_s: Mapping[WaitState, float],
        clock: Clock,
    ) -> None:
        self.limit = limit
        self._per_address = per_address
        self._timeouts_s = timeouts_s
        self._clock = clock
        self._addresses: dict[Connection, str] = {}  # all of them
        self._by_address: Counter[str] = Counter()
        self._unproven: OrderedDict[Connection, None] = OrderedDict()
        # Since when, in order: timeouts are the same for all, so the first one is the next to end.
        self._waiting: dict[WaitState, OrderedDict[Connection, float]] = {
            wait: OrderedDict() for wait in WaitState
        }
        self._closed_counts: Counter[str] = Counter()
        self._logged_s = -LOG_EVERY_S

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: Connection) -> bool:
        """Takes it in, if need be in another one's place. False: there is no room."""
        address = connection.address
        if self._per_address is not None and self._by_address[address] >= self._per_address:
            self._closed_counts["refused_of_one_address"] += 1
            return False
        if len(self) >= self.limit and not self.make_room():
            self._closed_counts["refused"] += 1
            return False
        self._addresses[connection] = address
        if self._per_address is not None:
            self._by_address[address] += 1
        self._unproven[connection] = None
        self.wait_for(connection, WaitState.HEAD)
        return True

    def make_room(self) -> bool:
        """Ends the connection that is the first to go. False: all are at work."""
        idle = self._waiting[WaitState.IDLE]
        if self._unproven:
            connection = next(iter(self._unproven))
            self._closed_counts["unproven_closed"] += 1
        elif idle:
            connection = next(iter(idle))
            self._closed_counts["idle_closed"] += 1
        else:
            return False
        self.leave(connection)
        connection.drop()
        return True

    def leave(self, connection: Connection) -> None:
        """Forgets it. Twice does no harm."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._unproven.pop(connection, None)
        self.wait_for(connection, None)
        if self._per_address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def prove(self, connection: Connection) -> None:
        self._unproven.pop(connection, None)

    def wait_for(self, connection: Connection, wait: WaitState | None) -> None:
        """From now on it waits for that. What it waited for already goes on: a client that sends
        byte by byte gains no time."""
        before = connection.wait
        if before is wait:
            return
        if before is not None:
            self._waiting[before].pop(connection, None)
        connection.wait = wait
        if wait is not None and connection in self._addresses:
            self._waiting[wait][connection] = self._clock()

    def sweep(self) -> None:
        """Tells those whose time is over, and logs what had to be closed or refused since."""
        now_s = self._clock()
        left = MAX_PER_SWEEP
        for wait, waiting in self._waiting.items():
            limit_s = self._timeouts_s[wait]
            while waiting and left:
                connection, since_s = next(iter(waiting.items()))
                if now_s - since_s < limit_s:
                    break
                left -= 1
                self.wait_for(connection, None)
                connection.time_out(wait, limit_s)
        if self._closed_counts and now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            counts: dict[str, Any] = dict(sorted(self._closed_counts.items()))
            self._closed_counts.clear()
            here = len(self)
            event(
                log,
                "connection_limit_reached",
                logging.WARNING,
                open=here,
                limit=self.limit,
                **counts,
            )


def connection_timeouts(http: HttpConfig) -> dict[WaitState, float]:
    """Seconds for each wait."""
    return {
        WaitState.HEAD: http.header_timeout_s,
        WaitState.IDLE: http.keep_alive_timeout_s,
        WaitState.REST: http.header_timeout_s,
        WaitState.READER: http.write_timeout_s,
        WaitState.CLOSING: CLOSING_S,
    }


def connection_limit(requested: int | None, descriptors: int) -> int:
    """Connections that a front may hold. descriptors: the limit of the process. What the process
    needs beside them stays free: an eighth, at least 256, of a small limit half."""
    others = min(max(MIN_OTHER_DESCRIPTORS, descriptors // 8), descriptors // 2)
    room = max(1, descriptors - others)
    if requested is None:
        return min(room, DEFAULT_CONNECTIONS)
    if requested > room:
        event(
            log,
            "connection_limit_lowered",
            logging.WARNING,
            requested=requested,
            limit=room,
            descriptors=descriptors,
            hint="http.max_connections needs more descriptors; raise ulimit -n before the start",
        )
    return min(requested, room)
