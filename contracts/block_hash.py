"""Chained content hashes of KV blocks, the same in every process.

    tokens   t0 .. t15 | t16 .. t31 | t32 .. t40
    hash     h0        | h1         | (no hash: the block is not full)
    with     h_i = BLAKE2b(h_{i-1} ‖ tokens of block i), h_{-1} the salt

So equal hashes mean equal tokens from the very first one on, and therefore equal K and V. They also
mean an equal salt: who has another one finds none of these blocks, and cannot tell from a hit what
somebody else has sent.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

DIGEST_BYTES = 16


def chain_hashes(
    token_ids: Sequence[int], block_tokens: int, *, known: Sequence[bytes] = (), salt: bytes = b""
) -> list[bytes]:
    """One digest per full block of `token_ids`; `known` are the first ones, already computed.
    salt: empty, or DIGEST_BYTES long."""
    hashes = list(known)
    parent = hashes[-1] if hashes else salt
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = array.array("q", token_ids[start : start + block_tokens])
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
