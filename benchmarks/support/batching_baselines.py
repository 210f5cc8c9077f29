"""How others form batches: what `by_class` and preemption are measured against.

None of them is for serving. The token budget of an iteration is schedule.max_batch_tokens, the
slots are schedule.max_batch_sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.scheduling.batching import ALL, BatchingView, BatchSelection, one_at_a_time


def static_batching(view: BatchingView) -> Iterable[BatchSelection]:
    """Nobody joins before all of the batch have ended (QLLM, Section 4: its baseline, as the text
    says there)."""
    if view.in_flight:
        return ()
    return (BatchSelection(starts=0),) if view.running else (ALL,)


continuous_batching = one_at_a_time
"""Continuous batching with chunked prefill (Orca, Sarathi-Serve): whoever comes is in the next
iteration, decodes first, then LS, then BE; LS takes BE's blocks. Where clients name no class it is
first come, first served."""
