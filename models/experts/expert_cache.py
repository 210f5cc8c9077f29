"""Experts that do not all fit: slots of one expert each, filled from a slower tier.

    want(layer, ids) ──> Want ──> take(ids that are there) … done(ids) … until nothing is left
    hint(layer, ids with confidence)      read while nothing that is wanted is missing

Two threads read. What a micro-batch waits for goes first, latency-sensitive work before best
effort; then hints, best guess first. Reads go in parts, and the next part to be read is chosen anew
each time: a demand never waits for more than what is under way, and a hint whose layer turned out
to want other experts is given up where it stands.

What is wanted and there is not evicted before it was computed with; so a layer that wants more
experts than there are slots runs in waves, and always comes to its end.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from contracts.clock import Clock, monotonic_s
from contracts.errors import ChannelError
from contracts.expert_slots import Eviction, ExpertKey, ReadingAhead
from contracts.requests import Priority
from kernels.linear import Product
from models.experts.expert_file import SlotMemory, slot_memory
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_store import ExpertBuffer

READERS: Final = 2
_CLOSE_S: Final = 5.0
_TRIES: Final = 2  # of a part that cannot be read
_NEWEST: Final = 0.1  # of a measured time, in its running mean


class Guess(NamedTuple):
    """An expert that a layer may want. confidence: how often such a guess was right."""

    expert: int
    confidence: float


class Taken(NamedTuple):
    expert: int
    slot: int


class TierReader(Protocol):
    def read(self, layer: int, expert: int, part: int, into: SlotMemory) -> None:
        """Raises ChannelError that names what was read."""


class Tier(Protocol):
    """Where experts are that are in no slot. parts: in which each of them is read."""

    @property
    def parts(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...

    def reader(self) -> TierReader:
        """For one thread."""

    def close(self) -> None: ...


class Want:
    """Experts that a micro-batch is to be computed with at a layer. left: still to be; ready: of
    those, what is in a slot."""

    __slots__ = ("begun_s", "error", "layer", "left", "number", "priority", "ready")

    def __init__(
        self, layer: int, experts: Iterable[int], priority: Priority, number: int, now_s: float
    ) -> None:
        self.layer, self.priority, self.number, self.begun_s = layer, priority, number, now_s
        self.left = {expert: place for place, expert in enumerate(experts)}  # in this order
        self.ready: set[int] = set()
        self.error: ChannelError | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to compute, or to raise, or nothing left."""
        return bool(self.ready) or not self.left or self.error is not None


class Traffic:
    """What was read and why, so far; hits and wanted: experts, by layer. waited_s: in which nothing
    was computed because experts were not there."""

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()
        self.wanted: Counter[int] = Counter()
        self.demand_bytes = self.used_hint_bytes = self.wasted_hint_bytes = 0
        self.waited_s = self.read_s = 0.0
        self.reads = 0


class _Read:
    """Of an expert into a slot. demanded: a micro-batch waits for it."""

    __slots__ = ("busy", "cancelled", "demanded", "done", "hinted", "next_part", "slot", "spent_s")

    def __init__(self, slot: int, *, demanded: bool) -> None:
        self.slot, self.demanded, self.hinted = slot, demanded, not demanded
        self.next_part = self.done = self.busy = 0
        self.spent_s = 0.0
        self.cancelled = False


class ExpertCache:
    """`want`, `take`, `done`, `drop`, `hint` and `wait` belong to one thread, which computes."""

    def __init__(
        self,
        tier: Tier,
        layout: ExpertLayout,
        slots: int,
        order: Eviction,
        pays: ReadingAhead,
        *,
        deadline_s: float,
        clock: Clock = monotonic_s,
    ) -> None:
        """order: which leaves first. deadline_s: for the tier to move."""
        self.slots = slots
        self._tier, self._order, self._pays = tier, order, pays
        self._deadline_s, self._clock = deadline_s, clock
        self._buffer = ExpertBuffer(layout, slots)
        self._memory = [slot_memory(self._buffer, slot) for slot in range(slots)]
        self._free = list(range(slots))
        self._slot_of: dict[ExpertKey, int] = {}
        self._pinned: set[ExpertKey] = set()
        self._unused_hints: set[ExpertKey] = set()  # there because of a hint, and not yet used
        self._reads: dict[ExpertKey, _Read] = {}
        self._failures: Counter[ExpertKey] = Counter()
        self._wants: list[Want] = []  # LS before BE, the oldest first
        self._wants_of: defaultdict[ExpertKey, list[Want]] = defaultdict(list)
        self._hints: dict[tuple[Hashable, int], list[Guess]] = {}  # by (whose, layer)
        self._hinted_s: dict[tuple[Hashable, int], float] = {}
        self._ahead_s = 0.0  # from a hint to the demand, on average
        self._part_s = 0.0  # to read one
        self._moved_s = clock()  # when the tier gave something last
        self._numbers = 0
        self.traffic = Traffic()
        lock = threading.Lock()
        self._to_read, self._came = threading.Condition(lock), threading.Condition(lock)
        self._woken = self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"experts-{number}", daemon=True)
            for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes(self) -> int:
        return self._buffer.num_bytes

    @property
    def read_s(self) -> float:
        """To read an expert, as measured lately."""
        return self._part_s * self._tier.parts

    def holds(self, layer: int, expert: int) -> bool:
        return ExpertKey(layer, expert) in self._slot_of

    def products(self, slot: int) -> tuple[Product, Product]:
        """gate_up and down of what stands there."""
        layer = self._buffer.layer
        return layer.gate_up[slot], layer.down[slot]

    def want(
        self, layer: int, experts: Sequence[int], priority: Priority, owner: Hashable = None
    ) -> Want:
        """Begins to bring in what is missing. owner: whose hints for that layer have had their
        time."""
        with self._to_read:
            self._numbers += 1
            now_s = self._clock()
            want = Want(layer, experts, priority, self._numbers, now_s)
            self._note_ahead(owner, layer, now_s)
            for expert in experts:
                key = ExpertKey(layer, expert)
                self._wants_of[key].append(want)
                if key in self._slot_of:
                    want.ready.add(expert)
                elif key in self._reads:
                    self._reads[key].demanded = True
            self.traffic.hits[layer] += len(want.ready)
            self.traffic.wanted[layer] += len(want.left)
            self._wants.append(want)
            self._wants.sort(key=lambda each: (each.priority, each.number))
            self._give_up_hints()
            self._to_read.notify_all()
        return want

    def take(self, want: Want, pairs: Mapping[int, int], most_pairs: int) -> list[Taken]:
        """Experts that are there and stand side by side in `want`, of no more than so many pairs
        (or one). They stay where they are until they are `done`. Raises ChannelError if one cannot
        be had."""
        if want.error is not None:
            raise want.error
        taken: list[Taken] = []
        left = most_pairs
        with self._to_read:
            for expert, place in want.left.items():
                if expert not in want.ready and not taken:
                    continue
                beside = not taken or place == want.left[taken[-1].expert] + 1
                if expert not in want.ready or not beside or (taken and pairs[expert] > left):
                    break
                key = ExpertKey(want.layer, expert)
                taken.append(Taken(expert, self._slot_of[key]))
                self._pinned.add(key)
                left -= pairs[expert]
        return taken

    def done(self, want: Want, taken: Sequence[Taken]) -> None:
        """They have been computed with."""
        with self._to_read:
            for expert, _ in taken:
                key = ExpertKey(want.layer, expert)
                self._pinned.discard(key)
                self._order.used(key)
                self._forget(want, key)
                if key in self._unused_hints:
                    self._unused_hints.remove(key)
                    self.traffic.used_hint_bytes += self._tier.expert_bytes
            if taken and not want.left:
                self._wants.remove(want)
            self._to_read.notify_all()

    def drop(self, want: Want) -> None:
        """Nothing of it is wanted any more."""
        with self._to_read:
            for expert in list(want.left):
                key = ExpertKey(want.layer, expert)
                self._pinned.discard(key)
                self._forget(want, key)
            if want in self._wants:
                self._wants.remove(want)
            self._give_up_hints()
            self._to_read.notify_all()

    def hint(self, owner: Hashable, layer: int, guesses: Iterable[Guess]) -> None:
        """What `owner` may want there next, in place of what it said before."""
        with self._to_read:
            self._hints[owner, layer] = sorted(guesses, key=lambda guess: -guess.confidence)
            self._hinted_s.setdefault((owner, layer), self._clock())
            self._give_up_hints()
            self._to_read.notify_all()

    def forget_hints(self, owner: Hashable) -> None:
        with self._to_read:
            for key in [key for key in self._hints if key[0] == owner]:
                del self._hints[key]
                self._hinted_s.pop(key, None)
            self._give_up_hints()

    def wait(self, timeout_s: float) -> bool:
        """Until something can go on. Raises ChannelError if what is wanted has not moved for the
        deadline."""
        with self._came:
            if self._can_go_on() or self._woken:
                self._woken = False
                return True
            start_s = self._clock()
            came = self._came.wait_for(lambda: self._can_go_on() or self._woken, timeout_s)
            self._woken = False
            now_s = self._clock()
            if self._wants:
                self.traffic.waited_s += now_s - start_s
            if not came:
                self._check_deadline(now_s)
            return came

    def wake(self) -> None:
        """Ends a `wait`. Called from any thread."""
        with self._came:
            self._woken = True
            self._came.notify_all()

    def check(self) -> None:
        """Raises AssertionError unless each slot is free, being filled, or some expert's."""
        with self._to_read:
            reading = [read.slot for read in self._reads.values()]
            taken = [*self._free, *reading, *self._slot_of.values()]
            assert sorted(taken) == list(range(self.slots)), taken
            assert self._pinned <= set(self._slot_of), self._pinned
            for want in self._wants:
                there = {e for e in want.left if ExpertKey(want.layer, e) in self._slot_of}
                assert want.ready == there, (want.ready, there)

    def close(self) -> None:
        with self._to_read:
            self._closing = True
            self._to_read.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._tier.close()

    # What follows is called with the lock held.

    def _can_go_on(self) -> bool:
        return any(want.can_go_on for want in self._wants)

    def _check_deadline(self, now_s: float) -> None:
        for want in self._wants:
            since_s = max(want.begun_s, self._moved_s)
            if now_s - since_s > self._deadline_s:
                missing = [expert for expert in want.left if expert not in want.ready]
                raise ChannelError(
                    f"experts {missing[:8]} of layer {want.layer} have not come: nothing could be "
                    f"read from {self._tier} for {self._deadline_s:g} s; see channel.deadline_s"
                )

    def _forget(self, want: Want, key: ExpertKey) -> None:
        want.left.pop(key.expert, None)
        want.ready.discard(key.expert)
        wants = self._wants_of[key]
        if want in wants:
            wants.remove(want)
        if not wants:
            del self._wants_of[key]

    def _note_ahead(self, owner: Hashable, layer: int, now_s: float) -> None:
        self._hints.pop((owner, layer), None)
        hinted_s = self._hinted_s.pop((owner, layer), None)
        if hinted_s is not None:
            self._ahead_s = _mean(self._ahead_s, now_s - hinted_s)

    def _give_up_hints(self) -> None:
        """Reads that nobody wants any more, nor may want."""
        hinted = {
            ExpertKey(layer, guess.expert)
            for (_, layer), guesses in self._hints.items()
            for guess in guesses
        }
        for key, read in list(self._reads.items()):
            if key not in self._wants_of and key not in hinted:
                self._cancel(key, read)

    def _cancel(self, key: ExpertKey, read: _Read) -> None:
        read.cancelled = True
        if not read.busy:
            self._end(key, read)

    def _end(self, key: ExpertKey, read: _Read) -> None:
        """It was given up, and nobody is at it any more."""
        del self._reads[key]
        self._free.append(read.slot)
        if read.hinted:
            self.traffic.wasted_hint_bytes += (
                self._tier.expert_bytes * read.done // self._tier.parts
            )

    def _next(self) -> tuple[ExpertKey, _Read] | None:
        """Whose next part is to be read now; None: nobody's."""
        is_missing = False
        for want in self._wants:
            for expert in want.left if want.error is None else ():
                key = ExpertKey(want.layer, expert)
                if key in self._slot_of:
                    continue
                is_missing = True
                read = self._reads.get(key) or self._begin(key, want.priority)
                if read is None:
                    break  # every slot holds what is wanted: some of it is computed first
                if read.next_part < self._tier.parts and not read.cancelled:
                    return key, read
        return None if is_missing else self._next_hint()

    def _begin(self, key: ExpertKey, priority: Priority) -> _Read | None:
        slot = self._slot_for(key.layer, priority)
        if slot is None:
            return None
        read = self._reads[key] = _Read(slot, demanded=True)
        return read

    def _slot_for(self, layer: int, priority: Priority) -> int | None:
        if self._free:
            return self._free.pop()
        for key, read in list(self._reads.items()):
            if not read.busy and not read.cancelled and not self._is_wanted(key, priority):
                self._cancel(key, read)
                return self._free.pop()
        return self._evict(layer, lambda key: self._is_wanted(key, priority))

    def _is_wanted(self, key: ExpertKey, priority: Priority) -> bool:
        """By somebody of that class or a higher one."""
        wants = self._wants_of.get(key, ())
        return any(want.priority <= priority for want in wants)

    def _evict(self, layer: int, is_kept: Callable[[ExpertKey], bool]) -> int | None:
        """The slot of what leaves first; None: nothing can."""
        for key in self._order.leave(layer):
            if key not in self._pinned and not is_kept(key):
                break
        else:
            return None
        self._order.gone(key)
        for want in self._wants_of.get(key, ()):
            want.ready.discard(key.expert)
        if key in self._unused_hints:
            self._unused_hints.remove(key)
            self.traffic.wasted_hint_bytes += self._tier.expert_bytes
        return self._slot_of.pop(key)

    def _next_hint(self) -> tuple[ExpertKey, _Read] | None:
        if not self._hints:
            return None
        begun = {
            key: read for key, read in self._reads.items() if read.hinted and not read.cancelled
        }
        guesses = sorted(
            (
                (-guess.confidence, ExpertKey(layer, guess.expert))
                for (_, layer), several in self._hints.items()
                for guess in several
            ),
        )
        for _, key in guesses:
            read = begun.get(key)
            if read is not None and read.next_part < self._tier.parts:
                return key, read
        if len(begun) >= READERS:
            return None
        hinted = {key for _, key in guesses}
        for doubt, key in guesses:
            if key in self._slot_of or key in self._reads or not self._is_worth_it(-doubt):
                continue
            slot = self._free.pop() if self._free else None
            if slot is None:
                slot = self._evict(key.layer, lambda each: each in hinted or each in self._wants_of)
            if slot is None:
                return None
            read = self._reads[key] = _Read(slot, demanded=False)
            return key, read
        return None

    def _is_worth_it(self, confidence: float) -> bool:
        if not self._ahead_s or not self._part_s:
            return True  # nothing has been measured yet
        return self._pays(confidence, min(self.read_s, self._ahead_s), self._part_s)

    def _run(self) -> None:
        reader = self._tier.reader()
        while True:
            with self._to_read:
                job = None
                while job is None:
                    if self._closing:
                        return
                    job = self._next()
                    if job is None:
                        self._to_read.wait()
                key, read = job
                part, read.next_part, read.busy = read.next_part, read.next_part + 1, read.busy + 1
            start_s, error = self._clock(), None
            try:
                reader.read(key.layer, key.expert, part, self._memory[read.slot])
            except ChannelError as failed:
                error = failed
            except BaseException as failed:  # noqa: BLE001  (handed over to the thread that waits)
                error = ChannelError(
                    f"expert {key.expert} of layer {key.layer}: {type(failed).__name__}: {failed}"
                )
            with self._to_read:
                self._has_read(key, read, error, self._clock() - start_s)

    def _has_read(
        self, key: ExpertKey, read: _Read, error: ChannelError | None, took_s: float
    ) -> None:
        read.busy -= 1
        if error is None:
            read.done += 1
            self._moved_s = self._clock()
            self._part_s = _mean(self._part_s, took_s)
            self.traffic.read_s += took_s
        elif not read.cancelled:
            self._failed(key, read, error)
        if read.cancelled:
            if not read.busy:
                self._end(key, read)
        elif read.done == self._tier.parts:
            self._place(key, read)
        self._to_read.notify_all()

    def _failed(self, key: ExpertKey, read: _Read, error: ChannelError) -> None:
        read.cancelled = True
        self._failures[key] += 1
        if self._failures[key] < _TRIES:
            return
        del self._failures[key]
        for guesses in self._hints.values():
            guesses[:] = [g for g in guesses if g.expert != key.expert]
        for want in self._wants_of.get(key, ()):
            want.error = error
        self._came.notify_all()

    def _place(self, key: ExpertKey, read: _Read) -> None:
        del self._reads[key]
        self._failures.pop(key, None)
        self._slot_of[key] = read.slot
        self._order.placed(key)
        self.traffic.reads += 1
        if read.hinted:
            self._unused_hints.add(key)
        else:
            self.traffic.demand_bytes += self._tier.expert_bytes
        for want in self._wants_of.get(key, ()):
            want.ready.add(key.expert)
        self._came.notify_all()


def _mean(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + _NEWEST * (newest - mean)
