"""Chained content hashes of KV blocks, equal in every process.

    tokens   t0 .. t15 | t16 .. t31 | t32 .. t40
    hash     h0        | h1         | (no hash: the block is not full)
    with     h_i = BLAKE2b(h_{i-1} ‖ tokens of block i), h_{-1} the salt

Equal hashes mean equal tokens from the first one on, and therefore equal K and V. They also mean
equal salts: with another salt a caller finds none of these blocks, so that cache hits reveal
nothing about the requests of others.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

DIGEST_BYTES = 16


def chain_hashes(
    token_ids: Sequence[int], block_tokens: int, *, known: Sequence[bytes] = (), salt: bytes = b""
) -> list[bytes]:
    """Return one digest per full block of `token_ids`.

    known: digests of the first blocks. salt: empty, or DIGEST_BYTES long.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else salt
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = array.array("q", token_ids[start : start + block_tokens])
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
