"""Reservations for rejected clients: one that returns in time is admitted before others.

Without them, new clients would take the places that become free before the rejected client returns.
Reserved work counts as waiting, so the next client gets a later time.

Tenants take turns: a new request waits for all reservations of its own tenant, and for as many of
every other tenant plus one. A client that never returns only delays its own tenant.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

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


class _ClientKey(NamedTuple):
    tenant: bytes
    request: Hashable


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
        self._reservations: OrderedDict[_ClientKey, _Reservation] = OrderedDict()
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
        client = _ClientKey(tenant, request)
        self._reservations[client] = _Reservation(at_s, at_s + GRACE_S + in_s / 5, amount)
        own_reservations = self._take_tenant(tenant)
        own_reservations.members[request] = None
        own_reservations.amount += amount
        self._put_tenant(tenant, own_reservations)

    def remaining_s(self, tenant: bytes, request: Hashable, now_s: float) -> float | None:
        """Return the seconds until the retry is due; 0: due. None: no reservation."""
        reservation = self._reservations.get(_ClientKey(tenant, request))
        return None if reservation is None else max(0.0, reservation.at_s - now_s)

    def drop(self, tenant: bytes, request: Hashable) -> None:
        """Drop a reservation, if there is one."""
        reservation = self._reservations.pop(_ClientKey(tenant, request), None)
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
