"""Buckets of batches that are similar enough to share a plan."""

import math
from collections.abc import Sequence
from typing import NamedTuple

STEPS_PER_OCTAVE = 4  # sizes in one bucket differ by less than 19 %; below 8 they are equal


class BatchBucket(NamedTuple):
    """Steps on a ladder of sizes; 0 for none.

    decode_rows, prompts: sequences with one new token, and with more. decode_context, prompt_pairs:
    their attention. prompt_tokens: new tokens. longest: of one prompt.
    """

    decode_rows: int
    decode_context: int
    prompts: int
    prompt_tokens: int
    prompt_pairs: int
    longest: int


def bucket_of(batch: Sequence[tuple[int, int]]) -> BatchBucket:
    """Return the bucket of a batch of new tokens [start, stop) per sequence."""
    contexts = [stop for start, stop in batch if stop - start == 1]
    prompts = [(start, stop) for start, stop in batch if stop - start > 1]
    lengths = [stop - start for start, stop in prompts]
    pairs = sum((stop - start) * (start + stop + 1) // 2 for start, stop in prompts)
    return BatchBucket(
        step(len(contexts)),
        step(sum(contexts)),
        step(len(prompts)),
        step(sum(lengths)),
        step(pairs),
        step(max(lengths, default=0)),
    )


def step(size: int) -> int:
    """Return the step of a size on the ladder."""
    return 0 if size <= 0 else 1 + math.floor(STEPS_PER_OCTAVE * math.log2(size))
