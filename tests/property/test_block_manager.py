"""The KV block manager against its own books, under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from actors.block_manager import BlockManager
from contracts.block_hash import chain_hashes

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
        self.contents: dict[int, bytes] = {}  # what the tensors would hold
        self.batch = 0

    @rule(target=tables, tokens=prompts, fails=st.booleans())
    def run_a_batch(self, tokens: list[int], fails: bool) -> object:
        hashes = chain_hashes(tokens, BLOCK)
        matched = self.blocks.match(hashes[: (len(tokens) - 1) // BLOCK], batch=self.batch)
        for block, digest in zip(matched, hashes, strict=False):
            assert self.contents[block] == digest, "a prefix hit must hold the prefix's K and V"
        table = self.blocks.take(matched, -(-len(tokens) // BLOCK) - len(matched))
        if table is None:
            return multiple()
        for block in table[len(matched) :]:
            self.contents.pop(block, None)
        for position in range(len(matched), len(hashes)):
            self.blocks.register(table[position], hashes[position], batch=self.batch)
        if fails:
            self.blocks.abandon(self.batch)
        else:
            self.contents.update(zip(table, hashes, strict=False))
            self.blocks.commit(self.batch)
        self.batch += 1
        self.live.append(table)
        return table

    @rule(table=consumes(tables))
    def end(self, table: list[int]) -> None:
        self.live.remove(table)
        self.blocks.release(table)

    @invariant()
    def the_books_balance(self) -> None:
        self.blocks.check(self.live)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_sequence_of_the_same_batch_shares_pending_blocks_and_another_batch_does_not() -> None:
    blocks = BlockManager(8)
    hashes = chain_hashes(range(8), BLOCK)
    table = blocks.take([], 2)
    assert table is not None
    for block, digest in zip(table, hashes, strict=True):
        blocks.register(block, digest, batch=7)
    assert blocks.match(hashes, batch=7) == table
    assert blocks.match(hashes, batch=8) == []
    blocks.commit(7)
    assert blocks.match(hashes, batch=8) == table


def test_the_least_recently_used_chain_is_evicted_from_its_end() -> None:
    blocks = BlockManager(4)
    old, new = chain_hashes(range(8), BLOCK), chain_hashes(range(100, 108), BLOCK)
    for batch, hashes in enumerate((old, new)):
        table = blocks.take([], 2)
        assert table is not None
        for block, digest in zip(table, hashes, strict=True):
            blocks.register(block, digest, batch=batch)
        blocks.commit(batch)
        blocks.release(table)
    assert blocks.take([], 1) is not None
    assert len(blocks.match(old, batch=2)) == 1
    assert len(blocks.match(new, batch=2)) == 2
    assert blocks.evicted_total == 1


def test_taking_more_blocks_than_there_are_changes_nothing() -> None:
    blocks = BlockManager(3)
    assert blocks.take([], 4) is None
    blocks.check([])
    assert blocks.available == 3


def test_the_integrity_check_names_a_lost_block() -> None:
    blocks = BlockManager(3)
    blocks.take([], 1)
    with pytest.raises(RuntimeError, match="reference counts differ"):
        blocks.check([])


@given(prompts, prompts)
def test_equal_chain_hashes_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    left_hashes, right_hashes = chain_hashes(left, BLOCK), chain_hashes(right, BLOCK)
    for count, (a, b) in enumerate(zip(left_hashes, right_hashes, strict=False), start=1):
        assert (a == b) == (left[: count * BLOCK] == right[: count * BLOCK])
    known = chain_hashes(left[: BLOCK * 2], BLOCK)
    assert chain_hashes(left, BLOCK, known=known) == left_hashes
