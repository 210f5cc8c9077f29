"""Slots of sequences of one class that wait for a first answer, and who waits for a slot.

A client's request is admitted or refused with its first sequence, which needs one slot of any that
are free. Its later ones are patient: they leave some slots to the first ones of others, and wait
in a line for the rest, by turns (planner/scheduling/fair_queue.py). While others are in that line,
none of them holds more than its share.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable

from cluster.routing.placer import RoutingConfig
from contracts.clock import Clock
from contracts.errors import OverloadError
from contracts.messages import Submit
from contracts.requests import Caller, Priority
from planner.scheduling.drain_rate import BACKLOG, SHORTEST_S, DrainRate, retry_after_s
from planner.scheduling.fair_queue import FairQueue
from planner.scheduling.retry_reservations import RetryReservations

_Owner = tuple[bytes, int]


class WaitQueue:
    """On one event loop. slots: how many there are now. Every slot that was taken is left once.

    share: of the slots, what one request may hold while others are in line, and what is kept for
    first sequences.
    """

    def __init__(self, slots: Callable[[], int], share: float) -> None:
        self.in_use = 0
        self._slots = slots
        self._share = share
        self._held: Counter[_Owner] = Counter()
        self._waiters: FairQueue[asyncio.Future[None]] = FairQueue()
        self._owner_of: dict[asyncio.Future[None], _Owner] = {}

    def acquire_nowait(self, caller: Caller) -> bool:
        """Takes a slot for a first sequence, if there is one."""
        if self.in_use >= self._slots():
            return False
        self._allocate(_owner_of(caller))
        return True

    async def acquire(self, caller: Caller) -> None:
        """Returns with a slot."""
        owner = _owner_of(caller)
        if not len(self._waiters) and self._has_slot:
            self._allocate(owner)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._owner_of[waiter] = owner
        self._waiters.push(waiter, *owner)
        self.grant_slots()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                del self._owner_of[waiter]
            elif not waiter.cancelled():
                self.release(caller)
            raise

    def release(self, caller: Caller) -> None:
        owner = _owner_of(caller)
        self.in_use -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self.grant_slots()

    def grant_slots(self) -> None:
        """Gives free slots to those in line, one by one; call it when there may be more."""
        while len(self._waiters) and self._has_slot:
            waiter = self._waiters.peek()
            assert waiter is not None
            if self._has_share(waiter):
                waiter = next(self._waiters.ahead(self._has_share), waiter)
            self._waiters.take(waiter)
            owner = self._owner_of.pop(waiter)
            if not waiter.done():  # cancelled, and not yet told
                self._allocate(owner)
                waiter.set_result(None)

    @property
    def _has_slot(self) -> bool:
        """For those who are patient."""
        slots = self._slots()
        return self.in_use < max(1, slots - int(self._share * slots))

    def _has_share(self, waiter: asyncio.Future[None]) -> bool:
        return self._held[self._owner_of[waiter]] >= max(1, int(self._share * self._slots()))

    def _allocate(self, owner: _Owner) -> None:
        self.in_use += 1
        self._held[owner] += 1


def _owner_of(caller: Caller) -> _Owner:
    return caller.tenant, caller.request


JITTER = 0.1  # those who are refused together do not come back together
RESERVABLE_FRACTION = 0.9  # of what drains: the rest takes up how unevenly they come
LOW_LOAD_FRACTION = 0.25  # of the longest wait or the slots: with less ahead, promises do not count


class AdmissionController:
    """On one event loop. slots: how many each class has now. Work is in prompt tokens."""

    def __init__(self, slots: Callable[[], int], config: RoutingConfig, clock: Clock) -> None:
        self._slots = slots
        self._config = config
        self._clock = clock
        self._backlog = _Backlog(slots)  # of both classes: how fast the ranks are
        self._states = {priority: _ClassState(slots, config) for priority in Priority}

    def acquire_nowait(self, submit: Submit) -> None:
        """Takes a slot for the first sequence of a request. Raises OverloadError."""
        state, now_s = self._states[submit.priority], self._clock()
        key = tenant, _ = submit.caller.tenant, hash(tuple(submit.token_ids))
        state.reservations.expire(now_s)
        remaining_s = state.reservations.remaining_s(*key, now_s)
        limit = self._limit_tokens(submit.priority, now_s)
        excess = 0.0 if remaining_s == 0 else state.excess_tokens(tenant, self._slots(), limit)
        if not excess and state.queue.acquire_nowait(submit.caller):
            state.reservations.drop(*key)
            self._count(submit, 1, wait_for_slot=False)
            return
        wait_s = max(remaining_s or 0.0, SHORTEST_S)
        if not remaining_s:
            excess = max(excess, state.mean_tokens)
            rate = state.backlog.drain.per_second(now_s)
            wait_s = retry_after_s(excess / RESERVABLE_FRACTION, rate)
            wait_s *= random.uniform(1 - JITTER, 1 + JITTER)
            state.reservations.reserve(*key, len(submit.token_ids), now_s, math.ceil(wait_s))
        raise self._refusal(submit.priority, wait_s, too_long=state.ahead_tokens > limit)

    async def acquire(self, submit: Submit) -> None:
        """Returns with a slot for a later sequence of a request that was let in."""
        await self._states[submit.priority].queue.acquire(submit.caller)
        self._count(submit, 1, wait_for_slot=True)

    def release(self, submit: Submit, *, wait_for_slot: bool) -> None:
        """It has its first answer, or is gone. patient: it came in through `acquire`."""
        self._count(submit, -1, wait_for_slot=wait_for_slot)
        self._states[submit.priority].queue.release(submit.caller)

    def grant_slots(self) -> None:
        """There may be more slots than there were."""
        for state in self._states.values():
            state.queue.grant_slots()

    def _count(self, submit: Submit, sign: int, *, wait_for_slot: bool) -> None:
        state, tokens = self._states[submit.priority], submit.prompt_tokens
        if not wait_for_slot:
            state.first_tokens += sign * tokens
        for backlog in (self._backlog, state.backlog):
            backlog.count(sign, tokens, self._clock())

    def _limit_tokens(self, priority: Priority, now_s: float) -> float:
        """So much may wait of a class that the next one is answered in time. BE has its share of
        what the ranks can do, and no more for certain; LS has what that leaves."""
        config, rate = self._config, self._backlog.drain.per_second(now_s)
        if priority is Priority.LS:
            share = 1 - config.be_share if self._states[Priority.BE].backlog.tokens else 1.0
            max_wait_s = config.ls_max_wait_s
        else:
            share, max_wait_s = config.be_share, config.be_max_wait_s
            if not share:
                share, rate = 1.0, self._states[priority].backlog.drain.per_second(now_s)
        return math.inf if rate is None else max_wait_s * share * rate

    def _refusal(self, priority: Priority, wait_s: float, *, too_long: bool) -> OverloadError:
        name, again = priority.label, f"try again in {math.ceil(wait_s)} s"
        if too_long:
            return OverloadError(
                f"{priority.name} requests that wait have more work than can be done in "
                f"priority.{name}_max_wait_s: {again}",
                wait_s,
            )
        limit = self._slots()
        return OverloadError(
            f"{limit} {priority.name} requests wait or are expected back, as many as may "
            f"(schedule.max_waiting of each rank): {again}",
            wait_s,
        )


class _Backlog:
    """What waits, and how fast it leaves while there is enough of it to tell."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self.sequences = self.tokens = 0
        self.drain = DrainRate()
        self._slots = slots
        self._since_s = 0.0  # when what comes next was begun, about

    def count(self, sign: int, tokens: int, now_s: float) -> None:
        enough = min(BACKLOG, self._slots())
        if sign < 0 or not self.sequences:
            self._since_s = now_s
        was_backlog = self.sequences >= enough
        self.sequences += sign
        self.tokens += sign * tokens
        is_backlog = self.sequences >= enough
        if sign < 0:
            self.drain.leave(tokens, now_s, last=not is_backlog)
        elif is_backlog and not was_backlog:
            self.drain.begin(self._since_s)


class _ClassState:
    """Of one class."""

    def __init__(self, slots: Callable[[], int], config: RoutingConfig) -> None:
        self.queue = WaitQueue(slots, config.request_share)
        self.backlog = _Backlog(slots)
        self.reservations = RetryReservations()
        self.first_tokens = 0  # of the first sequences of requests

    @property
    def ahead_tokens(self) -> int:
        """Of somebody who comes now: first sequences take turns with the later ones of others."""
        later_tokens = self.backlog.tokens - self.first_tokens
        return self.first_tokens + min(self.first_tokens, later_tokens)

    @property
    def mean_tokens(self) -> float:
        """Of those that wait, on average."""
        return self.backlog.tokens / max(1, self.backlog.sequences)

    def excess_tokens(self, tenant: bytes, slots: int, limit: float) -> float:
        """By how much too much is ahead of a tenant's newcomer; 0: it is not too much."""
        sequences, tokens = float(self.queue.in_use), float(self.ahead_tokens)
        if max(sequences / slots, tokens / limit) > LOW_LOAD_FRACTION:
            reserved = self.reservations.queued_ahead(tenant)
            sequences += reserved.requests
            tokens += reserved.amount
        too_many = max(0.0, sequences + 1 - slots) * self.mean_tokens
        return max(too_many, tokens - limit, 0.0)
