"""Who is let in to the ranks of a pipeline, and what those are told who are not.

    LS ──> a slot? · work ahead within ls_max_wait_s? ──> WaitQueue ─┐
    BE ──> a slot? · work ahead within be_max_wait_s? ──> WaitQueue ─┴──> answered ──> drain rates
                 └─ no: 429, told when to come again, and then expected

Each class has slots of its own, and its own measure: a flood of one refuses nobody of the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from cluster.routing.placer import RoutingConfig
from cluster.routing.wait_queue import WaitQueue
from contracts.clock import Clock
from contracts.errors import OverloadError
from contracts.messages import Submit
from contracts.requests import Priority
from planner.policies.appointments import Appointments
from planner.policies.drain import BACKLOG, SHORTEST_S, DrainRate, retry_after_s

JITTER = 0.1  # those who are refused together do not come back together
PROMISED = 0.9  # of what drains: the rest takes up how unevenly they come
NEARLY_IDLE = 0.25  # of the longest wait or the slots: with less ahead, promises do not count


class Door:
    """On one event loop. slots: how many each class has now. Work is in prompt tokens."""

    def __init__(self, slots: Callable[[], int], config: RoutingConfig, clock: Clock) -> None:
        self._slots = slots
        self._config = config
        self._clock = clock
        self._backlog = _Backlog(slots)  # of both classes: how fast the ranks are
        self._halves = {priority: _Half(slots, config) for priority in Priority}

    def enter(self, submit: Submit) -> None:
        """Takes a slot for the first sequence of a request. Raises OverloadError."""
        half, now_s = self._halves[submit.priority], self._clock()
        who = tenant, _ = submit.caller.tenant, hash(tuple(submit.token_ids))
        half.promises.forget_late(now_s)
        early_s = half.promises.left_s(*who, now_s)
        limit = self._limit_tokens(submit.priority, now_s)
        excess = 0.0 if early_s == 0 else half.excess_tokens(tenant, self._slots(), limit)
        if not excess and half.queue.enter(submit.caller):
            half.promises.drop(*who)
            self._count(submit, 1, patient=False)
            return
        wait_s = max(early_s or 0.0, SHORTEST_S)
        if not early_s:
            excess = max(excess, half.tokens_each)
            rate = half.backlog.drain.per_second(now_s)
            wait_s = retry_after_s(excess / PROMISED, rate)
            wait_s *= random.uniform(1 - JITTER, 1 + JITTER)
            half.promises.give(*who, len(submit.token_ids), now_s, math.ceil(wait_s))
        raise self._refusal(submit.priority, wait_s, too_long=half.ahead_tokens > limit)

    async def wait(self, submit: Submit) -> None:
        """Returns with a slot for a later sequence of a request that was let in."""
        await self._halves[submit.priority].queue.wait(submit.caller)
        self._count(submit, 1, patient=True)

    def leave(self, submit: Submit, *, patient: bool) -> None:
        """It has its first answer, or is gone. patient: it came in through `wait`."""
        self._count(submit, -1, patient=patient)
        self._halves[submit.priority].queue.leave(submit.caller)

    def wake(self) -> None:
        """There may be more slots than there were."""
        for half in self._halves.values():
            half.queue.wake()

    def _count(self, submit: Submit, sign: int, *, patient: bool) -> None:
        half, tokens = self._halves[submit.priority], submit.prompt_tokens
        if not patient:
            half.first_tokens += sign * tokens
        for backlog in (self._backlog, half.backlog):
            backlog.count(sign, tokens, self._clock())

    def _limit_tokens(self, priority: Priority, now_s: float) -> float:
        """So much may wait of a class that the next one is answered in time. BE has its share of
        what the ranks can do, and no more for certain; LS has what that leaves."""
        config, rate = self._config, self._backlog.drain.per_second(now_s)
        if priority is Priority.LS:
            share = 1 - config.be_share if self._halves[Priority.BE].backlog.tokens else 1.0
            longest_s = config.ls_max_wait_s
        else:
            share, longest_s = config.be_share, config.be_max_wait_s
            if not share:
                share, rate = 1.0, self._halves[priority].backlog.drain.per_second(now_s)
        return math.inf if rate is None else longest_s * share * rate

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


class _Half:
    """Of one class."""

    def __init__(self, slots: Callable[[], int], config: RoutingConfig) -> None:
        self.queue = WaitQueue(slots, config.request_share)
        self.backlog = _Backlog(slots)
        self.promises = Appointments()
        self.first_tokens = 0  # of the first sequences of requests

    @property
    def ahead_tokens(self) -> int:
        """Of somebody who comes now: first sequences take turns with the later ones of others."""
        later_tokens = self.backlog.tokens - self.first_tokens
        return self.first_tokens + min(self.first_tokens, later_tokens)

    @property
    def tokens_each(self) -> float:
        """Of those that wait, on average."""
        return self.backlog.tokens / max(1, self.backlog.sequences)

    def excess_tokens(self, tenant: bytes, slots: int, limit: float) -> float:
        """By how much too much is ahead of a tenant's newcomer; 0: it is not too much."""
        sequences, tokens = float(self.queue.taken), float(self.ahead_tokens)
        if max(sequences / slots, tokens / limit) > NEARLY_IDLE:
            promised = self.promises.ahead_of(tenant)
            sequences += promised.requests
            tokens += promised.amount
        too_many = max(0.0, sequences + 1 - slots) * self.tokens_each
        return max(too_many, tokens - limit, 0.0)
