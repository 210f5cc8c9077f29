"""Continuous batching: which tokens of which sequences run next on an attention rank.

A batch is of the classes and the phase that a policy says (planner/policies/batching.py). It takes,
in this order: one token of each running sequence (decode), first of LS and then of BE; then, class
by class too, the next chunk of those whose prompt is under way, and waiting ones; within a class by
turns between API keys and requests (planner/policies/turns.py). Beside others one request has a
share of it (actors/batching/batch_room.py). A prompt longer than what is left is cut (chunked
prefill).
Its blocks are `forming_batch.py`'s business.
When blocks run out, the youngest running sequence of the lowest class, of a request that holds many
first, gives its blocks back and waits again; what it has generated stays. BE gives way to LS that
waits as well: the sequence of which least is computed, and in the end its batch (`give_way`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from actors.batching.batch_room import BatchRoom, InPlay, Owner, share_of
from actors.batching.forming_batch import FormingBatch
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence, SequenceKey
from actors.batching.upcoming import HeldPrefixes, upcoming
from actors.kv.block_manager import BlockManager
from contracts.config import ScheduleConfig
from contracts.errors import NotFiniteError
from contracts.requests import Priority
from planner.policies.batching import ALL, Form, Phase, Waiting
from planner.policies.turns import Turns


class Scheduler:
    """Owned by the worker's loop thread. A sequence is waiting, running, or gone."""

    def __init__(
        self,
        config: ScheduleConfig,
        blocks: BlockManager,
        *,
        whole_prompts: bool = False,
        on_end: Callable[[Sequence], None] | None = None,
    ) -> None:
        """whole_prompts: a prompt is never cut; one that is longer than a batch runs as a batch of
        its own. on_end: hears of every sequence that has gone, for whatever reason."""
        self._config = config
        self.blocks = blocks
        self._whole_prompts = whole_prompts
        self._on_end = on_end
        self.in_play = InPlay()
        self._waiting: dict[Priority, Turns[Sequence]] = {p: Turns() for p in Priority}
        self._running: list[Sequence] = []
        self._by_key: dict[SequenceKey, Sequence] = {}
        self._batches = 0
        self.requeued_total = 0
        self.begun_total: Counter[Priority] = Counter()  # that have waited, and no longer do
        self.drop_best_effort: Callable[[], ScheduledBatch | None] = lambda: None
        self.changes = 0  # grows when a sequence comes, goes, or is free to run again

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def waiting(self) -> int:
        return sum(map(self.num_waiting, Priority))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._by_key.values())

    @property
    def begun(self) -> Iterable[Sequence]:
        """Those that no longer wait, in a batch or not."""
        return iter(self._running)

    def count(self, priority: Priority) -> int:
        """Sequences of one class."""
        return self.in_play.total(priority)

    def num_waiting(self, priority: Priority) -> int:
        return len(self._waiting[priority])

    def waiting_of(self, priority: Priority) -> Waiting:
        """Those of one class; their tokens are counted anew."""
        queue = self._waiting[priority]
        return Waiting(len(queue), sum(sequence.num_uncomputed for sequence in queue))

    def has(self, key: SequenceKey) -> bool:
        return key in self._by_key

    def add(self, sequence: Sequence) -> None:
        self.changes += 1
        self._by_key[sequence.key] = sequence
        self.in_play.add(sequence.owner)
        self._line_up(sequence)

    def cancel(self, key: SequenceKey) -> None:
        """Forgets a sequence and frees its blocks: now, or when the batch that uses them ends."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return
        sequence.done = True
        if not sequence.in_flight:
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence (finished, failed or cancelled) that is in no batch."""
        self.changes += 1
        del self._by_key[sequence.key]
        self.in_play.remove(sequence.owner)
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting[sequence.priority].remove(sequence)
        if isinstance(sequence.failure, NotFiniteError):  # what gave it might be K and V kept here
            self.blocks.distrust(sequence.block_table)
        self._drop_blocks(sequence)
        if self._on_end is not None:
            self._on_end(sequence)

    def next_batch(self, form: Form = ALL) -> ScheduledBatch | None:
        """The next batch, its blocks allocated; None if nothing of that form can run."""
        number = self._batches
        room = BatchRoom(self._config, self.in_play, number, form.priorities)
        batch = FormingBatch(number, room, self.blocks, whole_prompts=self._whole_prompts)
        held_back = 0
        if room.is_shared and self.waiting:
            self._make_way(batch, form.priorities)
            held_back = share_of(self._config.request_share, room.tokens)
            room.hold_back(held_back)
        if form.keys is not None:
            self._fill_as_named(batch, form.keys)
        else:
            self._fill(batch, form, held_back)
        if not batch.chunks:
            return None
        self._batches += 1
        return batch.formed(form.phase)

    def _fill(self, batch: FormingBatch, form: Form, held_back: int) -> None:
        """held_back: tokens that those who run leave to those who wait."""
        running = list(filter(form_of(form), self._running))
        if batch.room.is_shared:  # where not all fit of a request, those first that waited longest
            running = sorted(running, key=attrgetter("last_batch"))
        for priority in form.priorities:
            going_on = (s for s in running if not _is_prompt(s) and s.priority is priority)
            self._go_on(batch, going_on)
        most = 0 if form.phase is Phase.DECODE else form.starts
        others_begun = True
        for priority in form.priorities:
            self._go_on(batch, (s for s in running if _is_prompt(s) and s.priority is priority))
            batch.room.hold_back(0)
            if others_begun and most != 0:
                others_begun = self._admit(batch, priority, most)
            batch.room.hold_back(held_back)

    def _fill_as_named(self, batch: FormingBatch, keys: tuple[Hashable, ...]) -> None:
        """By somebody who knows an order. What does not fit is left out."""
        batch.room.hold_back(0)
        for sequence in [self._by_key[key] for key in keys if key in self._by_key]:  # type: ignore[index]
            if sequence in self._running:
                self._go_on(batch, [sequence])
            elif batch.room.tokens_for(sequence.owner):
                self._begin(batch, sequence)

    def upcoming(self, forms: Iterable[Form] = (ALL,)) -> list[list[tuple[int, int]]]:
        """Of the batches of those forms that would come next, if there is anything of them, new
        tokens [start, stop) per sequence, in their order: guesses, made while a batch runs
        (actors/batching/upcoming.py). Changes nothing."""
        held, found = HeldPrefixes(self.blocks, self._batches), []
        for form in forms:
            room = BatchRoom(self._config, self.in_play, self._batches, form.priorities)
            running = filter(form_of(form), self._running)
            found.append(upcoming(form, room, running, self._waiting, held))
        return list(filter(None, found))

    def complete(self, batch: ScheduledBatch) -> None:
        """The batch has run: its tokens are in the pool. Sequences that are done end here."""
        self.changes += 1
        self.blocks.commit(batch.number)
        self._release(batch.sources, batch.priority)
        for chunk in batch.chunks:
            chunk.sequence.in_flight = False
            if chunk.sequence.done:
                self.remove(chunk.sequence)

    def give_way(self, batch: ScheduledBatch) -> None:
        """The batch was dropped for others: its sequences wait again, with what they have
        generated."""
        self.abandon(batch)
        for chunk in batch.chunks:
            if chunk.sequence.done:
                self.remove(chunk.sequence)
            else:
                self._requeue(chunk.sequence)

    def abandon(self, batch: ScheduledBatch) -> None:
        """The batch failed; none of its blocks can be trusted."""
        self.changes += 1
        self.blocks.abandon(batch.number)
        self._release(batch.sources, batch.priority)
        for chunk in batch.chunks:
            chunk.sequence.in_flight = False

    def _go_on(self, batch: FormingBatch, running: Iterable[Sequence]) -> None:
        for sequence in running:
            if batch.room.is_full:
                return
            if sequence.in_flight or not sequence.block_table:  # it has given its blocks back
                continue
            if batch.room.tokens_for(sequence.owner):
                self._extend(batch, sequence)

    def _admit(self, batch: FormingBatch, priority: Priority, most: int | None) -> bool:
        """Whether all of that class that wait have begun, so that a lower one may. most: of
        them begin now."""
        queue, started = self._waiting[priority], list[Sequence]()
        for sequence in queue.ahead(lambda s: not batch.room.tokens_for(s.owner)):
            if len(started) == most or not self._starts(batch, sequence):
                break  # nobody slips past a sequence whose turn it is
            started.append(sequence)
        for sequence in started:
            self._running.append(queue.take(sequence))
        self.begun_total[priority] += len(started)
        return not len(queue)

    def _begin(self, batch: FormingBatch, sequence: Sequence) -> None:
        if self._starts(batch, sequence):
            self._running.append(self._waiting[sequence.priority].take(sequence))
            self.begun_total[sequence.priority] += 1

    def _starts(self, batch: FormingBatch, sequence: Sequence) -> bool:
        """Whether there are blocks for its first chunk, which then is in the batch."""
        while not batch.start(sequence):
            if not batch.has_room(sequence) or not self._take_from_below(sequence.priority):
                return False
        return True

    def _extend(self, batch: FormingBatch, sequence: Sequence) -> bool:
        """Whether there are blocks for its next chunk, which then is in the batch."""
        while not batch.extend(sequence):
            if not self._take_from_below(sequence.priority):
                victim = self._victim(sequence.priority)
                if victim is None:
                    return False
                self._requeue(victim)
                if victim is sequence:
                    return False
        return True

    def _take_from_below(self, priority: Priority) -> bool:
        """Has an idle BE sequence wait again, that of which least is computed (what it gives up is
        found again as far as the cache keeps it); if there is none, a batch of them that runs.
        False: there is nothing below that class."""
        if priority is not Priority.LS:
            return False
        idle = [s for s in self._running if s.priority > priority and not s.in_flight]
        if idle:
            self._requeue(min(idle, key=attrgetter("num_computed")))
            return True
        batch = self.drop_best_effort()
        if batch is not None:
            self.give_way(batch)
        return batch is not None

    def _make_way(self, batch: FormingBatch, priorities: tuple[Priority, ...]) -> None:
        """Whose turn it is finds blocks, if one request holds more than its share of them: then its
        youngest sequences wait again. Not so many that the other would hold more."""
        first = next(filter(None, (self._waiting[each].peek() for each in priorities)), None)
        if first is None:
            return
        tokens = min(len(first.token_ids), self._config.max_batch_tokens)
        if first.blocks_for(tokens) <= self.blocks.available:
            return
        needed = first.blocks_for(tokens) - len(batch.prefix(first).blocks)
        holds = self._blocks_held()
        most = share_of(self._config.request_share, self.blocks.num_blocks)
        for sequence in [s for s in reversed(self._running) if s.priority >= first.priority]:
            owner = sequence.owner
            left = holds[owner] - len(sequence.block_table)
            if needed <= self.blocks.available:
                return
            if left >= max(most, holds[first.owner] + needed) and not sequence.in_flight:
                holds[owner] = left
                self._requeue(sequence)

    def _blocks_held(self) -> Counter[Owner]:
        """By each request; a block that several of its sequences share counts for each."""
        holds: Counter[Owner] = Counter()
        for sequence in self._running:
            holds[sequence.owner] += len(sequence.block_table)
        return holds

    def _victim(self, priority: Priority) -> Sequence | None:
        """The youngest idle sequence of that class; of a request that holds more than its share of
        the blocks, if there is one."""
        candidates = [s for s in self._running if not s.in_flight and s.priority is priority]
        if not candidates:
            return None
        holds = self._blocks_held()
        most = share_of(self._config.request_share, self.blocks.num_blocks)
        greedy = [sequence for sequence in candidates if holds[sequence.owner] > most]
        return (greedy or candidates)[-1]

    def _requeue(self, sequence: Sequence) -> None:
        self.requeued_total += 1
        self.changes += 1
        self._running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.scored.clear()
        self._line_up(sequence, again=True)

    def _line_up(self, sequence: Sequence, *, again: bool = False) -> None:
        owner, cost = sequence.owner, len(sequence.token_ids)
        queue = self._waiting[sequence.priority]
        queue.push(sequence, owner.tenant, owner.request, cost=cost, again=again)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self._release(sequence.block_table, sequence.priority)
        sequence.block_table = []
        sequence.num_computed = 0

    def _release(self, blocks: SequenceOf[int], priority: Priority) -> None:
        self.blocks.release(blocks, best_effort=priority is Priority.BE)


def form_of(form: Form) -> Callable[[Sequence], bool]:
    """Whether a sequence belongs into a batch of that form."""

    def belongs(sequence: Sequence) -> bool:
        return sequence.priority in form.priorities and form.phase in (None, sequence.phase)

    return belongs


def _is_prompt(sequence: Sequence) -> bool:
    return sequence.num_uncomputed > 1
