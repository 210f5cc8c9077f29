"""Ownership and contents of an attention rank's KV blocks: free list, prefix cache, references.

Every block is in exactly one state:

    free ──allocate──> used (ref > 0) ──release──> cached (contents known, ref 0) ──LRU──> free
                          │    ▲                       │
                          │    └──────── match ────────┘
                          └──release──> free (contents unknown)

Full blocks have a hash and are shared as they are. Of the following block, full or not, the equal
tokens are shared by copying them (`head`).

A block that the current batch will fill is *pending*: later sequences of the same batch may share
it, because within a layer K and V of all new tokens are written before attention runs (in-batch
prefix sharing). Sequences of other batches must wait until the batch completes.

Blocks that best-effort sequences leave behind are evicted first, so a bulk job evicts no one else's
prefix.

Layers without K and V have recurrent states, in slots that are managed likewise (`StateSlots`).
A sequence that has started owns one slot, whose states change with every token. A prefix is found
by a *checkpoint*: a copy of the states at the end of a block, in a slot of its own. A sequence
makes them at the end of its prompt, where it leaves other sequences' blocks, and each
CHECKPOINT_TOKENS tokens. A preempted sequence continues from the last one.

    blocks        | A | B | C | D |          of a cached prompt
    checkpoints           2       4          hits: two or four blocks
    next prompt   | A | B | C | x            hit: two; makes a checkpoint at three
"""

from __future__ import annotations

import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class BlockPrefix(NamedTuple):
    """The first `tokens` tokens, one or more, of `block` match."""

    block: int
    tokens: int


class BlockContents:
    """Blocks, full or not, by parent and tokens."""

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}  # parent -> (tokens, block)
        self._of: dict[int, tuple[bytes, bytes]] = {}  # block -> (parent, tokens)

    def __contains__(self, block: int) -> bool:
        return block in self._of

    def put(self, block: int, parent: bytes, tokens: Sequence[int]) -> bool:
        """Record the contents of `block`, replacing earlier ones.

        parent: hash of the block before it, or the salt. Returns False, recording nothing, if
        another block starts with these tokens.
        """
        packed = array.array("I", tokens).tobytes()
        children = self._children.get(parent, [])
        place = bisect_left(children, (packed,))
        if place < len(children) and children[place][0].startswith(packed):
            return False
        if block in self._of:
            self.drop(block)
            place = bisect_left(children, (packed,))
        if not children:
            self._children[parent] = children
        children.insert(place, (packed, block))
        self._of[block] = (parent, packed)
        return True

    def drop(self, block: int) -> None:
        """Forget `block`, if it is recorded."""
        noted = self._of.pop(block, None)
        if noted is None:
            return
        parent, packed = noted
        children = self._children[parent]
        del children[bisect_left(children, (packed, block))]
        if not children:
            del self._children[parent]

    def longest_head(self, parent: bytes, tokens: Sequence[int]) -> BlockPrefix | None:
        """Return the block after `parent` with the longest common prefix with `tokens`."""
        children = self._children.get(parent)
        if not children or not tokens:
            return None
        packed = array.array("I", tokens).tobytes()
        place = bisect_left(children, (packed,))
        best = None
        for other, block in children[max(0, place - 1) : place + 1]:
            shared = _common_tokens(packed, other)
            if shared > (best.tokens if best else 0):
                best = BlockPrefix(block, shared)
        return best

    def check(self) -> None:
        """Raise RuntimeError unless both indexes agree."""
        listed = {
            block: (parent, packed)
            for parent, children in self._children.items()
            for packed, block in children
        }
        in_order = all(children == sorted(children) for children in self._children.values())
        if listed != self._of or not in_order or not all(self._children.values()):
            raise RuntimeError("KV block manager: the index of block contents does not add up")


def _common_tokens(left: bytes, right: bytes) -> int:
    if left[:4] != right[:4]:  # the common case
        return 0
    count = 0
    for one, other in zip(memoryview(left).cast("I"), memoryview(right).cast("I"), strict=False):
        if one != other:
            break
        count += 1
    return count


class BlockManager:
    """Manages block numbers 0 .. num_blocks-1; `models.decoder.attention` has the tensors."""

    def __init__(
        self,
        num_blocks: int,
        *,
        prefix_cache: bool = True,
        share_partial: bool = True,
        keeps: bool = True,
        journal: bool = False,
        states: StateSlots | None = None,
    ) -> None:
        """Create the pool.

        prefix_cache False: no block is reused. share_partial False: only full blocks are shared.
        keeps: blocks stay cached after the batch that fills them; else only sequences of one batch
        share. journal: record changes for `take_changes`. states: what sequences own beside blocks;
        prefixes then end at its checkpoints.
        """
        self.num_blocks = num_blocks
        self.states = states
        self.evicted_total = 0
        self._prefix_cache = prefix_cache
        self._share_partial = share_partial
        self._keeps = keeps
        self._changes: dict[bytes, bool] | None = {} if journal else None  # hash -> is cached
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # last used by LS, oldest first
        self._cached_best_effort: OrderedDict[int, None] = OrderedDict()  # last used by BE
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._contents = BlockContents()
        self._pending: dict[int, int] = {}  # block -> batch that fills it

    @property
    def available(self) -> int:
        """Blocks that `allocate` could return now."""
        return len(self._free) + len(self._cached) + len(self._cached_best_effort)

    @property
    def counts(self) -> dict[str, int]:
        """Blocks per state (`tandem_kv_blocks{state}`)."""
        free = len(self._free)
        cached = self.available - free
        return {"free": free, "cached": cached, "used": self.num_blocks - free - cached}

    def match(self, hashes: Sequence[bytes], *, batch: int) -> list[int]:
        """Return the blocks of the longest contiguous prefix of `hashes`, without references."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None or self._pending.get(block, batch) != batch:
                break
            blocks.append(block)
        return blocks

    def head(self, parent: bytes, tokens: Sequence[int], *, batch: int) -> BlockPrefix | None:
        """Return the block after `parent` with most tokens in common, without a reference."""
        head = self._contents.longest_head(parent, tokens)
        if head is None or self._pending.get(head.block, batch) != batch:
            return None
        return head

    def take(self, matched: Sequence[int], fresh: int) -> list[int] | None:
        """Take references to `matched` and `fresh` new blocks; None and no change if too few."""
        revived = sum(1 for block in matched if self._references[block] == 0)
        if fresh > self.available - revived:
            return None
        for block in matched:
            if self._references[block] == 0 and self._cached.pop(block, ...) is ...:
                del self._cached_best_effort[block]
            self._references[block] += 1
        return [*matched, *(self._allocate() for _ in range(fresh))]

    def register(
        self, block: int, digest: bytes | None, parent: bytes, tokens: Sequence[int], *, batch: int
    ) -> None:
        """Record that `block` will hold `tokens` after `batch`, following the block `parent`.

        parent: a hash, or the salt at the start. digest: the hash of a full block, else None.
        """
        if not self._prefix_cache or digest in self._block_of or block in self._hash_of:
            return
        found = False
        if digest is not None:
            self._hash_of[block] = digest
            self._block_of[digest] = block
            found = True
        if self._share_partial and self._contents.put(block, parent, tokens):
            found = True
        if found:
            self._pending[block] = batch

    def commit(self, batch: int) -> None:
        """Mark the pending blocks and checkpoints of a completed batch as filled."""
        if self.states is not None:
            self.states.commit(batch)
        for block in [block for block, owner in self._pending.items() if owner == batch]:
            if not self._keeps:
                self._forget(block)
                continue
            del self._pending[block]
            if self._changes is not None and block in self._hash_of:
                self._changes[self._hash_of[block]] = True

    def abandon(self, batch: int) -> None:
        """Forget the pending blocks and checkpoints of a failed batch."""
        if self.states is not None:
            self.states.abandon(batch)
        for block in [block for block, owner in self._pending.items() if owner == batch]:
            self._forget(block)

    def invalidate(self, blocks: Sequence[int]) -> None:
        """Make blocks with suspect contents unfindable. Their holders keep them."""
        for block in blocks:
            self._forget(block)

    def take_changes(self) -> dict[bytes, bool]:
        """Return whether they are cached, of the hashes that changed since the last call."""
        changes = self._changes
        if not changes:
            return {}
        self._changes = {}
        return changes

    def release(self, blocks: Sequence[int], *, best_effort: bool = False) -> None:
        """Drop references. The end of a chain is evicted first, after all best-effort blocks."""
        cached = self._cached_best_effort if best_effort else self._cached
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if self._is_known(block) and block not in self._pending:
                cached[block] = None
            else:
                self._forget(block)
                self._free.append(block)

    def _allocate(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            cached = self._cached_best_effort or self._cached
            block, _ = cached.popitem(last=False)
            self._forget(block)
            self.evicted_total += 1
        self._references[block] = 1
        return block

    def _is_known(self, block: int) -> bool:
        return block in self._hash_of or block in self._contents

    def _forget(self, block: int) -> None:
        pending = self._pending.pop(block, None) is not None
        self._contents.drop(block)
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            if self._changes is not None and not pending:
                self._changes[digest] = False

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raise RuntimeError unless the books balance.

        tables: those of all live sequences, and the sources of copies under way. free + cached +
        used = all blocks; references equal the tables' entries; hashes are 1:1.
        """
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        free, cached = set(self._free), {*self._cached, *self._cached_best_effort}
        problems = [
            (len(free) != len(self._free), "a block is twice in the free list"),
            (bool(free & cached), "a block is both free and cached"),
            (len(cached) != self.counts["cached"], "a block is cached twice"),
            (expected != self._references, "reference counts differ from the block tables"),
            (
                {b for b in range(self.num_blocks) if self._references[b] == 0} != free | cached,
                "unreferenced blocks are not exactly the free and cached ones",
            ),
            (not all(map(self._is_known, cached)), "a cached block is not findable"),
            (any(map(self._is_known, free)), "a free block is findable"),
            (
                {block: digest for digest, block in self._block_of.items()} != self._hash_of,
                "hash maps are not inverse to each other",
            ),
            (not all(map(self._is_known, self._pending)), "a pending block is not findable"),
        ]
        for broken, what in problems:
            if broken:
                raise RuntimeError(f"KV block manager: {what}")
        self._contents.check()


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
