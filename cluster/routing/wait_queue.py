"""Slots of sequences of one class that wait for a first answer, and who waits for a slot.

A client's request is admitted or refused with its first sequence, which needs one slot of any that
are free. Its later ones are patient: they leave some slots to the first ones of others, and wait
in a line for the rest, by turns (planner/policies/turns.py). While others are in that line, none of
them holds more than its share.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from contracts.requests import Caller
from planner.policies.turns import Turns

_Whose = tuple[bytes, int]


class WaitQueue:
    """On one event loop. slots: how many there are now. Every slot that was taken is left once.

    share: of the slots, what one request may hold while others are in line, and what is kept for
    first sequences.
    """

    def __init__(self, slots: Callable[[], int], share: float) -> None:
        self.taken = 0
        self._slots = slots
        self._share = share
        self._held: Counter[_Whose] = Counter()
        self._line: Turns[asyncio.Future[None]] = Turns()
        self._whose: dict[asyncio.Future[None], _Whose] = {}

    def enter(self, caller: Caller) -> bool:
        """Takes a slot for a first sequence, if there is one."""
        if self.taken >= self._slots():
            return False
        self._take(_whose(caller))
        return True

    async def wait(self, caller: Caller) -> None:
        """Returns with a slot."""
        whose = _whose(caller)
        if not len(self._line) and self._has_slot:
            self._take(whose)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._whose[waiter] = whose
        self._line.push(waiter, *whose)
        self.wake()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._line:
                self._line.remove(waiter)
                del self._whose[waiter]
            elif not waiter.cancelled():
                self.leave(caller)
            raise

    def leave(self, caller: Caller) -> None:
        whose = _whose(caller)
        self.taken -= 1
        self._held[whose] -= 1
        if not self._held[whose]:
            del self._held[whose]
        self.wake()

    def wake(self) -> None:
        """Gives free slots to those in line, one by one; call it when there may be more."""
        while len(self._line) and self._has_slot:
            waiter = self._line.peek()
            assert waiter is not None
            if self._has_share(waiter):
                waiter = next(self._line.ahead(self._has_share), waiter)
            self._line.take(waiter)
            whose = self._whose.pop(waiter)
            if not waiter.done():  # cancelled, and not yet told
                self._take(whose)
                waiter.set_result(None)

    @property
    def _has_slot(self) -> bool:
        """For those who are patient."""
        slots = self._slots()
        return self.taken < max(1, slots - int(self._share * slots))

    def _has_share(self, waiter: asyncio.Future[None]) -> bool:
        return self._held[self._whose[waiter]] >= max(1, int(self._share * self._slots()))

    def _take(self, whose: _Whose) -> None:
        self.taken += 1
        self._held[whose] += 1


def _whose(caller: Caller) -> _Whose:
    return caller.tenant, caller.request
