"""Clients that were told to come again, and when: whoever comes then is let in before others.

At more than capacity a client who comes when he was told would else find that others, who came
meanwhile, have taken the places that have become free. What was promised counts as if it waited, so
that the next one is told a later time: refused clients stand in a line without being there.

Tenants take turns in that line: a newcomer waits for all that his own tenant was promised, and of
every other tenant for as much as that, and one more. Whoever asks a thousand times and never comes
makes a line for himself.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import NamedTuple

MOST = 4096
GRACE_S = 5.0  # and a fifth of the time told: for so long after it one is expected


class Promised(NamedTuple):
    """So many requests, of so much work in all."""

    requests: int = 0
    amount: float = 0.0


class _Promise(NamedTuple):
    at_s: float
    until_s: float
    amount: float


class _Who(NamedTuple):
    tenant: bytes
    request: Hashable


class _Line:
    """Of one tenant: his promises, oldest first."""

    def __init__(self) -> None:
        self.requests: OrderedDict[Hashable, None] = OrderedDict()
        self.amount = 0.0

    def ahead_of_another(self, requests: int) -> Promised:
        """Of one whose own tenant was promised so many."""
        mine = len(self.requests)
        turns = min(mine, requests + 1)
        return Promised(turns, self.amount * turns / mine)


class Appointments:
    """By tenant, and by whatever names a request of his. Times are given, in order.

    Of more than `most` promises, the oldest one of who has most is forgotten.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._promises: OrderedDict[_Who, _Promise] = OrderedDict()
        self._lines: defaultdict[bytes, _Line] = defaultdict(_Line)

    def __len__(self) -> int:
        return len(self._promises)

    def ahead_of(self, tenant: bytes) -> Promised:
        """What a newcomer of this tenant stands behind."""
        own = self._lines.get(tenant)
        requests = len(own.requests) if own is not None else 0
        amount = own.amount if own is not None else 0.0
        ahead = requests
        for other, line in self._lines.items():
            if other != tenant:
                theirs = line.ahead_of_another(requests)
                ahead, amount = ahead + theirs.requests, amount + theirs.amount
        return Promised(ahead, amount)

    def give(
        self, tenant: bytes, request: Hashable, amount: float, now_s: float, in_s: float
    ) -> None:
        """To come again in so many seconds, at the latest a grace after them."""
        self.drop(tenant, request)
        while len(self._promises) >= self._most:
            whose = max(self._lines, key=lambda one: len(self._lines[one].requests))
            self.drop(whose, next(iter(self._lines[whose].requests)))
        at_s = now_s + in_s
        who = _Who(tenant, request)
        self._promises[who] = _Promise(at_s, at_s + GRACE_S + in_s / 5, amount)
        line = self._lines[tenant]
        line.requests[request] = None
        line.amount += amount

    def left_s(self, tenant: bytes, request: Hashable, now_s: float) -> float | None:
        """For how long he is still to stay away; 0: he is expected. None: nothing was promised."""
        promise = self._promises.get(_Who(tenant, request))
        return None if promise is None else max(0.0, promise.at_s - now_s)

    def drop(self, tenant: bytes, request: Hashable) -> None:
        """Kept, or void. Without effect where nothing was promised."""
        promise = self._promises.pop(_Who(tenant, request), None)
        if promise is None:
            return
        line = self._lines[tenant]
        del line.requests[request]
        line.amount -= promise.amount
        if not line.requests:
            del self._lines[tenant]

    def forget_late(self, now_s: float) -> None:
        """Those who have not come. They were told in about the order in which they are due: what
        stands behind one that is not late is looked at later."""
        while self._promises:
            who, promise = next(iter(self._promises.items()))
            if promise.until_s > now_s:
                return
            self.drop(*who)
