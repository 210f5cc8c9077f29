"""Index of the tokens in KV blocks, to find the one that continues a prompt best.

Blocks with the same parent are sorted by their tokens. The one with the longest common prefix with
a given list of tokens is then a neighbor of that list's insertion point.

    parent h1:   [ 5 8 8 1 ]  [ 5 8 9 ]  [ 7 2 4 4 ]
                              ^ insertion point of 5 8 8 3: three common tokens on its left
"""

from __future__ import annotations

import array
from bisect import bisect_left
from collections.abc import Sequence
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
