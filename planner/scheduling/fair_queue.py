"""Fair queueing between tenants, then between a tenant's requests; FIFO within a request.

    tenant A   request 1   a a a a a ...
               request 2   b                  a x b a x a x a a ...
    tenant B   request 3   x x x         →

Each level serves the key that has received least, by cost: start-time fair queueing with equal
weights, in which virtual time advances by served cost over the number of waiting keys. A new key is
neither behind all queued work nor ahead of keys that have waited for their turn.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class _LeastServedFirst(Generic[Key]):
    """Waiting keys, the one that has received least first; ties in order of service or arrival.

    Operations are O(log n) amortised.
    """

    def __init__(self) -> None:
        self._given: dict[Key, tuple[float, int]] = {}  # with a number that breaks ties
        self._heap: list[tuple[float, int, Key]] = []  # entries that `_given` contradicts are stale
        self._time = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._given)

    def __contains__(self, key: Key) -> bool:
        return key in self._given

    def copy(self) -> _LeastServedFirst[Key]:
        clone: _LeastServedFirst[Key] = _LeastServedFirst()
        clone._given, clone._heap = dict(self._given), list(self._heap)
        clone._time, clone._number = self._time, self._number
        return clone

    def add(self, key: Key) -> None:
        self._put(key, self._time)

    def first(self) -> Key:
        while True:
            given, number, key = self._heap[0]
            if self._given.get(key) == (given, number):
                return key
            heapq.heappop(self._heap)

    def charge(self, key: Key, cost: float) -> None:
        given, _ = self._given[key]
        self._time += cost / len(self._given)
        self._put(key, given + cost)

    def discard(self, key: Key) -> None:
        del self._given[key]
        if not self._given:
            self._heap.clear()
            self._time = 0.0
        self._compact()

    def _put(self, key: Key, given: float) -> None:
        self._number += 1
        self._given[key] = given, self._number
        heapq.heappush(self._heap, (given, self._number, key))
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._given) + 8:
            self._heap = [(given, n, key) for key, (given, n) in self._given.items()]
            heapq.heapify(self._heap)


class _Tenant(Generic[Item]):
    def __init__(self) -> None:
        self.turns: _LeastServedFirst[Hashable] = _LeastServedFirst()
        self.items: dict[Hashable, OrderedDict[Item, float]] = {}  # by request; → cost


class FairQueue(Generic[Item]):
    """Waiting items, each at most once."""

    def __init__(self) -> None:
        self._turns: _LeastServedFirst[Hashable] = _LeastServedFirst()
        self._tenants: dict[Hashable, _Tenant[Item]] = {}
        self._of: dict[Item, tuple[Hashable, Hashable]] = {}  # → tenant, request

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, item: Item) -> bool:
        return item in self._of

    def push(
        self,
        item: Item,
        tenant: Hashable,
        request: Hashable,
        *,
        cost: float = 1.0,
        again: bool = False,
    ) -> None:
        """Add an item. again: it returns after its turn, to the head of its request, at no cost."""
        if tenant not in self._turns:
            self._turns.add(tenant)
            self._tenants[tenant] = _Tenant()
        queue = self._tenants[tenant]
        if request not in queue.turns:
            queue.turns.add(request)
            queue.items[request] = OrderedDict()
        items = queue.items[request]
        items[item] = 0.0 if again else cost
        if again:
            items.move_to_end(item, last=False)
        self._of[item] = tenant, request

    def peek(self) -> Item | None:
        """Return the next item."""
        if not self._of:
            return None
        queue = self._tenants[self._turns.first()]
        return next(iter(queue.items[queue.turns.first()]))

    def pop(self) -> Item:
        """Remove and return the next item, and charge its tenant and request."""
        item = self.peek()
        if item is None:
            raise IndexError("nothing waits")
        return self.take(item)

    def take(self, item: Item) -> Item:
        """Remove an item as if it were its turn."""
        tenant, request = self._of[item]
        cost = self._tenants[tenant].items[request][item]
        self._turns.charge(tenant, cost)
        self._tenants[tenant].turns.charge(request, cost)
        return self.remove(item)

    def remove(self, item: Item) -> Item:
        """Remove an item without a charge. Raises KeyError."""
        tenant, request = self._of.pop(item)
        queue = self._tenants[tenant]
        items = queue.items[request]
        del items[item]
        if not items:
            del queue.items[request]
            queue.turns.discard(request)
        if not queue.items:
            self._turns.discard(tenant)
            del self._tenants[tenant]
        return item

    def __iter__(self) -> Iterator[Item]:
        """Iterate in the order of `pop`; the queue must not change meanwhile."""
        return self.ahead(lambda _: False)

    def ahead(self, is_skipped: Callable[[Item], bool]) -> Iterator[Item]:
        """Iterate like `pop`, without requests whose next item `is_skipped`.

        If `take` then removes the yielded items in this order, they have had their turns.
        """
        tenants = self._turns.copy()
        inner: dict[Hashable, _TenantPreview[Item]] = {}
        while len(tenants):
            tenant = tenants.first()
            if tenant not in inner:
                inner[tenant] = _TenantPreview(self._tenants[tenant])
            requests = inner[tenant]
            item, cost = requests.peek()
            if is_skipped(item):
                requests.skip()
            else:
                yield item
                tenants.charge(tenant, cost)
                requests.charge(cost)
            if not len(requests.turns):
                tenants.discard(tenant)


class _TenantPreview(Generic[Item]):
    """Simulated turns of a tenant's requests."""

    def __init__(self, tenant: _Tenant[Item]) -> None:
        self.turns = tenant.turns.copy()
        self._items = tenant.items
        self._iterators: dict[Hashable, Iterator[tuple[Item, float]]] = {}
        self._given: Counter[Hashable] = Counter()

    def peek(self) -> tuple[Item, float]:
        """Return the next item and its cost; call `charge` or `skip` next."""
        request = self.turns.first()
        if request not in self._iterators:
            self._iterators[request] = iter(self._items[request].items())
        return next(self._iterators[request])

    def charge(self, cost: float) -> None:
        request = self.turns.first()
        self.turns.charge(request, cost)
        self._given[request] += 1
        if self._given[request] == len(self._items[request]):
            self.turns.discard(request)

    def skip(self) -> None:
        self.turns.discard(self.turns.first())


def fair_level(counts: Iterable[int], places: int) -> int:
    """Return the largest equal limit per count so that all fit in `places`; at least 1.

    Smaller counts leave their rest to the others. O(n log n).
    """
    demand = sorted(counts)
    left = places
    for index, count in enumerate(demand):
        level = left // (len(demand) - index)
        if count > level:
            return max(1, level)
        left -= count
    return max(1, places)


class TenantLimit(NamedTuple):
    """Places of a tenant, and the most per request."""

    places: int
    per_request: int


def fair_limits(
    demand: Mapping[Key, Mapping[Hashable, int]], places: int
) -> dict[Key, TenantLimit]:
    """Return the limit of each tenant that demands more than its part of `places`.

    demand: by tenant and request.
    """
    totals = {tenant: sum(requests.values()) for tenant, requests in demand.items()}
    if sum(totals.values()) <= places:
        return {}
    part = fair_level(totals.values(), places)
    return {
        tenant: TenantLimit(part, fair_level(demand[tenant].values(), part))
        for tenant, total in totals.items()
        if total > part
    }
