"""Continuous batching: which tokens of which sequences run next on an attention rank.

A policy gives the classes and the phase of a batch (planner/scheduling/batching.py). The batch
takes, in this order: one token of each running sequence (decode), LS before BE; then, class by
class, the next chunk of started prompts, then waiting sequences, in turns between API keys and
requests (planner/scheduling/fair_queue.py). A request beside others gets a share (sequence.py).
A prompt longer than the rest of the batch is cut (chunked prefill). batch_builder.py assigns the
blocks.

When blocks run out, the youngest running sequence of the lowest class, preferably of a request
above its share, releases its blocks and waits again; its generated tokens stay. BE also gives way
to waiting LS: first the sequence with the least computed, finally its batch (`preempt_batch`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from actors.batching.batch_builder import BatchBuilder, PrefixEstimator, ScheduledBatch, upcoming
from actors.batching.sequence import (
    BatchBudget,
    Owner,
    Sequence,
    SequenceCounts,
    SequenceKey,
    owner_of,
    share_of,
)
from actors.kv.block_manager import BlockManager
from contracts.config import ScheduleConfig
from contracts.errors import NotFiniteError
from contracts.messages import Submit
from contracts.requests import Priority
from planner.scheduling.batching import ALL, BatchSelection, Phase, WaitingWork
from planner.scheduling.fair_queue import FairQueue


class Scheduler:
    """Scheduler of one rank, owned by its loop thread. A sequence waits, runs, or is gone."""

    def __init__(
        self,
        config: ScheduleConfig,
        blocks: BlockManager,
        *,
        whole_prompts: bool = False,
        on_end: Callable[[Sequence], None] | None = None,
    ) -> None:
        """Create an empty scheduler.

        whole_prompts: never cut a prompt; one longer than a batch runs alone. on_end: receives
        every sequence that leaves.
        """
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
        self.started_total: Counter[Priority] = Counter()  # sequences that left the queue
        self.drop_best_effort: Callable[[], ScheduledBatch | None] = lambda: None
        self.changes = 0  # grows when a sequence arrives, ends, or may run again

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
        """Sequences that no longer wait, in a batch or not."""
        return iter(self._running)

    def count(self, priority: Priority) -> int:
        return self.sequence_counts.total(priority)

    def num_waiting(self, priority: Priority) -> int:
        return len(self._waiting[priority])

    def waiting_of(self, priority: Priority) -> WaitingWork:
        """Return the waiting work of one class. Counts the tokens of all of it."""
        queue = self._waiting[priority]
        return WaitingWork(len(queue), sum(sequence.num_uncomputed for sequence in queue))

    def has(self, key: SequenceKey) -> bool:
        return key in self._by_key

    def has_others(self, client: int, submit: Submit) -> bool:
        """Return whether sequences of the same request wait or run."""
        return self.sequence_counts.count(owner_of(client, submit)) > 0

    def add(self, sequence: Sequence) -> None:
        self.changes += 1
        self._by_key[sequence.key] = sequence
        self.sequence_counts.add(sequence.owner)
        self._enqueue(sequence)

    def cancel(self, key: SequenceKey) -> None:
        """Forget a sequence and free its blocks, now or when the batch that uses them ends."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return
        sequence.done = True
        if not sequence.in_flight:
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence (finished, failed or cancelled) that is in no batch."""
        self.changes += 1
        del self._by_key[sequence.key]
        self.sequence_counts.remove(sequence.owner)
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting[sequence.priority].remove(sequence)
        if isinstance(sequence.failure, NotFiniteError):  # cached K and V may be the cause
            self.blocks.invalidate(sequence.block_table)
            if self.blocks.states is not None:
                self.blocks.states.invalidate_along(sequence.hashes)
        self._drop_blocks(sequence)
        if self._on_end is not None:
            self._on_end(sequence)

    def next_batch(self, form: BatchSelection = ALL) -> ScheduledBatch | None:
        """Return the next batch with its blocks; None if nothing of that form can run."""
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

    def _fill(self, batch: BatchBuilder, form: BatchSelection, reserved_tokens: int) -> None:
        """Fill a batch. reserved_tokens: what running sequences leave to waiting ones."""
        running = [sequence for sequence in self._running if is_of_form(sequence, form)]
        if batch.budget.is_shared:  # a request may not fit: longest idle first
            running = sorted(running, key=attrgetter("last_batch"))
        decoding: defaultdict[Priority, list[Sequence]] = defaultdict(list)
        prompts: defaultdict[Priority, list[Sequence]] = defaultdict(list)
        for sequence in running:
            by_class = prompts if sequence.phase is Phase.PREFILL else decoding
            by_class[sequence.priority].append(sequence)
        for priority in form.priorities:
            self._continue_running(batch, decoding[priority])
        limit = 0 if form.phase is Phase.DECODE else form.starts
        all_started = True
        for priority in form.priorities:
            self._continue_running(batch, prompts[priority])
            batch.budget.reserve_tokens(0)
            if all_started and limit != 0 and len(self._waiting[priority]):
                all_started = self._admit(batch, priority, limit)
            batch.budget.reserve_tokens(reserved_tokens)

    def _fill_by_keys(self, batch: BatchBuilder, keys: tuple[Hashable, ...]) -> None:
        """Fill a batch in the given order. What does not fit is left out."""
        batch.budget.reserve_tokens(0)
        for sequence in [self._by_key[key] for key in keys if key in self._by_key]:  # type: ignore[index]
            if sequence in self._running:
                self._continue_running(batch, [sequence])
            elif sequence.is_ready and batch.budget.tokens_for(sequence.owner):
                self._start(batch, sequence)

    def upcoming(self, forms: Iterable[BatchSelection] = (ALL,)) -> list[list[tuple[int, int]]]:
        """Forecast [start, stop) per sequence of the next batch of each form."""
        held, found = PrefixEstimator(self.blocks, self._batches), []
        for form in forms:
            budget = BatchBudget(self._config, self.sequence_counts, self._batches, form.priorities)
            running = (sequence for sequence in self._running if is_of_form(sequence, form))
            found.append(upcoming(form, budget, running, self._waiting, held))
        return list(filter(None, found))

    def complete(self, batch: ScheduledBatch) -> None:
        """Record that a batch has run; sequences that are done end here."""
        self._end(batch, self.blocks.commit)
        for chunk in batch.chunks:
            if chunk.sequence.done:
                self.remove(chunk.sequence)

    def preempt_batch(self, batch: ScheduledBatch) -> None:
        """Requeue the sequences of a dropped batch, with their generated tokens."""
        self.abandon(batch)
        for chunk in batch.chunks:
            end = self.remove if chunk.sequence.done else self._requeue
            end(chunk.sequence)

    def abandon(self, batch: ScheduledBatch) -> None:
        """Record that a batch failed: none of its blocks can be trusted."""
        self._end(batch, self.blocks.abandon)

    def _end(self, batch: ScheduledBatch, end_blocks: Callable[[int], None]) -> None:
        self.changes += 1
        end_blocks(batch.number)
        self._release(batch.sources, batch.slots, batch.priority)
        for chunk in batch.chunks:
            chunk.sequence.in_flight = False

    def _continue_running(self, batch: BatchBuilder, running: Iterable[Sequence]) -> None:
        for sequence in running:
            if batch.budget.is_full:
                return
            if sequence.in_flight or not sequence.block_table:  # requeued meanwhile
                continue
            if batch.budget.tokens_for(sequence.owner):
                self._try_extend(batch, sequence)

    def _admit(self, batch: BatchBuilder, priority: Priority, limit: int | None) -> bool:
        """Start waiting sequences, at most `limit`; return whether none of the class waits."""
        queue, started = self._waiting[priority], list[Sequence]()
        for sequence in queue.ahead(
            lambda s: not (s.is_ready and batch.budget.tokens_for(s.owner))
        ):
            if len(started) == limit or not self._try_start(batch, sequence):
                break  # keep the order
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
        """Add a first chunk, preempting a lower class if blocks are lacking."""
        while not batch.start(sequence):
            if not batch.can_fit(sequence) or not self._preempt_lower_class(sequence.priority):
                return False
        return True

    def _try_extend(self, batch: BatchBuilder, sequence: Sequence) -> bool:
        """Add a next chunk, preempting others if blocks are lacking."""
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
        """Requeue the idle BE sequence with the least computed, else a BE batch; False if none."""
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
        """Requeue the youngest of requests above their share until the next sequence has blocks."""
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
        """Return the blocks held by each request; shared blocks count for each sequence."""
        blocks_by_owner: Counter[Owner] = Counter()
        for sequence in self._running:
            blocks_by_owner[sequence.owner] += len(sequence.block_table)
        return blocks_by_owner

    def _victim(self, priority: Priority) -> Sequence | None:
        """Return the youngest idle sequence of a class, preferably of a request above its share.

        Never the oldest of the class: two prompts could take each other's blocks forever.
        """
        of_class = [s for s in self._running if s.priority is priority]
        candidates = [sequence for sequence in of_class[1:] if not sequence.in_flight]
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
        slots = () if sequence.state_slot is None else (sequence.state_slot,)
        self._release(sequence.block_table, slots, sequence.priority)
        sequence.block_table, sequence.state_slot = [], None
        sequence.num_computed = 0

    def _release(self, blocks: SequenceOf[int], slots: SequenceOf[int], priority: Priority) -> None:
        is_best_effort = priority is Priority.BE
        self.blocks.release(blocks, best_effort=is_best_effort)
        if self.blocks.states is not None:
            self.blocks.states.release(slots, best_effort=is_best_effort)


def is_of_form(sequence: Sequence, form: BatchSelection) -> bool:
    """Return whether a running sequence may be in a batch of that form."""
    return form.phase in (None, sequence.phase) and sequence.priority in form.priorities
