"""A batch while it is being formed: the chunks that are in it, and their blocks.

A sequence starts behind the longest prefix that blocks hold, to the token, computed or about to be.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.batching.batch_room import BatchRoom
from actors.batching.scheduled_batch import Chunk, ScheduledBatch
from actors.batching.sequence import Sequence
from actors.kv.batch_blocks import BatchBlocks
from actors.kv.block_contents import Head
from actors.kv.block_manager import BlockManager
from models.decoder.batch import BlockCopy
from planner.policies.batching import Phase


class Prefix(NamedTuple):
    """What blocks hold of a sequence: whole blocks, then the first tokens of one more."""

    blocks: list[int]
    head: Head | None
    tokens: int


class FormingBatch:
    """A chunk that is in it has its blocks, and its sequence is in flight."""

    def __init__(
        self, number: int, room: BatchRoom, blocks: BlockManager, *, whole_prompts: bool
    ) -> None:
        """whole_prompts: a prompt is never cut; one that is longer than a batch has it alone."""
        self.room = room
        self.chunks: list[Chunk] = []
        self._number = number
        self._blocks = blocks
        self._whole_prompts = whole_prompts
        self._shared = BatchBlocks()

    def formed(self, phase: Phase | None) -> ScheduledBatch:
        """phase: of all that is in it; None: of either."""
        highest = min(chunk.sequence.priority for chunk in self.chunks)
        due_s = min(chunk.sequence.due_s for chunk in self.chunks)
        sources = tuple(self._shared.sources)
        return ScheduledBatch(self._number, highest, self.chunks, sources, due_s, phase)

    def prefix(self, sequence: Sequence) -> Prefix:
        """The longest prefix that blocks hold, or will when this batch has run, of what need not be
        computed in any case."""
        block_tokens, needed = sequence.block_tokens, sequence.first_needed
        hashes = sequence.hashes[: needed // block_tokens]
        blocks = self._blocks.match(hashes, batch=self._number)
        whole = len(blocks) * block_tokens
        rest = sequence.token_ids[whole : min(needed, whole + block_tokens)]
        parent = sequence.before_block(len(blocks))
        head = self._blocks.head(parent, rest, batch=self._number)
        return Prefix(blocks, head, whole + (head.tokens if head else 0))

    def start(self, sequence: Sequence) -> bool:
        """Whether its first chunk is in the batch now: there were blocks, and room for a prompt
        that is not cut."""
        budget = self.room.tokens_for(sequence.owner)
        prefix = self.prefix(sequence)
        table = self._take(sequence, prefix, budget)
        if table is None and prefix.head is not None:  # perhaps because of the block copied from
            whole = len(prefix.blocks) * sequence.block_tokens
            prefix = Prefix(prefix.blocks, None, whole)
            table = self._take(sequence, prefix, budget)
        if table is None:
            return False
        sequence.block_table = table
        sequence.num_computed = prefix.tokens
        if sequence.num_cached is None:
            sequence.num_cached = prefix.tokens
        shared = list(prefix.blocks)
        copies: tuple[BlockCopy, ...] = ()
        if prefix.head is not None:
            source, tokens = prefix.head
            copies = self._shared.copy(source, table[len(prefix.blocks)], tokens)
            shared += (copied.source for copied in copies)
        stop = self._stop(sequence, prefix.tokens, budget)
        after = self._shared.providers(shared)
        self._add(Chunk(sequence, prefix.tokens, stop, after, copies))
        return True

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a first chunk would be in it, if blocks were: else nobody need give way. No: a
        whole prompt, longer than what is left, behind others."""
        start, budget = self.prefix(sequence).tokens, self.room.tokens_for(sequence.owner)
        return not self.chunks or self._stop(sequence, start, budget) <= start + budget

    def extend(self, sequence: Sequence) -> bool:
        """Whether the next chunk of a sequence that runs is in the batch now: there were blocks."""
        budget = self.room.tokens_for(sequence.owner)
        stop = min(len(sequence.token_ids), sequence.num_computed + budget)
        table = self._blocks.take([], sequence.blocks_for(stop) - len(sequence.block_table))
        if table is None:
            return False
        sequence.block_table.extend(table)
        self._add(Chunk(sequence, sequence.num_computed, stop, frozenset()))
        return True

    def _stop(self, sequence: Sequence, start: int, budget: int) -> int:
        """Where the first chunk of a sequence ends."""
        tokens = len(sequence.token_ids)
        return tokens if self._whole_prompts else min(tokens, start + budget)

    def _take(self, sequence: Sequence, prefix: Prefix, budget: int) -> list[int] | None:
        """The block table; None if there are too few blocks, or if a whole prompt is too long for
        what is left of the batch. The block to copy from is referred to as well, by the batch."""
        stop = self._stop(sequence, prefix.tokens, budget)
        if self.chunks and stop > prefix.tokens + budget:
            return None
        fresh = sequence.blocks_for(stop) - len(prefix.blocks)
        if prefix.head is None:
            return self._blocks.take(prefix.blocks, fresh)
        held = [*prefix.blocks, prefix.head.block]
        table = self._blocks.take(held, fresh)
        return None if table is None else table[: len(prefix.blocks)] + table[len(held) :]

    def _add(self, chunk: Chunk) -> None:
        """Says what its blocks will hold."""
        sequence, block_tokens = chunk.sequence, chunk.sequence.block_tokens
        hashes = sequence.hashes
        for place in range(chunk.start // block_tokens, sequence.blocks_for(chunk.stop)):
            first, last = place * block_tokens, (place + 1) * block_tokens
            digest = hashes[place] if last <= chunk.stop else None
            if digest is None and chunk.start >= sequence.prompt_tokens:
                break  # a block that a generation is filling: found once it is full
            self._blocks.register(
                sequence.block_table[place],
                digest,
                sequence.before_block(place),
                sequence.token_ids[first : min(last, chunk.stop)],
                batch=self._number,
            )
            self._shared.fill(sequence.block_table[place], len(self.chunks))
        sequence.in_flight = True
        sequence.num_computed = chunk.stop
        sequence.last_batch = self._number
        self.chunks.append(chunk)
        self.room.take(sequence.owner, chunk.stop - chunk.start)
