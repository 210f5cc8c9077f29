"""Chains of pending blocks against a plain list of all blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.block_hash import chain_hashes
from planner.routing.pending_blocks import PendingBlocks

WORKERS = 3
workers = st.integers(0, WORKERS - 1)
texts = st.lists(st.integers(0, 1), max_size=9)


class Chains(RuleBasedStateMachine):
    """Blocks of one token, so that short prompts diverge and end at every block."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = PendingBlocks()
        self.open: list[tuple[int, list[bytes]]] = []

    @rule(worker=workers, tokens=texts)
    def a_chain_comes(self, worker: int, tokens: list[int]) -> None:
        hashes = chain_hashes(tokens, 1)
        self.promises.add(worker, hashes)
        self.open.append((worker, hashes))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def a_chain_goes(self, data: st.DataObject) -> None:
        worker, hashes = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.promises.remove(worker, [bytes(bytearray(digest)) for digest in hashes])

    @rule(worker=workers)
    def a_worker_goes(self, worker: int) -> None:
        self.promises.clear(worker)
        self.open = [(owner, hashes) for owner, hashes in self.open if owner != worker]

    @rule(tokens=texts)
    def matches_are_those_of_a_set_per_worker(self, tokens: list[int]) -> None:
        hashes = chain_hashes(tokens, 1)
        expected = [sum(digest in self._blocks(n) for digest in hashes) for n in range(WORKERS)]
        found = self.promises.matches(hashes)
        assert [found.get(worker, 0) for worker in range(WORKERS)] == expected
        assert [self.promises.match(worker, hashes) for worker in range(WORKERS)] == expected

    @invariant()
    def blocks_are_counted_once(self) -> None:
        assert len(self.promises) == len(set().union(*map(self._blocks, range(WORKERS))))

    def _blocks(self, worker: int) -> set[bytes]:
        return {digest for owner, hashes in self.open if owner == worker for digest in hashes}


TestChains = Chains.TestCase
TestChains.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_unchained_hashes_are_rejected() -> None:
    promises = PendingBlocks()
    promises.add(0, [b"a"])
    promises.add(0, [b"b"])
    with pytest.raises(ValueError, match="block 1 has the hash of block 0 of another prompt"):
        promises.add(0, [b"b", b"a"])
