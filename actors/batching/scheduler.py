"""Continuous batching: which tokens of which sequences run next on an attention rank.

A batch is of the classes and the phase that a policy says (planner/policies/batching.py). It takes,
in this order: one token of each running sequence (decode), first of LS and then of BE; then, class
by class too, the next chunk of those whose prompt is under way, and waiting ones; within a class by
turns between API keys and requests (planner/policies/turns.py). Beside others one request has a
share of it (actors/batching/batch_room.py). A prompt longer than what is left is cut (chunked
prefill).
A sequence starts behind the longest prefix that blocks hold, to the token, computed or about to be.
When blocks run out, the youngest running sequence of the lowest class, of a request that holds many
first, gives its blocks back and waits again; what it has generated stays. BE gives way to LS that
waits as well: the sequence of which least is computed, and in the end its batch (`give_way`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from actors.batching.batch_room import BatchRoom, InPlay, Owner, share_of
from actors.batching.scheduled_batch import Chunk, ScheduledBatch
from actors.batching.sequence import Sequence, SequenceKey
from actors.batching.upcoming import HeldPrefixes, upcoming
from actors.kv.batch_blocks import BatchBlocks
from actors.kv.block_contents import Head
from actors.kv.block_manager import BlockManager
from contracts.config import ScheduleConfig
from contracts.errors import NotFiniteError
from contracts.requests import Priority
from models.decoder.batch import BlockCopy
from planner.policies.batching import ALL, Form, Phase, Waiting
from planner.policies.turns import Turns


class Prefix(NamedTuple):
    """What blocks hold of a sequence: whole blocks, then the first tokens of one more."""

    blocks: list[int]
    head: Head | None
    tokens: int


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
        chunks: list[Chunk] = []
        room = BatchRoom(self._config, self.in_play, number, form.priorities)
        forming = BatchBlocks()
        held_back = 0
        if room.is_shared and self.waiting:
            self._make_way(form.priorities)
            held_back = share_of(self._config.request_share, room.tokens)
            room.hold_back(held_back)
        if form.keys is not None:
            self._fill_as_named(form.keys, chunks, room, forming)
        else:
            self._fill(form, held_back, chunks, room, forming)
        if not chunks:
            return None
        self._batches += 1
        highest = min(chunk.sequence.priority for chunk in chunks)
        due_s = min(chunk.sequence.due_s for chunk in chunks)
        return ScheduledBatch(number, highest, chunks, tuple(forming.sources), due_s, form.phase)

    def _fill(
        self,
        form: Form,
        held_back: int,
        chunks: list[Chunk],
        room: BatchRoom,
        forming: BatchBlocks,
    ) -> None:
        """held_back: tokens that those who run leave to those who wait."""
        running = list(filter(form_of(form), self._running))
        if room.is_shared:  # where not all of a request's fit, those first that waited longest
            running = sorted(running, key=attrgetter("last_batch"))
        goes_on = partial(self._go_on, chunks, room, forming)
        for priority in form.priorities:
            goes_on(s for s in running if not _is_prompt(s) and s.priority is priority)
        most = 0 if form.phase is Phase.DECODE else form.starts
        others_begun = True
        for priority in form.priorities:
            goes_on(s for s in running if _is_prompt(s) and s.priority is priority)
            room.hold_back(0)
            if others_begun and most != 0:
                others_begun = self._admit(chunks, room, forming, priority, most)
            room.hold_back(held_back)

    def _fill_as_named(
        self,
        keys: tuple[Hashable, ...],
        chunks: list[Chunk],
        room: BatchRoom,
        forming: BatchBlocks,
    ) -> None:
        """By somebody who knows an order. What does not fit is left out."""
        room.hold_back(0)
        for sequence in [self._by_key[key] for key in keys if key in self._by_key]:  # type: ignore[index]
            if sequence in self._running:
                self._go_on(chunks, room, forming, [sequence])
            elif room.tokens_for(sequence.owner):
                self._begin(sequence, chunks, room, forming)

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

    def _go_on(
        self,
        chunks: list[Chunk],
        room: BatchRoom,
        forming: BatchBlocks,
        running: Iterable[Sequence],
    ) -> None:
        for sequence in running:
            if room.is_full:
                return
            if sequence.in_flight or not sequence.block_table:  # it has given its blocks back
                continue
            tokens = room.tokens_for(sequence.owner)
            chunk = self._extend(sequence, tokens, len(chunks), forming) if tokens else None
            if chunk is not None:
                chunks.append(chunk)
                room.take(sequence.owner, chunk.stop - chunk.start)

    def _admit(
        self,
        chunks: list[Chunk],
        room: BatchRoom,
        forming: BatchBlocks,
        priority: Priority,
        most: int | None,
    ) -> bool:
        """Whether all of that class that wait have begun, so that a lower one may. most: of
        them begin now."""
        queue, started = self._waiting[priority], list[Sequence]()
        for sequence in queue.ahead(lambda s: not room.tokens_for(s.owner)):
            if len(started) == most or not self._starts(sequence, chunks, room, forming):
                break  # nobody slips past a sequence whose turn it is
            started.append(sequence)
        for sequence in started:
            self._running.append(queue.take(sequence))
        self.begun_total[priority] += len(started)
        return not len(queue)

    def _begin(
        self, sequence: Sequence, chunks: list[Chunk], room: BatchRoom, forming: BatchBlocks
    ) -> None:
        if self._starts(sequence, chunks, room, forming):
            self._running.append(self._waiting[sequence.priority].take(sequence))
            self.begun_total[sequence.priority] += 1

    def _starts(
        self, sequence: Sequence, chunks: list[Chunk], room: BatchRoom, forming: BatchBlocks
    ) -> bool:
        """Whether there are blocks for its first chunk, which then is in the batch."""
        tokens = room.tokens_for(sequence.owner)
        chunk = self._start(sequence, tokens, len(chunks), forming)
        while (
            chunk is None
            and self._has_room(sequence, tokens, len(chunks))
            and self._take_from_below(sequence.priority)
        ):
            chunk = self._start(sequence, tokens, len(chunks), forming)
        if chunk is None:
            return False
        chunks.append(chunk)
        room.take(sequence.owner, chunk.stop - chunk.start)
        return True

    def _prefix(self, sequence: Sequence) -> Prefix:
        """The longest prefix that blocks hold, or will when the batch being formed has run, of what
        need not be computed in any case."""
        block_tokens, needed = sequence.block_tokens, sequence.first_needed
        hashes = sequence.hashes[: needed // block_tokens]
        blocks = self.blocks.match(hashes, batch=self._batches)
        whole = len(blocks) * block_tokens
        rest = sequence.token_ids[whole : min(needed, whole + block_tokens)]
        parent = sequence.before_block(len(blocks))
        head = self.blocks.head(parent, rest, batch=self._batches)
        return Prefix(blocks, head, whole + (head.tokens if head else 0))

    def _start(
        self, sequence: Sequence, budget: int, index: int, forming: BatchBlocks
    ) -> Chunk | None:
        prefix = self._prefix(sequence)
        table = self._take(sequence, prefix, budget, index)
        if table is None and prefix.head is not None:  # perhaps because of the block copied from
            whole = len(prefix.blocks) * sequence.block_tokens
            prefix = Prefix(prefix.blocks, None, whole)
            table = self._take(sequence, prefix, budget, index)
        if table is None:
            return None
        sequence.block_table = table
        sequence.num_computed = prefix.tokens
        if sequence.num_cached is None:
            sequence.num_cached = prefix.tokens
        shared = list(prefix.blocks)
        copies: tuple[BlockCopy, ...] = ()
        if prefix.head is not None:
            source, tokens = prefix.head
            copies = forming.copy(source, table[len(prefix.blocks)], tokens)
            shared += (copied.source for copied in copies)
        stop = self._stop(sequence, prefix.tokens, budget)
        chunk = Chunk(sequence, prefix.tokens, stop, forming.providers(shared), copies)
        return self._book(chunk, index, forming)

    def _stop(self, sequence: Sequence, start: int, budget: int) -> int:
        """Where the first chunk of a sequence ends."""
        tokens = len(sequence.token_ids)
        return tokens if self._whole_prompts else min(tokens, start + budget)

    def _has_room(self, sequence: Sequence, budget: int, index: int) -> bool:
        """Whether what is left of the batch is enough, if blocks were: else nobody need give way.
        No: a whole prompt, longer than that, behind others."""
        start = self._prefix(sequence).tokens
        return index == 0 or self._stop(sequence, start, budget) <= start + budget

    def _take(
        self, sequence: Sequence, prefix: Prefix, budget: int, index: int
    ) -> list[int] | None:
        """The block table; None if there are too few blocks, or if a whole prompt is too long for
        what is left of the batch. The block to copy from is referred to as well, by the batch."""
        stop = self._stop(sequence, prefix.tokens, budget)
        if index > 0 and stop > prefix.tokens + budget:
            return None
        fresh = sequence.blocks_for(stop) - len(prefix.blocks)
        if prefix.head is None:
            return self.blocks.take(prefix.blocks, fresh)
        held = [*prefix.blocks, prefix.head.block]
        table = self.blocks.take(held, fresh)
        return None if table is None else table[: len(prefix.blocks)] + table[len(held) :]

    def _extend(
        self, sequence: Sequence, budget: int, index: int, forming: BatchBlocks
    ) -> Chunk | None:
        stop = min(len(sequence.token_ids), sequence.num_computed + budget)
        fresh = sequence.blocks_for(stop) - len(sequence.block_table)
        table = self.blocks.take([], fresh)
        while table is None:
            if not self._take_from_below(sequence.priority):
                victim = self._victim(sequence.priority)
                if victim is None:
                    return None
                self._requeue(victim)
                if victim is sequence:
                    return None
            table = self.blocks.take([], fresh)
        sequence.block_table.extend(table)
        chunk = Chunk(sequence, sequence.num_computed, stop, frozenset())
        return self._book(chunk, index, forming)

    def _book(self, chunk: Chunk, index: int, forming: BatchBlocks) -> Chunk:
        """Chunk `index` of the batch: says what its blocks will hold."""
        sequence, block_tokens = chunk.sequence, chunk.sequence.block_tokens
        hashes = sequence.hashes
        for place in range(chunk.start // block_tokens, sequence.blocks_for(chunk.stop)):
            first, last = place * block_tokens, (place + 1) * block_tokens
            digest = hashes[place] if last <= chunk.stop else None
            if digest is None and chunk.start >= sequence.prompt_tokens:
                break  # a block that a generation is filling: found once it is full
            self.blocks.register(
                sequence.block_table[place],
                digest,
                sequence.before_block(place),
                sequence.token_ids[first : min(last, chunk.stop)],
                batch=self._batches,
            )
            forming.fill(sequence.block_table[place], index)
        sequence.in_flight = True
        sequence.num_computed = chunk.stop
        sequence.last_batch = self._batches
        return chunk

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

    def _make_way(self, priorities: tuple[Priority, ...]) -> None:
        """Whose turn it is finds blocks, if one request holds more than its share of them: then its
        youngest sequences wait again. Not so many that the other would hold more."""
        first = next(filter(None, (self._waiting[each].peek() for each in priorities)), None)
        if first is None:
            return
        tokens = min(len(first.token_ids), self._config.max_batch_tokens)
        if first.blocks_for(tokens) <= self.blocks.available:
            return
        needed = first.blocks_for(tokens) - len(self._prefix(first).blocks)
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
