"""A scheduled batch, and its construction: new tokens of sequences, blocks that they fill."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from actors.batching.sequence import BatchBudget, Sequence
from actors.kv.block_manager import BlockManager, BlockPrefix, checkpoint_places
from contracts.clock import monotonic_s
from contracts.requests import Priority
from models.decoder.batch import BlockCopy, SequenceSlice, StateRun
from planner.scheduling.batching import BatchSelection, Phase
from planner.scheduling.fair_queue import FairQueue


class Chunk(NamedTuple):
    """New tokens [start, stop) of a sequence. after: chunks whose blocks it shares."""

    sequence: Sequence
    start: int
    stop: int
    after: frozenset[int]
    copies: tuple[BlockCopy, ...] = ()
    state: StateRun | None = None


class ScheduledBatch(NamedTuple):
    """Chunks that run together.

    sources: blocks with a reference of the batch's own, because chunks copy from them. slots: of
    states, likewise, with the new checkpoints. due_s: earliest due time of a next token. phase: of
    all chunks; None: mixed. formed_s: when it was formed, on the rank's clock.
    """

    number: int
    priority: Priority
    chunks: list[Chunk]
    sources: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    due_s: float = math.inf
    phase: Phase | None = None
    formed_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


def slice_of(chunk: Chunk) -> SequenceSlice:
    """Return a chunk in the model's form."""
    sequence = chunk.sequence
    new = sequence.token_ids[chunk.start : chunk.stop]
    return SequenceSlice(new, chunk.start, sequence.block_table, chunk.copies, chunk.state)


class BatchBlocks:
    """Block providers and copies within a batch, which holds references to `sources`."""

    def __init__(self) -> None:
        self.sources: list[int] = []
        self._provider: dict[int, int] = {}  # block -> chunk that computes in it
        self._copies: dict[int, tuple[BlockCopy, ...]] = {}  # by target block

    def fill(self, block: int, chunk: int) -> None:
        self._provider[block] = chunk

    def copy(self, source: int, block: int, tokens: int) -> tuple[BlockCopy, ...]:
        """Return the copies that bring the first `tokens` slots of `source` into `block`.

        All copies of a layer are one operation, so slots that `source` itself receives by a copy of
        this batch come from the original block.

                    source  | 0 1 2 3 (copied from block 7) | 4 5 6 (its own) |      tokens = 6
                    block   |      from block 7, 0..4       | source, 4..6    |
        """
        copies = [
            BlockCopy(other.source, block, other.first, min(other.last, tokens))
            for other in self._copies.get(source, ())
            if other.first < tokens
        ]
        own = copies[-1].last if copies else 0
        if own < tokens:
            copies.append(BlockCopy(source, block, own, tokens))
        self._copies[block] = tuple(copies)
        self.sources.append(source)
        return self._copies[block]

    def providers(self, blocks: Iterable[int]) -> frozenset[int]:
        """Return the chunks of this batch that compute in `blocks`."""
        return frozenset(self._provider[block] for block in blocks if block in self._provider)


class CachedPrefix(NamedTuple):
    """Cached prefix of a sequence: whole blocks, then the first tokens of one more.

    slot: its recurrent states. shared_blocks: found, and used as far as there are states.
    """

    blocks: list[int]
    head: BlockPrefix | None
    tokens: int
    shared_blocks: int = 0
    slot: int | None = None


def cached_prefix(
    sequence: Sequence, hashes: list[bytes], blocks: BlockManager, batch: int
) -> CachedPrefix:
    """Return the longest cached prefix before the first needed position. hashes: to match."""
    block_tokens = sequence.block_tokens
    matched = blocks.match(hashes, batch=batch)
    if blocks.states is not None:
        found = blocks.states.latest(hashes[: len(matched)])
        whole = found.blocks * block_tokens
        return CachedPrefix(matched[: found.blocks], None, whole, len(matched), found.slot)
    whole = len(matched) * block_tokens
    rest = sequence.token_ids[whole : min(sequence.first_needed, whole + block_tokens)]
    parent = hashes[len(matched) - 1] if matched else sequence.submit.caller.salt
    head = blocks.head(parent, rest, batch=batch)
    return CachedPrefix(matched, head, whole + (head.tokens if head else 0))


class BatchBuilder:
    """Collects chunks. An added chunk has its blocks, and its sequence is in flight."""

    def __init__(
        self, number: int, budget: BatchBudget, blocks: BlockManager, *, whole_prompts: bool
    ) -> None:
        """whole_prompts: never cut a prompt; one longer than a batch runs alone."""
        self.budget = budget
        self.chunks: list[Chunk] = []
        self._number = number
        self._blocks = blocks
        self._whole_prompts = whole_prompts
        self._batch_blocks = BatchBlocks()
        self._slots: list[int] = []

    def build(self, phase: Phase | None) -> ScheduledBatch:
        """Return the batch. phase: of all its chunks; None: mixed."""
        highest = min(chunk.sequence.priority for chunk in self.chunks)
        due_s = min(chunk.sequence.due_s for chunk in self.chunks)
        sources, slots = tuple(self._batch_blocks.sources), tuple(self._slots)
        return ScheduledBatch(
            self._number, highest, self.chunks, sources, slots, due_s, phase, monotonic_s()
        )

    def prefix(self, sequence: Sequence) -> CachedPrefix:
        """Return the longest prefix that is cached, or will be after this batch."""
        hashes = sequence.hashes[: sequence.first_needed // sequence.block_tokens]
        return cached_prefix(sequence, hashes, self._blocks, self._number)

    def start(self, sequence: Sequence) -> bool:
        """Add the first chunk of a sequence. Returns False if blocks or room are lacking."""
        token_budget = self.budget.tokens_for(sequence.owner)
        prefix, states = self.prefix(sequence), self._blocks.states
        if states is not None and not states.can_start(prefix.slot):
            return False
        table = self._allocate(sequence, prefix, token_budget)
        if table is None and prefix.head is not None:  # retry without the block to copy from
            whole = len(prefix.blocks) * sequence.block_tokens
            prefix = CachedPrefix(prefix.blocks, None, whole)
            table = self._allocate(sequence, prefix, token_budget)
        if table is None:
            return False
        sequence.block_table = table
        if states is not None:
            sequence.state_slot = states.start(prefix.slot)
            sequence.shared_blocks = prefix.shared_blocks
            self._slots += [] if prefix.slot is None else [prefix.slot]
        sequence.num_computed = prefix.tokens
        if sequence.num_cached is None:
            sequence.num_cached = prefix.tokens
            if sequence.submit.timed:
                sequence.queued_s = monotonic_s() - sequence.arrived_s
        shared = list(prefix.blocks)
        copies: tuple[BlockCopy, ...] = ()
        if prefix.head is not None:
            source, tokens = prefix.head
            copies = self._batch_blocks.copy(source, table[len(prefix.blocks)], tokens)
            shared += (copied.source for copied in copies)
        stop = self._chunk_end(sequence, prefix.tokens, token_budget)
        after = self._batch_blocks.providers(shared)
        self._add(Chunk(sequence, prefix.tokens, stop, after, copies), prefix.slot)
        return True

    def _state_run(self, chunk: Chunk, source: int | None) -> StateRun | None:
        """Return the states of a chunk, with checkpoints as far as there are slots."""
        sequence, states, saves = chunk.sequence, self._blocks.states, list[tuple[int, int]]()
        if states is None or sequence.state_slot is None:
            return None
        block_tokens = sequence.block_tokens
        ends = sequence.first_needed // block_tokens, sequence.shared_blocks
        for place in checkpoint_places(chunk.start, chunk.stop, ends, block_tokens):
            slot = states.checkpoint(sequence.hashes[place - 1], batch=self._number)
            if slot is not None:
                saves.append((place * block_tokens, slot))
                self._slots.append(slot)
        return StateRun(sequence.state_slot, source, tuple(saves))

    def can_fit(self, sequence: Sequence) -> bool:
        """Return whether the first chunk would fit if there were blocks."""
        start, token_budget = self.prefix(sequence).tokens, self.budget.tokens_for(sequence.owner)
        return (
            not self.chunks
            or self._chunk_end(sequence, start, token_budget) <= start + token_budget
        )

    def extend(self, sequence: Sequence) -> bool:
        """Add the next chunk of a running sequence. Returns False if blocks are lacking."""
        token_budget = self.budget.tokens_for(sequence.owner)
        stop = min(len(sequence.token_ids), sequence.num_computed + token_budget)
        table = self._blocks.take([], sequence.blocks_for(stop) - len(sequence.block_table))
        if table is None:
            return False
        sequence.block_table.extend(table)
        self._add(Chunk(sequence, sequence.num_computed, stop, frozenset()), sequence.state_slot)
        return True

    def _chunk_end(self, sequence: Sequence, start: int, token_budget: int) -> int:
        """Return the end of a sequence's first chunk."""
        tokens = len(sequence.token_ids)
        return tokens if self._whole_prompts else min(tokens, start + token_budget)

    def _allocate(
        self, sequence: Sequence, prefix: CachedPrefix, token_budget: int
    ) -> list[int] | None:
        """Return the block table; None if blocks, or room for a whole prompt, are lacking."""
        stop = self._chunk_end(sequence, prefix.tokens, token_budget)
        if self.chunks and stop > prefix.tokens + token_budget:
            return None
        new_blocks = sequence.blocks_for(stop) - len(prefix.blocks)
        if prefix.head is None:
            return self._blocks.take(prefix.blocks, new_blocks)
        held = [*prefix.blocks, prefix.head.block]
        table = self._blocks.take(held, new_blocks)
        return None if table is None else table[: len(prefix.blocks)] + table[len(held) :]

    def _add(self, chunk: Chunk, state: int | None) -> None:
        """Add a chunk and register the contents of its blocks. state: slot that it starts from."""
        chunk = chunk._replace(state=self._state_run(chunk, state))
        sequence, block_tokens = chunk.sequence, chunk.sequence.block_tokens
        hashes = sequence.hashes
        for place in range(chunk.start // block_tokens, sequence.blocks_for(chunk.stop)):
            first, last = place * block_tokens, (place + 1) * block_tokens
            digest = hashes[place] if last <= chunk.stop else None
            if digest is None and chunk.start >= sequence.prompt_tokens:
                break  # a block under generation: findable once it is full
            self._blocks.register(
                sequence.block_table[place],
                digest,
                sequence.before_block(place),
                sequence.token_ids[first : min(last, chunk.stop)],
                batch=self._number,
            )
            self._batch_blocks.fill(sequence.block_table[place], len(self.chunks))
        sequence.in_flight = True
        sequence.num_computed = chunk.stop
        sequence.last_batch = self._number
        self.chunks.append(chunk)
        self.budget.take(sequence.owner, chunk.stop - chunk.start)


MAX_MATCHED_BLOCKS = 4096  # per forecast, of all prompts together
MAX_HASHED_BLOCKS = 512

Span = tuple[int, int]


def upcoming(
    form: BatchSelection,
    budget: BatchBudget,
    running: Iterable[Sequence],
    waiting: Mapping[Priority, FairQueue[Sequence]],
    held: PrefixEstimator,
) -> list[Span]:
    """Return new tokens [start, stop) per sequence of the next batch of a form, in order.

    Changes `budget` only. Assumes that running sequences continue, that blocks suffice, and ignores
    what sequences of that batch will share.
    """
    found: list[Span] = []

    def add(sequence: Sequence, start: int, length: int) -> None:
        stop = min(length, start + budget.tokens_for(sequence.owner))
        if stop > start:
            found.append((start, stop))
            budget.take(sequence.owner, stop - start)

    continuing = [s for s in running if not s.done and not _is_last_batch(s)]
    for sequence in sorted(continuing, key=lambda s: (s.phase is Phase.PREFILL, s.priority)):
        start = sequence.num_computed
        add(sequence, start, max(len(sequence.token_ids), start + 1))
        if budget.is_full:
            return found
    for priority in form.priorities if form.phase is not Phase.DECODE else ():
        queue = waiting[priority].ahead(lambda s: not budget.tokens_for(s.owner))
        for sequence in itertools.islice(queue, form.starts):
            add(sequence, held.tokens(sequence), len(sequence.token_ids))
            if budget.is_full:
                return found
    return found


class PrefixEstimator:
    """Cached prefixes of waiting prompts, within budgets of blocks to match and to hash."""

    def __init__(self, blocks: BlockManager, batch: int) -> None:
        self._blocks = blocks
        self._batch = batch
        self._match_budget, self._hash_budget = MAX_MATCHED_BLOCKS, MAX_HASHED_BLOCKS

    def tokens(self, sequence: Sequence) -> int:
        known = sequence.hashed_blocks
        wanted = sequence.first_needed // sequence.block_tokens
        count = min(wanted, known + self._hash_budget, self._match_budget)
        hashes = sequence.hash_blocks(count)[:count]
        prefix = cached_prefix(sequence, hashes, self._blocks, self._batch)
        self._hash_budget -= max(0, count - known)
        self._match_budget -= len(prefix.blocks)
        return prefix.tokens


def _is_last_batch(sequence: Sequence) -> bool:
    """Return whether the running batch is known to be the sequence's last."""
    sampling = sequence.submit.sampling
    if not sequence.in_flight or sequence.num_computed < len(sequence.token_ids):
        return False
    return sampling is None or sequence.generated + 1 >= sampling.max_tokens
