"""A cache of experts in slots, filled from a slower tier.

    request(layer, ids) ──> ExpertRequest ──> acquire … complete … until nothing is left
    hint(layer, ids with confidence)          read while no requested expert is missing

Owned by the computing thread; others read (`ExpertTier`), and only `wait` blocks. Requests are read
first, latency-sensitive before best-effort ones, then hints by confidence. Reads have parts, of
which few are in flight, so that a request waits for few parts and a wrong hint is cancelled early.

While LS requests are live, BE requests take only a fraction of the slots: a long prompt uses every
expert of every layer once, and would empty them without gain.

A requested expert in a slot is not evicted before it is computed with, so a layer that needs more
experts than there are slots runs in waves and always finishes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from contracts.clock import Clock, monotonic_s
from contracts.errors import ChannelError
from contracts.requests import Priority
from kernels.linear import Product
from models.experts.cache_requests import (
    DEMAND,
    USED_HINT,
    WASTED_HINT,
    AcquiredExpert,
    CacheTraffic,
    ExpertRequest,
    PredictedExpert,
    PrefetchHints,
    running_mean,
)
from models.experts.expert_eviction import Eviction, EvictionKind, ExpertKey, pays
from models.experts.expert_format import ExpertSlots, ExpertTier

HINT_PARTS: Final = 8  # of one hint in flight
HINT_URGENCY: Final = len(Priority)  # after all requests
BE_FRACTION: Final = 0.25  # of the slots, for BE while LS is live
LS_LIVE_S: Final = 1.0  # LS is live for this time after its last request
_TRIES: Final = 2  # to read an expert


class _Read:
    """A read of one expert into a slot. tickets: of parts in flight."""

    __slots__ = ("cancelled", "hinted", "key", "next_part", "parts_done", "slot", "tickets")

    def __init__(self, key: ExpertKey, slot: int, *, hinted: bool) -> None:
        self.key, self.slot, self.hinted = key, slot, hinted
        self.next_part = self.parts_done = 0
        self.tickets: set[int] = set()
        self.cancelled = False


class ExpertCache:
    """Single-threaded except `wake`."""

    def __init__(
        self,
        tier: ExpertTier,
        slots: ExpertSlots,
        eviction: EvictionKind,
        *,
        deadline_s: float,
        clock: Clock = monotonic_s,
        is_worth_reading: Callable[[float, float, float], bool] = pays,
    ) -> None:
        """deadline_s: longest time without progress of the tier."""
        self.slots, self._held = slots.count, slots
        self._tier, self._eviction = tier, Eviction(eviction)
        self._is_worth_reading = is_worth_reading
        self._deadline_s, self._clock = deadline_s, clock
        self._memory = list(map(slots.memory, range(slots.count)))
        self._free = list(range(slots.count))
        self._slot_of: dict[ExpertKey, int] = {}
        self._pinned: set[ExpertKey] = set()
        self._unused_hints: set[ExpertKey] = set()  # in slots by hints, not used
        self._of_be: set[ExpertKey] = set()  # read for BE, not used by LS since
        self._ls_s = -LS_LIVE_S  # time of the last LS request
        self._reads: dict[ExpertKey, _Read] = {}
        self._read_of: dict[int, _Read] = {}  # by ticket
        self._failures: Counter[ExpertKey] = Counter()
        self._requests: list[ExpertRequest] = []  # LS before BE, the oldest first
        self._requests_of: defaultdict[ExpertKey, list[ExpertRequest]] = defaultdict(list)
        self._hints = PrefetchHints()
        self._part_s = 0.0  # mean time to read a part
        self._progressed_s = clock()  # time of the tier's last progress
        self._numbers = 0
        self._is_settled = True  # no read can be issued until something changes
        self._lacks_slots = False  # found by the last `_issue`
        self.traffic = CacheTraffic()

    @property
    def num_bytes(self) -> int:
        return self._held.num_bytes

    @property
    def read_s(self) -> float:
        """Recent mean time to read an expert."""
        return self._part_s * self._tier.parts

    def holds(self, layer: int, expert: int) -> bool:
        return ExpertKey(layer, expert) in self._slot_of

    def products(self, slot: int) -> tuple[Product, Product]:
        return self._held.products(slot)

    def request(
        self, layer: int, experts: Sequence[int], priority: Priority, owner: Hashable = None
    ) -> ExpertRequest:
        """Start to read missing experts. owner: its hints for that layer are dropped."""
        self._numbers += 1
        now_s = self._clock()
        self._collect_reads(now_s)
        request = ExpertRequest(layer, experts, priority, self._numbers, now_s)
        if priority is Priority.LS:
            self._ls_s = now_s
            self._of_be.difference_update(ExpertKey(layer, expert) for expert in experts)
        self._hints.resolve(owner, layer, now_s)
        for expert in experts:
            key = ExpertKey(layer, expert)
            self._requests_of[key].append(request)
            if key in self._slot_of:
                request.ready.add(expert)
            elif key in self._reads:
                for ticket in self._reads[key].tickets:
                    self._tier.expedite(ticket, priority)
        self.traffic.hits[layer] += len(request.ready)
        self.traffic.requested[layer] += len(request.left)
        self._requests.append(request)
        self._requests.sort(key=lambda each: (each.priority, each.number))
        self._cancel_unneeded()
        if len(request.ready) < len(request.left):
            self._is_settled = False
            self._issue()
        return request

    def merge(self, requests: Sequence[ExpertRequest], experts: Sequence[int]) -> ExpertRequest:
        """Replace unacquired requests of one layer and class by one for `experts` in order."""
        first = min(requests, key=attrgetter("number"))
        merged = ExpertRequest(first.layer, experts, first.priority, first.number, first.started_s)
        merged.ready = set().union(*(request.ready for request in requests))
        merged.error = next((request.error for request in requests if request.error), "")
        for expert in experts:
            self._requests_of[ExpertKey(merged.layer, expert)].append(merged)
        self._requests[self._requests.index(first)] = merged
        for request in requests:
            self.cancel(request)
        return merged

    def acquire(
        self, request: ExpertRequest, pairs: Mapping[int, int], max_pairs: int
    ) -> list[AcquiredExpert]:
        """Return available neighbouring experts of the request, with at most `max_pairs` (or one).

        They keep their slots until `complete` or `release`. Raises ChannelError if one cannot be
        read.
        """
        if not request.ready:
            self._advance()
        if request.error:
            raise ChannelError(request.error)
        acquired: list[AcquiredExpert] = []
        left = max_pairs
        for expert, place in request.left.items():
            if expert not in request.ready and not acquired:
                continue
            is_adjacent = not acquired or place == request.left[acquired[-1].expert] + 1
            if (
                expert not in request.ready
                or not is_adjacent
                or (acquired and pairs[expert] > left)
            ):
                break
            key = ExpertKey(request.layer, expert)
            acquired.append(AcquiredExpert(expert, self._slot_of[key]))
            self._pinned.add(key)
            left -= pairs[expert]
        return acquired

    def acquire_ready(self, request: ExpertRequest) -> list[AcquiredExpert]:
        """Acquire all available experts of the request."""
        self._advance()
        if request.error:
            raise ChannelError(request.error)
        ready = [
            ExpertKey(request.layer, expert) for expert in request.left if expert in request.ready
        ]
        self._pinned.update(ready)
        return [AcquiredExpert(key.expert, self._slot_of[key]) for key in ready]

    def complete(self, request: ExpertRequest, acquired: Sequence[AcquiredExpert]) -> None:
        """Record that acquired experts were computed with."""
        for expert, _ in acquired:
            key = ExpertKey(request.layer, expert)
            self._pinned.discard(key)
            self._eviction.on_use(key)
            self._forget(request, key)
            if key in self._unused_hints:
                self._unused_hints.remove(key)
                self._count(USED_HINT)
        if acquired and not request.left:
            self._requests.remove(request)
        self._is_settled = self._is_settled and not self._lacks_slots
        self._advance()

    def release(self, request: ExpertRequest, acquired: Sequence[AcquiredExpert]) -> None:
        """Return acquired experts that are still needed; they may lose their slots."""
        self._pinned.difference_update(ExpertKey(request.layer, expert) for expert, _ in acquired)
        self._is_settled = self._is_settled and not self._lacks_slots

    def cancel(self, request: ExpertRequest) -> None:
        for expert in list(request.left):
            key = ExpertKey(request.layer, expert)
            self._pinned.discard(key)
            self._forget(request, key)
        if request in self._requests:
            self._requests.remove(request)
        self._is_settled = False
        self._cancel_unneeded()

    def hint(
        self,
        owner: Hashable,
        layer: int,
        guesses: Iterable[PredictedExpert],
        priority: Priority = Priority.LS,
    ) -> None:
        """Replace the owner's hints for a layer, the likeliest first.

        BE: ignored while LS is live.
        """
        if priority is Priority.BE and self._is_ls_live():
            return
        missing = [
            guess for guess in guesses if ExpertKey(layer, guess.expert) not in self._slot_of
        ]
        self._hints.put(owner, layer, missing, self._clock())
        self._cancel_unneeded()
        if missing:
            self._is_settled = False
            self._issue()

    def forget_hints(self, owner: Hashable) -> None:
        self._hints.forget(owner)
        self._cancel_unneeded()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ready request, `wake` or `timeout_s`. Raises ChannelError without progress."""
        self._advance()
        if self._is_any_ready():
            return True
        start_s = self._clock()
        self._tier.wait(timeout_s)
        now_s = self._clock()
        if self._requests:
            self.traffic.waited_s += now_s - start_s
        self._advance()
        if self._is_any_ready():
            return True
        self._check_deadline(now_s)
        return False

    def wake(self) -> None:
        self._tier.wake()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` would return at once."""
        return self._tier.fileno()

    def check(self) -> None:
        """Raise AssertionError unless each slot is free, being filled, or holds one expert."""
        reading = [read.slot for read in self._reads.values()]
        acquired = [*self._free, *reading, *self._slot_of.values()]
        assert sorted(acquired) == list(range(self.slots)), acquired
        assert self._pinned <= set(self._slot_of), self._pinned
        assert self._of_be <= {*self._slot_of, *self._reads}, self._of_be
        for request in self._requests:
            there = {e for e in request.left if ExpertKey(request.layer, e) in self._slot_of}
            assert request.ready == there, (request.ready, there)

    def close(self) -> None:
        self._tier.close()

    def _is_any_ready(self) -> bool:
        return any(request.is_ready for request in self._requests)

    def _advance(self) -> None:
        self._collect_reads(self._clock())
        self._issue()

    def _collect_reads(self, now_s: float) -> None:
        if not self._read_of:
            return
        for completed in self._tier.poll_completed():
            self._is_settled = False
            read = self._read_of.pop(completed.ticket)
            read.tickets.remove(completed.ticket)
            if completed.error:
                self._record_failure(read, completed.error)
            elif completed.seconds:
                self._progressed_s = now_s
                self._part_s = running_mean(self._part_s, completed.seconds)
                read.parts_done += 1
                if not read.cancelled:
                    start_s = self._clock()
                    self._tier.copy(completed.ticket, self._memory[read.slot])
                    self.traffic.copied_s += self._clock() - start_s
            self._tier.free(completed.ticket)
            if read.cancelled:
                self._discard(read)
            elif read.parts_done == self._tier.parts:
                self._place(read)

    def _issue(self) -> None:
        """Read as many parts as the tier accepts: of requests, then of hints."""
        if self._is_settled:
            return
        self._is_settled, self._lacks_slots = True, False
        room = self._tier.room
        issued = 0
        for read, urgency in self._to_read():
            while issued < room and read.next_part < self._tier.parts:
                if urgency == HINT_URGENCY and self._hints_in_flight() >= HINT_PARTS:
                    break
                key = read.key
                ticket = self._tier.enqueue(key.layer, key.expert, read.next_part, urgency)
                read.tickets.add(ticket)
                self._read_of[ticket] = read
                read.next_part += 1
                issued += 1
            if read.next_part < self._tier.parts:
                break
        if issued:
            self._tier.submit()

    def _to_read(self) -> Iterator[tuple[_Read, int]]:
        """Yield reads with parts left and their urgency, in order."""
        is_missing = False
        for request in self._requests:
            for expert in request.left if not request.error else ():
                key = ExpertKey(request.layer, expert)
                if key in self._slot_of:
                    continue
                is_missing = True
                read = self._reads.get(key) or self._begin(key, request.priority)
                if read is None:  # every slot holds requested experts
                    self._lacks_slots = True
                    self._make_room(request)
                    break
                if not read.cancelled:
                    yield read, request.priority
        if self._hints and not is_missing:
            yield from self._to_prefetch()

    def _to_prefetch(self) -> Iterator[tuple[_Read, int]]:
        guesses = self._hints.by_confidence()
        hinted = {key for _, key in guesses}
        for confidence, key in guesses:
            if key in self._slot_of or not (key in self._reads or self._is_worth_it(confidence)):
                continue
            read = self._reads.get(key)
            if read is None:
                if self._hints_in_flight():  # two at once delay the better one
                    return
                slot = self._free.pop() if self._free else None
                if slot is None:
                    slot = self._evict(key.layer, lambda k: k in hinted or k in self._requests_of)
                if slot is None:
                    self._lacks_slots = True
                    return
                read = self._reads[key] = _Read(key, slot, hinted=True)
            if not read.cancelled:
                yield read, HINT_URGENCY

    def _hints_in_flight(self) -> int:
        return sum(len(read.tickets) for read in self._reads.values() if read.hinted)

    def _is_worth_it(self, confidence: float) -> bool:
        lead_time_s = self._hints.lead_time_s
        if not lead_time_s or not self._part_s:
            return True  # not measured yet
        return self._is_worth_reading(confidence, min(self.read_s, lead_time_s), self._part_s)

    def _begin(self, key: ExpertKey, priority: Priority) -> _Read | None:
        slot = self._slot_for(key.layer, priority)
        if slot is None:
            return None
        if priority is Priority.BE:
            self._of_be.add(key)
        read = self._reads[key] = _Read(key, slot, hinted=False)
        return read

    def _slot_for(self, layer: int, priority: Priority) -> int | None:
        if self._free:
            return self._free.pop()
        is_at_quota = (
            priority is Priority.BE
            and self._is_ls_live()
            and len(self._of_be) >= max(1, int(BE_FRACTION * self.slots))
        )
        return self._evict(
            layer,
            lambda key: (
                self._is_requested(key, priority) or (is_at_quota and key not in self._of_be)
            ),
        )

    def _is_ls_live(self) -> bool:
        return self._clock() - self._ls_s < LS_LIVE_S

    def _make_room(self, request: ExpertRequest) -> None:
        """Cancel as many hinted and less urgent reads as the request lacks slots."""
        keys = (ExpertKey(request.layer, expert) for expert in request.left)
        lacks = sum(key not in self._slot_of and key not in self._reads for key in keys)
        lacks -= sum(read.cancelled for read in self._reads.values())
        for key, read in list(self._reads.items()):
            if lacks > 0 and not read.cancelled and not self._is_requested(key, request.priority):
                self._cancel(read)
                lacks -= 1

    def _is_requested(self, key: ExpertKey, priority: Priority) -> bool:
        """Return whether a request of that class or a higher one needs the expert."""
        requests = self._requests_of.get(key, ())
        return any(request.priority <= priority for request in requests)

    def _evict(self, layer: int, is_kept: Callable[[ExpertKey], bool]) -> int | None:
        """Evict one expert and return its slot, or None."""
        for key in self._eviction.candidates(layer):
            if key not in self._pinned and not is_kept(key):
                break
        else:
            return None
        self._eviction.on_evict(key)
        self._of_be.discard(key)
        for request in self._requests_of.get(key, ()):
            request.ready.discard(key.expert)
        if key in self._unused_hints:
            self._unused_hints.remove(key)
            self._count(WASTED_HINT)
        return self._slot_of.pop(key)

    def _count(self, cause: str, parts: int | None = None) -> None:
        """parts: of an expert; None: all."""
        parts = self._tier.parts if parts is None else parts
        self.traffic.read_bytes[cause] += self._tier.expert_bytes * parts // self._tier.parts

    def _check_deadline(self, now_s: float) -> None:
        for request in self._requests:
            since_s = max(request.started_s, self._progressed_s)
            if now_s - since_s > self._deadline_s:
                missing = [expert for expert in request.left if expert not in request.ready]
                raise ChannelError(
                    f"experts {missing[:8]} of layer {request.layer} are missing: nothing could be "
                    f"read from {self._tier} for {self._deadline_s:g} s; see "
                    "channel.connect_timeout_s"
                )

    def _forget(self, request: ExpertRequest, key: ExpertKey) -> None:
        request.left.pop(key.expert, None)
        request.ready.discard(key.expert)
        requests = self._requests_of[key]
        if request in requests:
            requests.remove(request)
        if not requests:
            del self._requests_of[key]

    def _cancel_unneeded(self) -> None:
        """Cancel reads without a request or hint."""
        if not self._reads:
            return
        hinted = self._hints.keys()
        for key, read in list(self._reads.items()):
            if key not in self._requests_of and key not in hinted and not read.cancelled:
                self._cancel(read)

    def _cancel(self, read: _Read) -> None:
        read.cancelled = True
        for ticket in read.tickets:
            self._tier.cancel(ticket)
        self._discard(read)

    def _discard(self, read: _Read) -> None:
        """Free the slot of a cancelled read once none of its parts is in flight."""
        if read.tickets:
            return
        del self._reads[read.key]
        self._of_be.discard(read.key)
        self._free.append(read.slot)
        if read.hinted:
            self._count(WASTED_HINT, read.parts_done)

    def _record_failure(self, read: _Read, error: str) -> None:
        key = read.key
        if not read.cancelled:
            read.cancelled = True
            for ticket in read.tickets:
                self._tier.cancel(ticket)
        self._failures[key] += 1
        if self._failures[key] < _TRIES:
            return
        del self._failures[key]
        self._hints.exclude(key)
        for request in self._requests_of.get(key, ()):
            request.error = f"expert {key.expert} of layer {key.layer}: {error}"

    def _place(self, read: _Read) -> None:
        key = read.key
        del self._reads[key]
        self._failures.pop(key, None)
        self._slot_of[key] = read.slot
        self._eviction.on_insert(key)
        if read.hinted:
            self._unused_hints.add(key)
        else:
            self._count(DEMAND)
        for request in self._requests_of.get(key, ()):
            request.ready.add(key.expert)
