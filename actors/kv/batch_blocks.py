"""Which chunk of a batch fills which block, while the batch is being formed."""

from __future__ import annotations

from collections.abc import Iterable

from models.decoder.batch import BlockCopy


class BatchBlocks:
    """`sources`: blocks that others copy from; the batch holds a reference to each."""

    def __init__(self) -> None:
        self.sources: list[int] = []
        self._provider: dict[int, int] = {}  # block -> chunk that computes something in it
        self._copies: dict[int, tuple[BlockCopy, ...]] = {}  # by the block they go to

    def fill(self, block: int, chunk: int) -> None:
        self._provider[block] = chunk

    def copy(self, source: int, block: int, tokens: int) -> tuple[BlockCopy, ...]:
        """Copies that bring the first `tokens` slots of `source` into `block`.

        All copies of a layer are one operation: what `source` itself is to receive by a copy of
        this batch comes from where that takes it.

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
        """The chunks of this batch that compute in `blocks`."""
        return frozenset(self._provider[block] for block in blocks if block in self._provider)
