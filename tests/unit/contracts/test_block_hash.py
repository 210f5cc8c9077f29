"""Block hashes cover all previous tokens and the salt."""

from __future__ import annotations

from contracts.block_hash import DIGEST_BYTES, chain_hashes

BLOCK = 4
FIRST, OTHER, NEXT = [1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 8, 9]


def test_hash_depends_on_all_previous_blocks() -> None:
    one, two = chain_hashes(FIRST + NEXT, BLOCK), chain_hashes(OTHER + NEXT, BLOCK)
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert chain_hashes(NEXT + NEXT, BLOCK)[0] != chain_hashes(NEXT + NEXT, BLOCK)[1]


def test_chain_continues_known_hashes_and_starts_with_the_salt() -> None:
    whole = chain_hashes(FIRST + NEXT + [1], BLOCK)
    assert len(whole) == 2
    assert chain_hashes(FIRST + NEXT, BLOCK, known=whole[:1]) == whole
    salted = chain_hashes(FIRST + NEXT, BLOCK, salt=bytes(DIGEST_BYTES))
    assert not set(salted) & set(whole)
