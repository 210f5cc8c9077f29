"""Continuous batching: which tokens of which sequences run next on an attention rank.

A batch is of the classes and the phase that a policy says (planner/scheduling/batching.py). It
takes,
in this order: one token of each running sequence (decode), first of LS and then of BE; then, class
by class too, the next chunk of those whose prompt is under way, and waiting ones; within a class by
turns between API keys and requests (planner/scheduling/fair_queue.py). Beside others one request
has a
share of it (actors/batching/batch_budget.py). A prompt longer than what is left is cut (chunked
prefill).
Its blocks are `forming_batch.py`'s business.
When blocks run out, the youngest running sequence of the lowest class, of a request that holds many
first, gives its blocks back and waits again; what it has generated stays. BE gives way to LS that
waits as well: the sequence of which least is computed, and in the end its batch (`preempt_batch`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from actors.batching.batch_budget import BatchBudget, Owner, SequenceCounts, share_of
from actors.batching.batch_builder import BatchBuilder
from actors.batching.batch_forecast import PrefixEstimator, upcoming
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence, SequenceKey
from actors.kv.block_manager import BlockManager
from contracts.config import ScheduleConfig
from contracts.errors import NotFiniteError
from contracts.requests import Priority
from planner.scheduling.batching import ALL, Form, Phase, WaitingWork
from planner.scheduling.fair_queue import FairQueue


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
        self.sequence_counts = SequenceCounts()
        self._waiting: dict[Priority, FairQueue[Sequence]] = {p: FairQueue() for p in Priority}
        self._running: list[Sequence] = []
        self._by_key: dict[SequenceKey, Sequence] = {}
        self._batches = 0
        self.requeued_total = 0
        self.started_total: Counter[Priority] = Counter()  # that have waited, and no longer do
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
    def started(self) -> Iterable[Sequence]:
        """Those that no longer wait, in a batch or not."""
        return iter(self._running)

    def count(self, priority: Priority) -> int:
        """Sequences of one class."""
        return self.sequence_counts.total(priority)

    def num_waiting(self, priority: Priority) -> int:
        return len(self._waiting[priority])

    def waiting_of(self, priority: Priority) -> WaitingWork:
        """Those of one class; their tokens are counted anew."""
        queue = self._waiting[priority]
        return WaitingWork(len(queue), sum(sequence.num_uncomputed for sequence in queue))

    def has(self, key: SequenceKey) -> bool:
        return key in self._by_key

    def add(self, sequence: Sequence) -> None:
        self.changes += 1
        self._by_key[sequence.key] = sequence
        self.sequence_counts.add(sequence.owner)
        self._enqueue(sequence)

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
        self.sequence_counts.remove(sequence.owner)
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting[sequence.priority].remove(sequence)
        if isinstance(sequence.failure, NotFiniteError):  # what gave it might be K and V kept here
            self.blocks.invalidate(sequence.block_table)
        self._drop_blocks(sequence)
        if self._on_end is not None:
            self._on_end(sequence)

    def next_batch(self, form: Form = ALL) -> ScheduledBatch | None:
        """The next batch, its blocks allocated; None if nothing of that form can run."""
        number = self._batches
        budget = BatchBudget(self._config, self.sequence_counts, number, form.priorities)
        batch = BatchBuilder(number, budget, self.blocks, whole_prompts=self._whole_prompts)
        reserved_tokens = 0
        if budget.is_shared and self.waiting:
            self._free_blocks_for_waiting(batch, form.priorities)
            reserved_tokens = share_of(self._config.request_share, budget.tokens)
            budget.reserve_tokens(reserved_tokens)
        if form.keys is not None:
            self._fill_by_keys(batch, form.keys)
        else:
            self._fill(batch, form, reserved_tokens)
        if not batch.chunks:
            return None
        self._batches += 1
        return batch.build(form.phase)

    def _fill(self, batch: BatchBuilder, form: Form, reserved_tokens: int) -> None:
        """held_back: tokens that those who run leave to those who wait."""
        running = list(filter(form_filter(form), self._running))
        if (
            batch.budget.is_shared
        ):  # where not all fit of a request, those first that waited longest
            running = sorted(running, key=attrgetter("last_batch"))
        for priority in form.priorities:
            decoding = (s for s in running if not _is_prompt(s) and s.priority is priority)
            self._continue_running(batch, decoding)
        limit = 0 if form.phase is Phase.DECODE else form.starts
        all_started = True
        for priority in form.priorities:
            self._continue_running(
                batch, (s for s in running if _is_prompt(s) and s.priority is priority)
            )
            batch.budget.reserve_tokens(0)
            if all_started and limit != 0:
                all_started = self._admit(batch, priority, limit)
            batch.budget.reserve_tokens(reserved_tokens)

    def _fill_by_keys(self, batch: BatchBuilder, keys: tuple[Hashable, ...]) -> None:
        """By somebody who knows an order. What does not fit is left out."""
        batch.budget.reserve_tokens(0)
        for sequence in [self._by_key[key] for key in keys if key in self._by_key]:  # type: ignore[index]
            if sequence in self._running:
                self._continue_running(batch, [sequence])
            elif batch.budget.tokens_for(sequence.owner):
                self._start(batch, sequence)

    def upcoming(self, forms: Iterable[Form] = (ALL,)) -> list[list[tuple[int, int]]]:
        """Of the batches of those forms that would come next, if there is anything of them, new
        tokens [start, stop) per sequence, in their order: guesses, made while a batch runs
        (actors/batching/batch_forecast.py). Changes nothing."""
        held, found = PrefixEstimator(self.blocks, self._batches), []
        for form in forms:
            budget = BatchBudget(self._config, self.sequence_counts, self._batches, form.priorities)
            running = filter(form_filter(form), self._running)
            found.append(upcoming(form, budget, running, self._waiting, held))
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

    def preempt_batch(self, batch: ScheduledBatch) -> None:
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

    def _continue_running(self, batch: BatchBuilder, running: Iterable[Sequence]) -> None:
        for sequence in running:
            if batch.budget.is_full:
                return
            if sequence.in_flight or not sequence.block_table:  # it has given its blocks back
                continue
            if batch.budget.tokens_for(sequence.owner):
                self._try_extend(batch, sequence)

    def _admit(self, batch: BatchBuilder, priority: Priority, limit: int | None) -> bool:
        """Whether all of that class that wait have begun, so that a lower one may. most: of
        them begin now."""
        queue, started = self._waiting[priority], list[Sequence]()
        for sequence in queue.ahead(lambda s: not batch.budget.tokens_for(s.owner)):
            if len(started) == limit or not self._try_start(batch, sequence):
                break  # nobody slips past a sequence whose turn it is
            started.append(sequence)
        for sequence in started:
            self._running.append(queue.take(sequence))
        self.started_total[priority] += len(started)
        return not len(queue)

    def _start(self, batch: BatchBuilder, sequence: Sequence) -> None:
        if self._try_start(batch, sequence):
            self._running.append(self._waiting[sequence.priority].take(sequence))
            self.started_total[sequence.priority] += 1

    def _try_start(self, batch: BatchBuilder, sequence: Sequence) -> bool:
        """Whether there are blocks for its first chunk, which then is in the batch."""
        while not batch.start(sequence):
            if not batch.can_fit(sequence) or not self._preempt_lower_class(sequence.priority):
                return False
        return True

    def _try_extend(self, batch: BatchBuilder, sequence: Sequence) -> bool:
        """Whether there are blocks for its next chunk, which then is in the batch."""
        while not batch.extend(sequence):
            if not self._preempt_lower_class(sequence.priority):
                victim = self._victim(sequence.priority)
                if victim is None:
                    return False
                self._requeue(victim)
                if victim is sequence:
                    return False
        return True

    def _preempt_lower_class(self, priority: Priority) -> bool:
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
            self.preempt_batch(batch)
        return batch is not None

    def _free_blocks_for_waiting(
        self, batch: BatchBuilder, priorities: tuple[Priority, ...]
    ) -> None:
        """Whose turn it is finds blocks, if one request holds more than its share of them: then its
        youngest sequences wait again. Not so many that the other would hold more."""
        first = next(filter(None, (self._waiting[each].peek() for each in priorities)), None)
        if first is None:
            return
        tokens = min(len(first.token_ids), self._config.max_batch_tokens)
        if first.blocks_for(tokens) <= self.blocks.available:
            return
        needed = first.blocks_for(tokens) - len(batch.prefix(first).blocks)
        blocks_by_owner = self._blocks_held()
        limit = share_of(self._config.request_share, self.blocks.num_blocks)
        for sequence in [s for s in reversed(self._running) if s.priority >= first.priority]:
            owner = sequence.owner
            left = blocks_by_owner[owner] - len(sequence.block_table)
            if needed <= self.blocks.available:
                return
            if left >= max(limit, blocks_by_owner[first.owner] + needed) and not sequence.in_flight:
                blocks_by_owner[owner] = left
                self._requeue(sequence)

    def _blocks_held(self) -> Counter[Owner]:
        """By each request; a block that several of its sequences share counts for each."""
        blocks_by_owner: Counter[Owner] = Counter()
        for sequence in self._running:
            blocks_by_owner[sequence.owner] += len(sequence.block_table)
        return blocks_by_owner

    def _victim(self, priority: Priority) -> Sequence | None:
        """The youngest idle sequence of that class; of a request that holds more than its share of
        the blocks, if there is one."""
        candidates = [s for s in self._running if not s.in_flight and s.priority is priority]
        if not candidates:
            return None
        blocks_by_owner = self._blocks_held()
        limit = share_of(self._config.request_share, self.blocks.num_blocks)
        over_share = [
            sequence for sequence in candidates if blocks_by_owner[sequence.owner] > limit
        ]
        return (over_share or candidates)[-1]

    def _requeue(self, sequence: Sequence) -> None:
        self.requeued_total += 1
        self.changes += 1
        self._running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.scored.clear()
        self._enqueue(sequence, again=True)

    def _enqueue(self, sequence: Sequence, *, again: bool = False) -> None:
        owner, cost = sequence.owner, len(sequence.token_ids)
        queue = self._waiting[sequence.priority]
        queue.push(sequence, owner.tenant, owner.request, cost=cost, again=again)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self._release(sequence.block_table, sequence.priority)
        sequence.block_table = []
        sequence.num_computed = 0

    def _release(self, blocks: SequenceOf[int], priority: Priority) -> None:
        self.blocks.release(blocks, best_effort=priority is Priority.BE)


def form_filter(form: Form) -> Callable[[Sequence], bool]:
    """Whether a sequence belongs into a batch of that form."""

    def belongs(sequence: Sequence) -> bool:
        return sequence.priority in form.priorities and form.phase in (None, sequence.phase)

    return belongs


def _is_prompt(sequence: Sequence) -> bool:
    return sequence.num_uncomputed > 1
