"""Slots of recurrent states, which layers have in place of K and V.

A sequence that has started owns one slot, whose states change with every token. A prefix is found
by a *checkpoint*: a copy of the states at the end of a block, in a slot of its own. A sequence
makes them at the end of its prompt, where it leaves other sequences' blocks, and each
CHECKPOINT_TOKENS tokens. A preempted sequence continues from the last one.

    blocks        | A | B | C | D |          of a cached prompt
    checkpoints           2       4          hits: two or four blocks
    next prompt   | A | B | C | x            hit: two; makes a checkpoint at three
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from actors.kv.block_manager import BlockManager

CHECKPOINT_TOKENS = 2048
_NO_BATCH = -1


class PrefixStates(NamedTuple):
    """States after the first `blocks` blocks of a sequence; None: zeros."""

    blocks: int
    slot: int | None


class StateSlots(BlockManager):
    """A block manager whose blocks are slots, found by the hash of the last block before them."""

    def __init__(self, num_slots: int, *, prefix_cache: bool = True) -> None:
        super().__init__(num_slots, prefix_cache=prefix_cache, share_partial=False)

    def latest(self, hashes: Sequence[bytes]) -> PrefixStates:
        """Return the last checkpoint of a complete batch along a sequence's hashes."""
        for blocks in range(len(hashes), 0, -1):
            found = self.match(hashes[blocks - 1 : blocks], batch=_NO_BATCH)
            if found:
                return PrefixStates(blocks, found[0])
        return PrefixStates(0, None)

    def can_start(self, source: int | None) -> bool:
        """Return whether `start` has a slot beside `source`."""
        is_cached = source is not None and self._references[source] == 0
        return self.available > is_cached

    def start(self, source: int | None) -> int:
        """Return a new slot, with another reference to `source`."""
        taken = self.take([] if source is None else [source], 1)
        assert taken is not None
        return taken[-1]

    def checkpoint(self, digest: bytes, *, batch: int) -> int | None:
        """Return a slot for the states after a block; None if it has one, or to save memory."""
        if (
            not self._prefix_cache
            or digest in self._block_of
            or 2 * self.available <= self.num_blocks
        ):
            return None
        slot = self._allocate()
        self.register(slot, digest, digest, (), batch=batch)
        return slot

    def invalidate_along(self, hashes: Iterable[bytes]) -> None:
        """Make the checkpoints of a sequence unfindable."""
        self.invalidate([self._block_of[digest] for digest in hashes if digest in self._block_of])


def checkpoint_places(start: int, stop: int, ends: Iterable[int], block_tokens: int) -> list[int]:
    """Return the blocks after which tokens [start, stop) make checkpoints. ends: such blocks."""
    every = max(1, CHECKPOINT_TOKENS // block_tokens)
    first, last = start // block_tokens + 1, stop // block_tokens
    regular = range(-(-first // every) * every, last + 1, every)
    return sorted({*regular, *(end for end in ends if first <= end <= last)})
