"""What is left of a batch that is being formed: for all, and for each client request.

While requests of others are there too, one request's sequences have a share of a batch, and no more
of its places than leaves room for all: so a batch never takes longer than that because of one
request, and who comes next finds a place in it. A request that is alone may have everything.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from contracts.config import ScheduleConfig
from contracts.messages import Submit
from contracts.requests import Priority
from planner.turns import Part, fair_parts

SHARED_BATCHES = 32  # a batch is still shared so many batches after others were last there


class Owner(NamedTuple):
    """Of a sequence. request: of a client, which is one connection to the rank."""

    tenant: bytes
    request: tuple[int, int]
    priority: Priority


def owner_of(client: int, submit: Submit) -> Owner:
    caller = submit.caller
    return Owner(caller.tenant, (client, caller.request), submit.priority)


class InPlay:
    """How many sequences each request has on the rank, waiting or running. LS work does not share
    with BE work, but BE with LS."""

    def __init__(self) -> None:
        self._counts: dict[Priority, defaultdict[bytes, Counter[Hashable]]] = {
            priority: defaultdict(Counter) for priority in Priority
        }
        self._shared_until = dict.fromkeys(Priority, 0)

    def add(self, owner: Owner) -> None:
        self._counts[owner.priority][owner.tenant][owner.request] += 1

    def remove(self, owner: Owner) -> None:
        tenants = self._counts[owner.priority]
        requests = tenants[owner.tenant]
        requests[owner.request] -= 1
        if not requests[owner.request]:
            del requests[owner.request]
        if not requests:
            del tenants[owner.tenant]

    def count(self, owner: Owner) -> int:
        requests = self._counts[owner.priority].get(owner.tenant)
        return requests[owner.request] if requests else 0

    def shared(self, priority: Priority, batch: int) -> bool:
        """Whether requests of this class have others beside them in that batch, or had lately."""
        if self._has_several(priority):
            self._shared_until[priority] = batch + SHARED_BATCHES
        return batch < self._shared_until[priority]

    def _has_several(self, lowest: Priority) -> bool:
        """Whether these classes, down to the lowest, have more than one request."""
        seen = None
        for priority in Priority:
            for tenant, requests in self._counts[priority].items():
                if priority > lowest:
                    return False
                first = tenant, next(iter(requests))
                if len(requests) > 1 or seen not in (None, first):
                    return True
                seen = first
        return False

    def parts(self, priority: Priority, places: int) -> Mapping[bytes, Part]:
        """Of the tenants of a class that want more than their part of a batch, that part."""
        before = (self._counts[each] for each in Priority if each < priority)
        taken = sum(sum(map(Counter.total, tenants.values())) for tenants in before)
        return fair_parts(self._counts[priority], max(1, places - taken))


class BatchRoom:
    """Tokens and places. `hold_back` some for those who wait while those who run take theirs."""

    def __init__(self, config: ScheduleConfig, in_play: InPlay, batch: int) -> None:
        self.tokens = config.max_batch_tokens
        self.places = config.max_batch_sequences
        self.is_shared = False
        self._held_back = 0
        self._most: dict[Priority, tuple[int, int]] = {}  # of a request: tokens, places
        self._parts: dict[Priority, Mapping[bytes, Part]] = {}
        self._tokens: Counter[Owner] = Counter()  # that each has taken
        self._places: Counter[Owner] = Counter()
        self._by_tenant: Counter[tuple[Priority, bytes]] = Counter()
        for priority in Priority:
            if in_play.shared(priority, batch):
                self.is_shared = True
                self._most[priority] = (
                    share_of(config.request_share, self.tokens),
                    share_of(config.request_share, self.places),
                )
                self._parts[priority] = in_play.parts(priority, self.places)

    @property
    def is_full(self) -> bool:
        return self.tokens <= self._held_back or self.places == 0

    def hold_back(self, tokens: int) -> None:
        self._held_back = tokens

    def tokens_for(self, owner: Owner) -> int:
        """How many tokens of one more sequence may come; 0: none."""
        left = 0 if self.is_full else self.tokens - self._held_back
        if owner.priority not in self._most:
            return left
        most_tokens, most_places = self._most[owner.priority]
        part = self._parts[owner.priority].get(owner.tenant)
        if part is not None:
            if self._by_tenant[owner.priority, owner.tenant] >= part.places:
                return 0
            most_places = min(most_places, part.of_each)
        if self._places[owner] >= most_places:
            return 0
        return max(0, min(left, most_tokens - self._tokens[owner]))

    def take(self, owner: Owner, tokens: int) -> None:
        """A whole prompt may be more than there was room for."""
        self.tokens = max(0, self.tokens - tokens)
        self.places -= 1
        if owner.priority in self._most:
            self._tokens[owner] += tokens
            self._places[owner] += 1
            self._by_tenant[owner.priority, owner.tenant] += 1


def share_of(share: float, whole: int) -> int:
    """At least 1."""
    return max(1, math.floor(share * whole))
