"""Clients that were told to come again, and when: whoever comes then is let in before others.

At more than capacity a client who comes when he was told would else find that others, who came
meanwhile, have taken the places that have become free. What was promised counts as if it waited, so
that the next one is told a later time: refused clients stand in a line without being there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

MOST = 4096
GRACE_S = 5.0  # and a fifth of the time told: for so long after it one is expected


class _Promise(NamedTuple):
    at_s: float
    until_s: float
    amount: float


class Appointments:
    """By whatever names a client's request. Times are given, in order.

    amount: what is promised in all. Of more than MOST promises the oldest one is forgotten.
    """

    def __init__(self, most: int = MOST) -> None:
        self.amount = 0.0
        self._most = most
        self._promises: OrderedDict[Hashable, _Promise] = OrderedDict()

    def __len__(self) -> int:
        return len(self._promises)

    def give(self, who: Hashable, amount: float, now_s: float, in_s: float) -> None:
        """To come again in so many seconds, at the latest a grace after them."""
        self.drop(who)
        while len(self._promises) >= self._most:
            self.drop(next(iter(self._promises)))
        at_s = now_s + in_s
        self._promises[who] = _Promise(at_s, at_s + GRACE_S + in_s / 5, amount)
        self.amount += amount

    def left_s(self, who: Hashable, now_s: float) -> float | None:
        """For how long he is still to stay away; 0: he is expected. None: nothing was promised."""
        promise = self._promises.get(who)
        return None if promise is None else max(0.0, promise.at_s - now_s)

    def drop(self, who: Hashable) -> None:
        """Kept, or void. Without effect where nothing was promised."""
        promise = self._promises.pop(who, None)
        if promise is not None:
            self.amount = self.amount - promise.amount if self._promises else 0.0

    def forget_late(self, now_s: float) -> None:
        """Those who have not come. They were told in about the order in which they are due: what
        stands behind one that is not late is looked at later."""
        while self._promises:
            who, promise = next(iter(self._promises.items()))
            if promise.until_s > now_s:
                return
            self.drop(who)
