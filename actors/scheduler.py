"""Continuous batching: which tokens of which sequences run next on an attention rank.

A batch takes, in this order: one token of each running sequence (decode), the next chunk of those
whose prompt is under way, then waiting sequences, LS before BE. A prompt longer than what is left
of `max_batch_tokens` is cut (chunked prefill). A sequence starts behind the longest prefix that
blocks hold, to the token, computed or about to be. When blocks run out, the youngest running
sequence of the lowest class gives its blocks back and waits again; what it has generated stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from actors.batch_blocks import BatchBlocks
from actors.block_contents import Head
from actors.block_manager import BlockManager
from actors.scheduled_batch import Chunk, ScheduledBatch
from actors.sequence import Sequence, SequenceKey
from contracts.config import ScheduleConfig
from contracts.requests import Priority
from models.batch import BlockCopy


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
        self._waiting: dict[Priority, deque[Sequence]] = {p: deque() for p in Priority}
        self._running: list[Sequence] = []
        self._by_key: dict[SequenceKey, Sequence] = {}
        self._batches = 0
        self.requeued_total = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._by_key.values())

    def has(self, key: SequenceKey) -> bool:
        return key in self._by_key

    def add(self, sequence: Sequence) -> None:
        self._by_key[sequence.key] = sequence
        self._waiting[sequence.priority].append(sequence)

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
        del self._by_key[sequence.key]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting[sequence.priority].remove(sequence)
        self._drop_blocks(sequence)
        if self._on_end is not None:
            self._on_end(sequence)

    def next_batch(self) -> ScheduledBatch | None:
        """The next batch, its blocks allocated; None if nothing can run."""
        number = self._batches
        chunks: list[Chunk] = []
        budget = self._config.max_batch_tokens
        forming = BatchBlocks()
        for sequence in sorted(self._running, key=lambda s: s.num_uncomputed > 1):
            if budget == 0 or len(chunks) == self._config.max_batch_sequences:
                break
            if sequence.in_flight or sequence not in self._running:
                continue
            chunk = self._extend(sequence, budget, len(chunks), forming)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
        self._admit(chunks, budget, forming)
        if not chunks:
            return None
        self._batches += 1
        priority = min(chunk.sequence.priority for chunk in chunks)
        return ScheduledBatch(number, priority, chunks, tuple(forming.sources))

    def upcoming(self) -> list[tuple[int, int]]:
        """New tokens [start, stop) per sequence of the batch that would come next, in its order: a
        guess, made while a batch runs. Changes nothing.

        What runs now is taken to end well, and to generate; blocks are taken to suffice, and what
        sequences of that batch will share among each other is not known yet.
        """
        budget, most = self._config.max_batch_tokens, self._config.max_batch_sequences
        found: list[tuple[int, int]] = []
        going_on = [s for s in self._running if not s.done and not _ends_now(s)]
        for sequence in sorted(going_on, key=lambda s: s.num_uncomputed > 1):
            length = max(len(sequence.token_ids), sequence.num_computed + 1)
            found.append((sequence.num_computed, min(length, sequence.num_computed + budget)))
            budget -= found[-1][1] - found[-1][0]
            if budget == 0 or len(found) == most:
                return found
        for sequence in (s for priority in Priority for s in self._waiting[priority]):
            start = self._prefix(sequence).tokens
            found.append((start, min(len(sequence.token_ids), start + budget)))
            budget -= found[-1][1] - found[-1][0]
            if budget == 0 or len(found) == most:
                return found
        return found

    def complete(self, batch: ScheduledBatch) -> None:
        """The batch has run: its tokens are in the pool. Sequences that are done end here."""
        self.blocks.commit(batch.number)
        self.blocks.release(batch.sources)
        for chunk in batch.chunks:
            chunk.sequence.in_flight = False
            if chunk.sequence.done:
                self.remove(chunk.sequence)

    def abandon(self, batch: ScheduledBatch) -> None:
        """The batch failed; none of its blocks can be trusted."""
        self.blocks.abandon(batch.number)
        self.blocks.release(batch.sources)
        for chunk in batch.chunks:
            chunk.sequence.in_flight = False

    def _admit(self, chunks: list[Chunk], budget: int, forming: BatchBlocks) -> None:
        for priority in Priority:
            queue = self._waiting[priority]
            while queue and budget > 0 and len(chunks) < self._config.max_batch_sequences:
                chunk = self._start(queue[0], budget, len(chunks), forming)
                if chunk is None:
                    return  # first come, first served: nobody slips past a sequence that waits
                self._running.append(queue.popleft())
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start

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
            victim = self._victim()
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
        return chunk

    def _victim(self) -> Sequence | None:
        """The youngest idle sequence of the lowest class that runs."""
        idle = [sequence for sequence in self._running if not sequence.in_flight]
        return max(reversed(idle), key=lambda s: s.priority, default=None)

    def _requeue(self, sequence: Sequence) -> None:
        self.requeued_total += 1
        self._running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.scored.clear()
        self._waiting[sequence.priority].appendleft(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0


def _ends_now(sequence: Sequence) -> bool:
    """Whether the batch that runs now is the sequence's last one, as far as that can be known."""
    sampling = sequence.submit.sampling
    if not sequence.in_flight or sequence.num_computed < len(sequence.token_ids):
        return False
    return sampling is None or sequence.generated + 1 >= sampling.max_tokens
