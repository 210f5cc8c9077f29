"""The KV block manager and its index of contents under random use."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from actors.kv.block_manager import BlockContents, BlockManager
from contracts.requests import DIGEST_BYTES, chain_hashes

BLOCK = 4
POOL = 12
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5 * BLOCK)


class Books(RuleBasedStateMachine):
    """Sequences start (sharing what is cached), run in batches, and end, in any order."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(POOL)
        self.live: list[list[int]] = []
        self.contents: dict[int, list[int]] = {}  # all tokens up to the last that a block holds
        self.batch = 0
        self.of_be: dict[int, bool] = {}  # whether BE was the last to use a block

    @rule(target=tables, tokens=prompts, fails=st.booleans())
    def run_a_batch(self, tokens: list[int], fails: bool) -> object:
        hashes = chain_hashes(tokens, BLOCK)
        matched = self.blocks.match(hashes[: (len(tokens) - 1) // BLOCK], batch=self.batch)
        for place, block in enumerate(matched):
            held = tokens[: (place + 1) * BLOCK]
            assert self.contents[block] == held, "a prefix hit must hold the prefix's K and V"
        self.check_head(tokens, len(matched))
        left = {block for block in self.contents if not any(block in t for t in self.live)}
        before = {b for b in left - {*matched} if self.blocks._is_known(b)}
        table = self.blocks.take(matched, -(-len(tokens) // BLOCK) - len(matched))
        if table is None:
            return multiple()
        evicted = before & {*table}
        if any(not self.of_be[block] for block in evicted):
            assert not any(self.of_be[block] for block in before - evicted), "BE's go first"
        for block in table[len(matched) :]:
            self.contents.pop(block, None)
        register(self.blocks, table, tokens, batch=self.batch)
        if fails:
            self.blocks.abandon(self.batch)
        else:
            for place, block in enumerate(table):
                self.contents[block] = tokens[: (place + 1) * BLOCK]
            self.blocks.commit(self.batch)
        self.batch += 1
        self.live.append(table)
        return table

    def check_head(self, tokens: list[int], whole: int) -> None:
        """Matched blocks hold the prompt's prefix."""
        first = whole * BLOCK
        rest = tokens[first : first + BLOCK]
        parent = chain_hashes(tokens[:first], BLOCK)[-1] if whole else b""
        head = self.blocks.head(parent, rest, batch=self.batch)
        if head is not None:
            held = self.contents[head.block][: first + head.tokens]
            assert held == tokens[: first + head.tokens], "a head must be the prompt's own tokens"

    @rule(table=consumes(tables), best_effort=st.booleans())
    def end(self, table: list[int], best_effort: bool) -> None:
        self.live.remove(table)
        self.blocks.release(table, best_effort=best_effort)
        self.of_be.update(dict.fromkeys(table, best_effort))

    @invariant()
    def the_books_balance(self) -> None:
        self.blocks.check(self.live)


def register(
    blocks: BlockManager, table: Sequence[int], tokens: Sequence[int], *, batch: int
) -> None:
    """Register `tokens` as one chunk does."""
    hashes = chain_hashes(tokens, BLOCK)
    for place, block in enumerate(table):
        held = tokens[place * BLOCK : (place + 1) * BLOCK]
        digest = hashes[place] if place < len(hashes) else None
        blocks.register(block, digest, hashes[place - 1] if place else b"", held, batch=batch)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def committed(blocks: BlockManager, count: int, tokens: Sequence[int]) -> list[int]:
    table = blocks.take([], count)
    assert table is not None
    register(blocks, table, tokens, batch=0)
    blocks.commit(0)
    return table


def test_pending_blocks_are_shared_within_their_batch_only() -> None:
    blocks = BlockManager(8)
    hashes = chain_hashes(range(8), BLOCK)
    table = blocks.take([], 3)
    assert table is not None
    register(blocks, table, range(10), batch=7)
    assert blocks.match(hashes, batch=7) == table[:2]
    assert blocks.head(hashes[1], [8, 9, 10], batch=7) == (table[2], 2)
    assert blocks.match(hashes, batch=8) == []
    assert blocks.head(hashes[1], [8, 9, 10], batch=8) is None
    blocks.abandon(7)
    assert blocks.match(hashes, batch=7) == [], "nor in a later batch of the same number"
    assert blocks.head(hashes[1], [8, 9, 10], batch=7) is None
    register(blocks, table, range(10), batch=7)
    blocks.commit(7)
    assert blocks.match(hashes, batch=8) == table[:2]
    assert blocks.head(hashes[1], [8, 9, 10], batch=8) == (table[2], 2)
    assert blocks.head(hashes[0], [4, 5, 7], batch=8) == (table[1], 2), "the head of a full one"
    assert blocks.head(hashes[0], [8, 9, 10], batch=8) is None


def test_only_full_blocks_are_found_without_partial_sharing() -> None:
    blocks = BlockManager(4, share_partial=False)
    table = committed(blocks, 2, range(6))
    assert blocks.match(chain_hashes(range(6), BLOCK), batch=1) == table[:1]
    assert blocks.head(b"", [0, 1], batch=1) is None
    blocks.release(table)
    assert blocks.counts == {"free": 3, "cached": 1, "used": 0}


def test_least_recently_used_chain_is_evicted_from_its_end() -> None:
    blocks = BlockManager(4)
    old, new = chain_hashes(range(8), BLOCK), chain_hashes(range(100, 108), BLOCK)
    for first in (0, 100):
        blocks.release(committed(blocks, 2, range(first, first + 8)))
    assert blocks.take([], 1) is not None
    assert len(blocks.match(old, batch=2)) == 1
    assert len(blocks.match(new, batch=2)) == 2
    assert blocks.evicted_total == 1


def test_integrity_check_reports_a_lost_block() -> None:
    blocks = BlockManager(3)
    blocks.take([], 1)
    with pytest.raises(RuntimeError, match="reference counts differ"):
        blocks.check([])


@given(prompts, prompts)
def test_equal_chain_hashes_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    left_hashes, right_hashes = chain_hashes(left, BLOCK), chain_hashes(right, BLOCK)
    for count, (a, b) in enumerate(zip(left_hashes, right_hashes, strict=False), start=1):
        assert (a == b) == (left[: count * BLOCK] == right[: count * BLOCK])
    assert not set(chain_hashes(left, BLOCK, salt=bytes(DIGEST_BYTES))) & set(left_hashes)
    known = chain_hashes(left[: BLOCK * 2], BLOCK)
    assert chain_hashes(left, BLOCK, known=known) == left_hashes


parents = st.sampled_from([b"", b"a"])
contents = st.lists(st.integers(0, 2) | st.integers(2**31, 2**31 + 1), min_size=1, max_size=4)
puts = st.tuples(st.integers(0, 7), parents, contents)
drops = st.integers(0, 7)


@given(steps=st.lists(puts | drops, max_size=30), parent=parents, wanted=contents)
def test_longest_head_is_found_after_any_puts_and_drops(
    steps: list[tuple[int, bytes, list[int]] | int], parent: bytes, wanted: list[int]
) -> None:
    index = BlockContents()
    noted: dict[int, tuple[bytes, list[int]]] = {}
    for step in steps:
        if isinstance(step, int):
            index.drop(step)
            noted.pop(step, None)
        else:
            block, of, held = step
            covered = any(of == p and t[: len(held)] == held for p, t in noted.values())
            assert index.put(block, of, held) is not covered
            if not covered:
                noted[block] = (of, held)
        index.check()
    assert all((block in index) == (block in noted) for block in range(8))
    heads = {block: common(t, wanted) for block, (p, t) in noted.items() if p == parent}
    found = index.longest_head(parent, wanted)
    if found is None:
        assert not any(heads.values())
    else:
        assert heads[found.block] == found.tokens == max(heads.values())


def common(left: list[int], right: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )
