"""Admission control: slots of sequences that wait for a first answer, and the queue for slots.

A client's request is admitted or rejected with its first sequence, which takes any free slot. Its
later sequences leave some slots to the first sequences of others and wait in a fair queue
(planner/scheduling/fair_queue.py) for the rest. While others wait, no request holds more than its
share.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable

from cluster.routing.rank_set import RoutingConfig
from contracts.clock import Clock
from contracts.errors import OverloadError
from contracts.messages import Submit
from contracts.requests import Caller, Priority
from planner.scheduling.admission import (
    BACKLOG,
    SHORTEST_S,
    DrainRate,
    RetryReservations,
    retry_after_s,
)
from planner.scheduling.fair_queue import FairQueue

_Owner = tuple[bytes, int]
_Waiter = tuple[asyncio.Future[None], _Owner]

JITTER = 0.1  # spreads the retries of requests that are rejected together
RESERVABLE_FRACTION = 0.9  # of the drain rate; the rest absorbs uneven arrivals
LOW_LOAD_FRACTION = 0.25  # of the limits; below it, reservations do not count


class WaitQueue:
    """Slots of one class, and a fair queue for them. Belongs to one event loop.

    slots: returns the current number of slots. Each acquired slot must be released once.
    share: fraction of the slots that one request may hold while others wait, and that is reserved
    for first sequences.
    """

    def __init__(self, slots: Callable[[], int], share: float) -> None:
        self.in_use = 0
        self._slots = slots
        self._share = share
        self._held: Counter[_Owner] = Counter()
        self._waiters: FairQueue[_Waiter] = FairQueue()

    def acquire_nowait(self, caller: Caller) -> bool:
        """Take a slot for a first sequence, if one is free."""
        if self.in_use >= self._slots():
            return False
        self._allocate(_owner_of(caller))
        return True

    async def acquire(self, caller: Caller) -> None:
        """Wait for a slot for a later sequence."""
        owner = _owner_of(caller)
        if not len(self._waiters) and self._has_slot:
            self._allocate(owner)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = future, owner
        self._waiters.push(waiter, *owner)
        self.grant_slots()
        try:
            await future
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not future.cancelled():
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
        """Give free slots to waiting sequences. Call it when the number of slots may have grown."""
        while len(self._waiters) and self._has_slot:
            waiter = self._waiters.peek()
            assert waiter is not None
            if self._has_share(waiter):
                waiter = next(self._waiters.ahead(self._has_share), waiter)
            self._waiters.take(waiter)
            future, owner = waiter
            if not future.done():  # else cancelled
                self._allocate(owner)
                future.set_result(None)

    @property
    def _has_slot(self) -> bool:
        """Return whether a slot is free for later sequences."""
        slots = self._slots()
        return self.in_use < max(1, slots - int(self._share * slots))

    def _has_share(self, waiter: _Waiter) -> bool:
        return self._held[waiter[1]] >= max(1, int(self._share * self._slots()))

    def _allocate(self, owner: _Owner) -> None:
        self.in_use += 1
        self._held[owner] += 1


def _owner_of(caller: Caller) -> _Owner:
    return caller.tenant, caller.request


class AdmissionController:
    """Admission control for one pipeline, on one event loop. Work is counted in prompt tokens.

    slots: returns the current number of slots of each class.
    """

    def __init__(self, slots: Callable[[], int], config: RoutingConfig, clock: Clock) -> None:
        self._slots = slots
        self._config = config
        self._clock = clock
        self._backlog = _Backlog(slots)  # of both classes
        self._states = {priority: _ClassState(slots, config) for priority in Priority}

    def acquire_nowait(self, submit: Submit) -> None:
        """Take a slot for the first sequence of a request. Raises OverloadError."""
        state, now_s = self._states[submit.priority], self._clock()
        key = tenant, _ = submit.caller.tenant, hash(tuple(submit.token_ids))
        state.reservations.expire(now_s)
        remaining_s = state.reservations.remaining_s(*key, now_s)
        limit = self._limit_tokens(submit.priority, now_s)
        excess, by_tokens = 0.0, False
        if remaining_s != 0:
            excess, by_tokens = state.excess_tokens(tenant, self._slots(), limit)
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
        raise self._refusal(submit.priority, wait_s, too_long=by_tokens)

    async def acquire(self, submit: Submit) -> None:
        """Wait for a slot for a later sequence of an admitted request."""
        await self._states[submit.priority].queue.acquire(submit.caller)
        self._count(submit, 1, wait_for_slot=True)

    def release(self, submit: Submit, *, wait_for_slot: bool) -> None:
        """Release the slot of a sequence that has its first answer, or has ended.

        wait_for_slot: the slot was taken by `acquire`.
        """
        self._count(submit, -1, wait_for_slot=wait_for_slot)
        self._states[submit.priority].queue.release(submit.caller)

    def grant_slots(self) -> None:
        for state in self._states.values():
            state.queue.grant_slots()

    def _count(self, submit: Submit, sign: int, *, wait_for_slot: bool) -> None:
        state, tokens = self._states[submit.priority], submit.prompt_tokens
        if not wait_for_slot:
            state.first_tokens += sign * tokens
        for backlog in (self._backlog, state.backlog):
            backlog.count(sign, tokens, self._clock())

    def _limit_tokens(self, priority: Priority, now_s: float) -> float:
        """Return the tokens of a class that may wait so that the next request starts in time.

        BE is certain of its share of the ranks' throughput only; LS has the rest.
        """
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
                f"{priority.name} requests wait or hold reservations with more work than can be "
                f"done in priority.{name}_max_wait_s: {again}",
                wait_s,
            )
        limit = self._slots()
        return OverloadError(
            f"{limit} {priority.name} requests wait or hold reservations, the limit "
            f"(schedule.max_waiting of each rank): {again}",
            wait_s,
        )


class _Backlog:
    """Waiting work, and the rate at which it drains while there is enough to measure."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self.sequences = self.tokens = 0
        self.drain = DrainRate()
        self._slots = slots
        self._since_s = 0.0  # approximate start of the next sequence

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
    def __init__(self, slots: Callable[[], int], config: RoutingConfig) -> None:
        self.queue = WaitQueue(slots, config.request_share)
        self.backlog = _Backlog(slots)
        self.reservations = RetryReservations()
        self.first_tokens = 0  # of first sequences

    @property
    def ahead_tokens(self) -> int:
        """Tokens ahead of a new request: first sequences alternate with later ones of others."""
        later_tokens = self.backlog.tokens - self.first_tokens
        return self.first_tokens + min(self.first_tokens, later_tokens)

    @property
    def mean_tokens(self) -> float:
        return self.backlog.tokens / max(1, self.backlog.sequences)

    def excess_tokens(self, tenant: bytes, slots: int, limit: float) -> tuple[float, bool]:
        """Return by how many tokens the work ahead of a tenant's new request exceeds the limits.

        Also return whether the limit of tokens is the one that it exceeds more.
        """
        sequences, tokens = float(self.queue.in_use), float(self.ahead_tokens)
        if max(sequences / slots, tokens / limit) > LOW_LOAD_FRACTION:
            reserved = self.reservations.queued_ahead(tenant)
            sequences += reserved.requests
            tokens += reserved.amount
        too_many = max(0.0, sequences + 1 - slots) * self.mean_tokens
        too_long = tokens - limit
        return max(too_many, too_long, 0.0), too_long > max(too_many, 0.0)
