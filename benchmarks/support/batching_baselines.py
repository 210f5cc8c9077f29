"""Batching policies of other systems, for comparison only.

The token budget of an iteration is schedule.max_batch_tokens, the
slots are schedule.max_batch_sequences.
"""

from collections.abc import Iterable

from planner.scheduling.batching import ALL, BatchingView, BatchSelection


def static_batching(view: BatchingView) -> Iterable[BatchSelection]:
    """No sequence joins before the whole batch has ended (the baseline of QLLM, Section 4)."""
    if view.in_flight:
        return ()
    return (BatchSelection(starts=0),) if view.running else (ALL,)
