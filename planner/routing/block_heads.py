"""Who was lately given a block that begins like this one: where siblings part inside a block."""

from __future__ import annotations

from collections.abc import Sequence

STEP_TOKENS = 4
REMEMBERED = 1 << 13  # heads: of some thousand requests

Head = tuple[bytes, tuple[int, ...]]
"""Hash of the block before (the salt: none), and the first tokens of a block."""


def heads_of(parent: bytes, tokens: Sequence[int]) -> list[Head]:
    """Of a block, or of what a prompt has of it: from the longest on, in steps."""
    longest = len(tokens) - len(tokens) % STEP_TOKENS
    return [(parent, tuple(tokens[:length])) for length in range(longest, 0, -STEP_TOKENS)]


class BlockHeads:
    """Head of a block → workers as bits of an integer.

    A worker copies what two blocks have in common (kv.share_partial_blocks), but a hash names whole
    blocks only. Of a request the block is noted in which it leaves what workers have: there its
    next sibling will leave it. What was noted first is forgotten first. It may be gone from the
    worker's cache: so it only decides between workers that have equally many blocks.
    """

    def __init__(self) -> None:
        self._workers: dict[Head, int] = {}

    def shared_tokens(self, heads: Sequence[Head]) -> dict[int, int]:
        """Of each worker that was given any of a block's heads, the tokens of the longest."""
        found: dict[int, int] = {}
        for head in reversed(heads):
            workers = self._workers.get(head, 0)
            if not workers:
                break
            while workers:
                worker = workers.bit_length() - 1
                found[worker] = len(head[1])
                workers ^= 1 << worker
        return found

    def note(self, worker: int, heads: Sequence[Head]) -> None:
        known = self._workers
        for head in heads:
            known[head] = known.pop(head, 0) | 1 << worker
        while len(known) > REMEMBERED:
            del known[next(iter(known))]
