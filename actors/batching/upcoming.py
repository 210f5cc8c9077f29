"""A guess at the batch that comes next, made while one runs: for a plan to be there in time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from actors.batching.batch_room import BatchRoom
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from contracts.requests import Priority
from planner.policies.batching import Form, Phase
from planner.policies.turns import Turns

LOOKED_AT_BLOCKS = 4096  # for one guess, of all prompts together
HASHED_BLOCKS = 512

Span = tuple[int, int]


def upcoming(
    form: Form,
    room: BatchRoom,
    running: Iterable[Sequence],
    waiting: Mapping[Priority, Turns[Sequence]],
    held: HeldPrefixes,
) -> list[Span]:
    """New tokens [start, stop) per sequence of a batch of that form, in its order. Changes `room`
    only.

    What runs now is taken to end well, and to generate; blocks are taken to suffice, and what
    sequences of that batch will share among each other is not known yet.
    """
    found: list[Span] = []

    def add(sequence: Sequence, start: int, length: int) -> None:
        stop = min(length, start + room.tokens_for(sequence.owner))
        if stop > start:
            found.append((start, stop))
            room.take(sequence.owner, stop - start)

    going_on = [s for s in running if not s.done and not _ends_now(s)]
    for sequence in sorted(going_on, key=lambda s: (s.phase is Phase.PREFILL, s.priority)):
        start = sequence.num_computed
        add(sequence, start, max(len(sequence.token_ids), start + 1))
        if room.is_full:
            return found
    for priority in form.priorities if form.phase is not Phase.DECODE else ():
        queue = waiting[priority].ahead(lambda s: not room.tokens_for(s.owner))
        for sequence in itertools.islice(queue, form.starts):
            add(sequence, held.tokens(sequence), len(sequence.token_ids))
            if room.is_full:
                return found
    return found


class HeldPrefixes:
    """What blocks hold of prompts that wait, as far as is soon told: beyond so many blocks nothing
    is looked at, and fewer are hashed. (A hash is kept: its sequence needs it to start.)"""

    def __init__(self, blocks: BlockManager, batch: int) -> None:
        self._blocks = blocks
        self._batch = batch
        self._look, self._hash = LOOKED_AT_BLOCKS, HASHED_BLOCKS

    def tokens(self, sequence: Sequence) -> int:
        block_tokens, needed = sequence.block_tokens, sequence.first_needed
        known = sequence.hashed_blocks
        count = min(needed // block_tokens, known + self._hash, self._look)
        hashes = sequence.hash_blocks(count)[:count]
        matched = len(self._blocks.match(hashes, batch=self._batch))
        self._hash -= max(0, count - known)
        self._look -= matched
        whole = matched * block_tokens
        rest = sequence.token_ids[whole : min(needed, whole + block_tokens)]
        parent = hashes[matched - 1] if matched else sequence.submit.caller.salt
        head = self._blocks.head(parent, rest, batch=self._batch)
        return whole + (head.tokens if head else 0)


def _ends_now(sequence: Sequence) -> bool:
    """Whether the batch that runs now is the sequence's last one, as far as that can be known."""
    sampling = sequence.submit.sampling
    if not sequence.in_flight or sequence.num_computed < len(sequence.token_ids):
        return False
    return sampling is None or sequence.generated + 1 >= sampling.max_tokens
