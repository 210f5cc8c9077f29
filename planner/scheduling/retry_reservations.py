"""Clients that were told to come again, and when: whoever comes then is let in before others.

At more than capacity a client who comes when he was told would else find that others, who came
meanwhile, have taken the places that have become free. What was promised counts as if it waited, so
that the next one is told a later time: refused clients stand in a line without being there.

Tenants take turns in that line: a newcomer waits for all that his own tenant was promised, and of
every other tenant for as much as that, and one more. Whoever asks a thousand times and never comes
makes a line for himself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

MAX_RESERVATIONS = 4096
GRACE_S = 5.0  # and a fifth of the time told: for so long after it one is expected


class ReservedWork(NamedTuple):
    """So many requests, of so much work in all."""

    requests: int = 0
    amount: float = 0.0


class _Reservation(NamedTuple):
    at_s: float
    until_s: float
    amount: float


class _ClientKey(NamedTuple):
    tenant: bytes
    request: Hashable


class _TenantReservations:
    """Of one tenant: his promises, oldest first."""

    def __init__(self) -> None:
        self.requests: OrderedDict[Hashable, None] = OrderedDict()
        self.amount = 0.0


class _TenantsOfLength:
    """Tenants who were promised equally many requests, and how much all of them in all."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[bytes, None] = OrderedDict()
        self.amount = 0.0


class RetryReservations:
    """By tenant, and by whatever names a request of his. Times are given, in order.

    Of more than `most` promises, the oldest one of who has most is forgotten. No call looks at all
    tenants: those with lines of one length count as one, and among n promises there are at most
    sqrt(2n) different lengths (90 among 4,096), for 1 + 2 + ... + 91 are more than that.
    """

    def __init__(self, most: int = MAX_RESERVATIONS) -> None:
        self._most = most
        self._reservations: OrderedDict[_ClientKey, _Reservation] = OrderedDict()
        self._tenants: dict[bytes, _TenantReservations] = {}
        self._by_length: dict[int, _TenantsOfLength] = {}  # by length of their lines

    def __len__(self) -> int:
        return len(self._reservations)

    def queued_ahead(self, tenant: bytes) -> ReservedWork:
        """What a newcomer of this tenant stands behind: in his own line, all of it."""
        own = self._tenants.get(tenant)
        most = 1 if own is None else 1 + len(own.requests)
        requests, amount = 0, 0.0
        for length, peers in self._by_length.items():
            turns = min(length, most)
            requests += turns * len(peers.tenants)
            amount += peers.amount * turns / length
        return ReservedWork(requests, amount)

    def reserve(
        self, tenant: bytes, request: Hashable, amount: float, now_s: float, in_s: float
    ) -> None:
        """To come again in so many seconds, at the latest a grace after them."""
        self.drop(tenant, request)
        while len(self._reservations) >= self._most:
            largest_tenant = next(iter(self._by_length[max(self._by_length)].tenants))
            self.drop(largest_tenant, next(iter(self._tenants[largest_tenant].requests)))
        at_s = now_s + in_s
        client = _ClientKey(tenant, request)
        self._reservations[client] = _Reservation(at_s, at_s + GRACE_S + in_s / 5, amount)
        own_reservations = self._take_tenant(tenant)
        own_reservations.requests[request] = None
        own_reservations.amount += amount
        self._put_tenant(tenant, own_reservations)

    def remaining_s(self, tenant: bytes, request: Hashable, now_s: float) -> float | None:
        """For how long he is still to stay away; 0: he is expected. None: nothing was promised."""
        reservation = self._reservations.get(_ClientKey(tenant, request))
        return None if reservation is None else max(0.0, reservation.at_s - now_s)

    def drop(self, tenant: bytes, request: Hashable) -> None:
        """Kept, or void. Without effect where nothing was promised."""
        reservation = self._reservations.pop(_ClientKey(tenant, request), None)
        if reservation is None:
            return
        own_reservations = self._take_tenant(tenant)
        del own_reservations.requests[request]
        own_reservations.amount -= reservation.amount
        if own_reservations.requests:
            self._put_tenant(tenant, own_reservations)

    def expire(self, now_s: float) -> None:
        """Those who have not come. They were told in about the order in which they are due: what
        stands behind one that is not late is looked at later."""
        while self._reservations:
            client, reservation = next(iter(self._reservations.items()))
            if reservation.until_s > now_s:
                return
            self.drop(*client)

    def _take_tenant(self, tenant: bytes) -> _TenantReservations:
        """His line, taken out of the books: it is about to have another length."""
        own_reservations = self._tenants.pop(tenant, None)
        if own_reservations is None:
            return _TenantReservations()
        length = len(own_reservations.requests)
        peers = self._by_length[length]
        del peers.tenants[tenant]
        peers.amount -= own_reservations.amount
        if not peers.tenants:
            del self._by_length[length]
        return own_reservations

    def _put_tenant(self, tenant: bytes, own_reservations: _TenantReservations) -> None:
        self._tenants[tenant] = own_reservations
        length = len(own_reservations.requests)
        if length not in self._by_length:
            self._by_length[length] = _TenantsOfLength()
        peers = self._by_length[length]
        peers.tenants[tenant] = None
        peers.amount += own_reservations.amount
