"""Batching policies of other systems, for comparison only.

The token budget of an iteration is schedule.max_batch_tokens, the
slots are schedule.max_batch_sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.scheduling.batching import ALL, BatchingView, BatchSelection, one_at_a_time


def static_batching(view: BatchingView) -> Iterable[BatchSelection]:
    """No sequence joins before the whole batch has ended (the baseline of QLLM, Section 4)."""
    if view.in_flight:
        return ()
    return (BatchSelection(starts=0),) if view.running else (ALL,)


continuous_batching = one_at_a_time
"""Continuous batching with chunked prefill (Orca, Sarathi-Serve): a new sequence joins the next
iteration; decodes first, then LS, then BE; LS takes blocks of BE. Without classes it is first come,
first served."""
