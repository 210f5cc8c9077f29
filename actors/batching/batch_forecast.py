"""Forecast of the next batch, made while one runs, so that its plan is ready in time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from actors.batching.batch_builder import cached_prefix
from actors.batching.sequence import BatchBudget, Sequence
from actors.kv.block_manager import BlockManager
from contracts.requests import Priority
from planner.scheduling.batching import BatchSelection, Phase
from planner.scheduling.fair_queue import FairQueue

MAX_MATCHED_BLOCKS = 4096  # per forecast, of all prompts together
MAX_HASHED_BLOCKS = 512

Span = tuple[int, int]


def upcoming(
    form: BatchSelection,
    budget: BatchBudget,
    running: Iterable[Sequence],
    waiting: Mapping[Priority, FairQueue[Sequence]],
    held: PrefixEstimator,
) -> list[Span]:
    """Return new tokens [start, stop) per sequence of the next batch of a form, in order.

    Changes `budget` only. Assumes that running sequences continue, that blocks suffice, and ignores
    what sequences of that batch will share.
    """
    found: list[Span] = []

    def add(sequence: Sequence, start: int, length: int) -> None:
        stop = min(length, start + budget.tokens_for(sequence.owner))
        if stop > start:
            found.append((start, stop))
            budget.take(sequence.owner, stop - start)

    continuing = [s for s in running if not s.done and not _is_last_batch(s)]
    for sequence in sorted(continuing, key=lambda s: (s.phase is Phase.PREFILL, s.priority)):
        start = sequence.num_computed
        add(sequence, start, max(len(sequence.token_ids), start + 1))
        if budget.is_full:
            return found
    for priority in form.priorities if form.phase is not Phase.DECODE else ():
        queue = waiting[priority].ahead(lambda s: not budget.tokens_for(s.owner))
        for sequence in itertools.islice(queue, form.starts):
            add(sequence, held.tokens(sequence), len(sequence.token_ids))
            if budget.is_full:
                return found
    return found


class PrefixEstimator:
    """Cached prefixes of waiting prompts, within budgets of blocks to match and to hash."""

    def __init__(self, blocks: BlockManager, batch: int) -> None:
        self._blocks = blocks
        self._batch = batch
        self._match_budget, self._hash_budget = MAX_MATCHED_BLOCKS, MAX_HASHED_BLOCKS

    def tokens(self, sequence: Sequence) -> int:
        known = sequence.hashed_blocks
        wanted = sequence.first_needed // sequence.block_tokens
        count = min(wanted, known + self._hash_budget, self._match_budget)
        hashes = sequence.hash_blocks(count)[:count]
        prefix = cached_prefix(sequence, hashes, self._blocks, self._batch)
        self._hash_budget -= max(0, count - known)
        self._match_budget -= len(prefix.blocks)
        return prefix.tokens


def _is_last_batch(sequence: Sequence) -> bool:
    """Return whether the running batch is known to be the sequence's last."""
    sampling = sequence.submit.sampling
    if not sequence.in_flight or sequence.num_computed < len(sequence.token_ids):
        return False
    return sampling is None or sequence.generated + 1 >= sampling.max_tokens
