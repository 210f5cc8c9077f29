"""The table of a server's connections: limits, deadlines, and which connection closes first.

A connection is *proven* once it has sent a valid key or, without configured keys, a complete
request. When there is no room, unproven connections close first, oldest first, then idle proven
ones. A proven connection with a request at work is never closed.

The module uses neither clock nor socket: time is passed in, connections are called.
"""

import enum
import logging
from collections import Counter, OrderedDict
from typing import Any, Protocol

from contracts.clock import Clock
from contracts.config import HttpConfig
from contracts.logs import event

log = logging.getLogger("tandem.front")

DEFAULT_CONNECTIONS = 8192  # with 16 KiB of headers each: 128 MiB
MIN_OTHER_DESCRIPTORS = 256  # ranks, logs, Ray, closing connections
CLOSING_S = 5.0  # for the client to read the last answer and close
HALF_CLOSED_S = 0.5  # between checks of a client that sent FIN and awaits its answer
LOG_EVERY_S = 10.0
MAX_PER_SWEEP = 200  # bounds the time of one sweep


class WaitState(enum.Enum):
    """The client action that a connection waits for. None while a request is at work."""

    HEAD = "headers"
    IDLE = "another request"
    REST = "the rest of a body that is already answered"
    READER = "its answer to be read"
    CLOSING = "its end"
    HALF_CLOSED = "a check whether a client that sent FIN still reads"


class Connection(Protocol):
    """A connection as the table sees it."""

    address: str
    wait: WaitState | None

    def time_out(self, wait: WaitState, limit_s: float) -> None:
        """Handle a client that exceeds limit_s. May wait again."""

    def drop(self) -> None:
        """Close at once, without sending buffered data."""


class ConnectionTable:
    """All connections, on one event loop.

    Call `admit` on accept and `leave` when the descriptor is closed.
    """

    def __init__(self, limit: int, http: HttpConfig, clock: Clock) -> None:
        self.limit = limit
        self._per_address = http.max_connections_per_address
        self._timeouts_s = {
            WaitState.HEAD: http.header_timeout_s,
            WaitState.IDLE: http.keep_alive_timeout_s,
            WaitState.REST: http.header_timeout_s,
            WaitState.READER: http.write_timeout_s,
            WaitState.CLOSING: CLOSING_S,
            WaitState.HALF_CLOSED: HALF_CLOSED_S,
        }
        self._clock = clock
        self._addresses: dict[Connection, str] = {}
        self._by_address: Counter[str] = Counter()
        self._unproven: OrderedDict[Connection, None] = OrderedDict()
        # Start times in order. The timeout of a state is constant, so the first one ends next.
        self._waiting: dict[WaitState, OrderedDict[Connection, float]] = {
            wait: OrderedDict() for wait in WaitState
        }
        self._closed_counts: Counter[str] = Counter()
        self._logged_s = -LOG_EVERY_S

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: Connection) -> bool:
        """Add the connection, in place of another one if necessary. False: there is no room."""
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
        """Close the next connection in order of precedence. False: all are at work."""
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
        """Remove the connection. No effect if it is unknown."""
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
        """Set what the connection waits for.

        A wait that already runs keeps its start: a client that sends byte by byte gains no time.
        """
        before = connection.wait
        if before is wait:
            return
        if before is not None:
            self._waiting[before].pop(connection, None)
        connection.wait = wait
        if wait is not None and connection in self._addresses:
            self._waiting[wait][connection] = self._clock()

    def sweep(self) -> None:
        """Time out connections, and log closed and rejected ones."""
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


def connection_limit(requested: int | None, descriptors: int) -> int:
    """Return the number of connections that a server may hold.

    descriptors: the limit of the process. An eighth of it, at least 256, stays free for other uses;
    of a small limit, half.
    """
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
