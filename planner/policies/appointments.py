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


class _Equals:
    """Tenants who were promised equally many requests, and how much all of them in all."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[bytes, None] = OrderedDict()
        self.amount = 0.0


class Appointments:
    """By tenant, and by whatever names a request of his. Times are given, in order.

    Of more than `most` promises, the oldest one of who has most is forgotten. No call looks at all
    tenants: those with lines of one length count as one, and among n promises there are at most
    sqrt(2n) different lengths (90 among 4,096), for 1 + 2 + ... + 91 are more than that.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._promises: OrderedDict[_Who, _Promise] = OrderedDict()
        self._lines: dict[bytes, _Line] = {}
        self._equals: dict[int, _Equals] = {}  # by length of their lines

    def __len__(self) -> int:
        return len(self._promises)

    def ahead_of(self, tenant: bytes) -> Promised:
        """What a newcomer of this tenant stands behind: in his own line, all of it."""
        own = self._lines.get(tenant)
        most = 1 if own is None else 1 + len(own.requests)
        requests, amount = 0, 0.0
        for length, equals in self._equals.items():
            turns = min(length, most)
            requests += turns * len(equals.tenants)
            amount += equals.amount * turns / length
        return Promised(requests, amount)

    def give(
        self, tenant: bytes, request: Hashable, amount: float, now_s: float, in_s: float
    ) -> None:
        """To come again in so many seconds, at the latest a grace after them."""
        self.drop(tenant, request)
        while len(self._promises) >= self._most:
            whose = next(iter(self._equals[max(self._equals)].tenants))
            self.drop(whose, next(iter(self._lines[whose].requests)))
        at_s = now_s + in_s
        who = _Who(tenant, request)
        self._promises[who] = _Promise(at_s, at_s + GRACE_S + in_s / 5, amount)
        line = self._part_with(tenant)
        line.requests[request] = None
        line.amount += amount
        self._keep(tenant, line)

    def left_s(self, tenant: bytes, request: Hashable, now_s: float) -> float | None:
        """For how long he is still to stay away; 0: he is expected. None: nothing was promised."""
        promise = self._promises.get(_Who(tenant, request))
        return None if promise is None else max(0.0, promise.at_s - now_s)

    def drop(self, tenant: bytes, request: Hashable) -> None:
        """Kept, or void. Without effect where nothing was promised."""
        promise = self._promises.pop(_Who(tenant, request), None)
        if promise is None:
            return
        line = self._part_with(tenant)
        del line.requests[request]
        line.amount -= promise.amount
        if line.requests:
            self._keep(tenant, line)

    def forget_late(self, now_s: float) -> None:
        """Those who have not come. They were told in about the order in which they are due: what
        stands behind one that is not late is looked at later."""
        while self._promises:
            who, promise = next(iter(self._promises.items()))
            if promise.until_s > now_s:
                return
            self.drop(*who)

    def _part_with(self, tenant: bytes) -> _Line:
        """His line, taken out of the books: it is about to have another length."""
        line = self._lines.pop(tenant, None)
        if line is None:
            return _Line()
        length = len(line.requests)
        equals = self._equals[length]
        del equals.tenants[tenant]
        equals.amount -= line.amount
        if not equals.tenants:
            del self._equals[length]
        return line

    def _keep(self, tenant: bytes, line: _Line) -> None:
        self._lines[tenant] = line
        length = len(line.requests)
        if length not in self._equals:
            self._equals[length] = _Equals()
        equals = self._equals[length]
        equals.tenants[tenant] = None
        equals.amount += line.amount
