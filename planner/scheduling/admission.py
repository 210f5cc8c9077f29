"""Admission of clients: Retry-After of rejected ones, reservations for their return, rate limits.

A rejected client that returns in time is admitted before others (`RetryReservations`). Without
reservations, new clients would take the places that become free before it returns. Reserved work
counts as waiting, so the next client gets a later time.

Tenants take turns: a new request waits for all reservations of its own tenant, and for as many of
every other tenant plus one. A client that never returns only delays its own tenant.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

SHORTEST_S, LONGEST_S = 1.0, 600.0  # bounds of Retry-After
MEMORY_S = 10.0
BACKLOG = 8  # fewer waiting requests run together and do not show the rate


class DrainRate:
    """Amount drained per second while there was a backlog.

    An exponential average with time constant MEMORY_S. Times must not decrease.
    """

    def __init__(self) -> None:
        self._drained = self._waited_s = 0.0
        self._last_s: float | None = None  # None: no backlog

    def begin(self, now_s: float) -> None:
        """Start of a backlog."""
        self._last_s = now_s

    def leave(self, amount: float, now_s: float, *, last: bool) -> None:
        """Record a departure during a backlog; last: it ends the backlog."""
        if self._last_s is None:
            return
        passed_s = now_s - self._last_s
        kept = math.exp(-passed_s / MEMORY_S)
        self._drained = kept * self._drained + amount
        self._waited_s = kept * self._waited_s + passed_s
        self._last_s = None if last else now_s

    def per_second(self, now_s: float) -> float | None:
        """Return the rate, or None before any departure; idle time lowers it."""
        standing_s = 0.0 if self._last_s is None else now_s - self._last_s
        waited_s = self._waited_s + standing_s
        return self._drained / waited_s if self._drained and waited_s > 0 else None


def retry_after_s(excess: float, per_second: float | None) -> float:
    """Return the time in which `excess` drains, within SHORTEST_S and LONGEST_S."""
    if per_second is None:
        return SHORTEST_S
    return min(max(excess / per_second, SHORTEST_S), LONGEST_S)


Member = TypeVar("Member")

MAX_RESERVATIONS = 4096
GRACE_S = 5.0  # grace period, plus a fifth of the waiting time


class ReservedWork(NamedTuple):
    """Number and total work of reserved requests."""

    requests: int = 0
    amount: float = 0.0


class _Reservation(NamedTuple):
    at_s: float
    until_s: float
    amount: float


class _Group(Generic[Member]):
    """Requests of one tenant, or tenants with equally many; oldest first, with their total work."""

    def __init__(self) -> None:
        self.members: OrderedDict[Member, None] = OrderedDict()
        self.amount = 0.0


class RetryReservations:
    """Reservations by tenant and request. Times must not decrease.

    Beyond `most`, the oldest reservation of the tenant with most is dropped. Tenants with equally
    many reservations are grouped: n reservations have at most sqrt(2n) different counts (90 for
    4,096), so no call visits all tenants.
    """

    def __init__(self, most: int = MAX_RESERVATIONS) -> None:
        self._most = most
        self._reservations: OrderedDict[tuple[bytes, Hashable], _Reservation] = OrderedDict()
        self._tenants: dict[bytes, _Group[Hashable]] = {}
        self._by_length: dict[int, _Group[bytes]] = {}  # by number of reservations

    def __len__(self) -> int:
        return len(self._reservations)

    def queued_ahead(self, tenant: bytes) -> ReservedWork:
        """Return the reserved work ahead of a new request of this tenant."""
        own = self._tenants.get(tenant)
        most = 1 if own is None else 1 + len(own.members)
        requests, amount = 0, 0.0
        for length, peers in self._by_length.items():
            turns = min(length, most)
            requests += turns * len(peers.members)
            amount += peers.amount * turns / length
        return ReservedWork(requests, amount)

    def reserve(
        self, tenant: bytes, request: Hashable, amount: float, now_s: float, in_s: float
    ) -> None:
        """Reserve a retry in `in_s` seconds, with a grace period after it."""
        self.drop(tenant, request)
        while len(self._reservations) >= self._most:
            largest_tenant = next(iter(self._by_length[max(self._by_length)].members))
            self.drop(largest_tenant, next(iter(self._tenants[largest_tenant].members)))
        at_s = now_s + in_s
        self._reservations[tenant, request] = _Reservation(at_s, at_s + GRACE_S + in_s / 5, amount)
        own_reservations = self._take_tenant(tenant)
        own_reservations.members[request] = None
        own_reservations.amount += amount
        self._put_tenant(tenant, own_reservations)

    def remaining_s(self, tenant: bytes, request: Hashable, now_s: float) -> float | None:
        """Return the seconds until the retry is due; 0: due. None: no reservation."""
        reservation = self._reservations.get((tenant, request))
        return None if reservation is None else max(0.0, reservation.at_s - now_s)

    def drop(self, tenant: bytes, request: Hashable) -> None:
        """Drop a reservation, if there is one."""
        reservation = self._reservations.pop((tenant, request), None)
        if reservation is None:
            return
        own_reservations = self._take_tenant(tenant)
        del own_reservations.members[request]
        own_reservations.amount -= reservation.amount
        if own_reservations.members:
            self._put_tenant(tenant, own_reservations)

    def expire(self, now_s: float) -> None:
        """Drop overdue reservations; they are in approximate order of expiry."""
        while self._reservations:
            client, reservation = next(iter(self._reservations.items()))
            if reservation.until_s > now_s:
                return
            self.drop(*client)

    def _take_tenant(self, tenant: bytes) -> _Group[Hashable]:
        """Remove the tenant from the groups before its count changes."""
        own_reservations = self._tenants.pop(tenant, None)
        if own_reservations is None:
            return _Group()
        length = len(own_reservations.members)
        peers = self._by_length[length]
        del peers.members[tenant]
        peers.amount -= own_reservations.amount
        if not peers.members:
            del self._by_length[length]
        return own_reservations

    def _put_tenant(self, tenant: bytes, own_reservations: _Group[Hashable]) -> None:
        self._tenants[tenant] = own_reservations
        length = len(own_reservations.members)
        if length not in self._by_length:
            self._by_length[length] = _Group()
        peers = self._by_length[length]
        peers.members[tenant] = None
        peers.amount += own_reservations.amount


BURST_S = 10.0  # unused time that accumulates
MIN_BURST = 1.0


class TokenBucket:
    """A rate limit of one client: it fills by `per_s` up to BURST_S seconds' worth, for bursts.

    It may be overdrawn, because usage is known only afterwards; the client then waits until it is
    refilled. In any time t at most burst + per_s * t is started. Times must not decrease.
    """

    def __init__(self, per_s: float, now_s: float) -> None:
        self.per_s = per_s
        self.burst = max(MIN_BURST, BURST_S * per_s)
        self._level, self._at_s = self.burst, now_s

    def level(self, now_s: float) -> float:
        """Return the level; negative: overdrawn."""
        return min(self.burst, self._level + self.per_s * (now_s - self._at_s))

    def take(self, amount: float, now_s: float) -> None:
        self._level, self._at_s = self.level(now_s) - amount, now_s

    def wait_s(self, least: float, now_s: float) -> float:
        """Return the seconds until the level is `least`."""
        return max(0.0, (least - self.level(now_s)) / self.per_s)
