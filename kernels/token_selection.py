"""Selection of the tokens that a query of sparse attention sees, compiled for the CPU.

A token's score is the weighted sum over H heads of relu(query · key). Each row is computed by
itself, so its selection depends neither on the batch nor on threads.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray

from kernels.attention_ops import ENTRY_COLUMNS
from kernels.compiled import LANES, address_of, compiled, float32_at, int64_at, read_numbers
from kernels.row_ops import dot
from kernels.thread_pool import PartNumber, register_part, run_parts

_FIELDS: Final = 9
_ZERO: Final = np.float32(0.0)


@compiled
def _score(queries: Any, weights: Any, key: Any) -> Any:
    H, d = queries.shape
    whole, total = d // LANES, _ZERO
    for h in range(H):
        product = dot(True, address_of(queries[h]), address_of(key), whole) if whole else _ZERO
        for i in range(whole * LANES, d):
            product += queries[h, i] * key[i]
        if product > _ZERO:
            total += product * weights[h]
    return total


@compiled
def _select_part(args: int, begin: int, end: int) -> None:
    if begin >= end:
        return
    is_wide, q, weights, keys, entries, H, d, top_k, out = carray(int64_at(args), (_FIELDS,))
    wide, size = is_wide != 0, 4 if is_wide else 2
    table, key = carray(int64_at(entries), (end, ENTRY_COLUMNS)), np.empty(d, np.float32)
    for n in range(begin, end):
        row, _, context, start, listed = table[n]
        slots = carray(int64_at(listed), (context if listed else 0,))
        queries = carray(float32_at(q + row * H * d * 4), (H, d))
        weights_H = carray(float32_at(weights + row * H * 4), (H,))
        scores = np.empty(context, np.float32)
        for s in range(context):
            slot = slots[s] if listed else start + s
            read_numbers(wide, keys + slot * d * size, d, key)
            scores[s] = _score(queries, weights_H, key)
        least = np.partition(scores, context - top_k)[context - top_k]
        equal = top_k
        for s in range(context):
            equal -= scores[s] > least
        chosen, count = carray(int64_at(out + n * top_k * 8), (top_k,)), 0
        for s in range(context):
            if scores[s] > least or (scores[s] == least and equal > 0):
                equal -= scores[s] == least
                chosen[count] = slots[s] if listed else start + s
                count += 1


_SELECT: Final = register_part(PartNumber.SELECT_TOKENS, _select_part)


@compiled
def select_tokens(
    pool: int, wide: bool, q: int, weights: int, keys: int, entries: int, count: int, H: int,
    d: int, top_k: int, out: int,
) -> None:  # fmt: skip
    """Write the pool slots of each row's top_k tokens, in order of position, int64 [count, top_k].

    q float32 [T, H, d], weights float32 [T, H]; keys: pool of [d]. entries: int64 [count,
    ENTRY_COLUMNS], of one row each, as `attention_ops.attend` has them, with contexts above top_k.
    Of equal scores the first are taken.
    """
    args = np.array((np.int64(wide), q, weights, keys, entries, H, d, top_k, out))
    run_parts(pool, _SELECT, args, count, 1)
