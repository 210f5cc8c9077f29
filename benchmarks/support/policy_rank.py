"""A rank's process that forms batches by a baseline: see
benchmarks/cases/priorities_paper.py.

BATCHING in the environment: a name of POLICIES; empty: as configured. The token budget of an
iteration is schedule.max_batch_tokens, the slots are schedule.max_batch_sequences.
"""

import os
from collections.abc import Iterable
from functools import partial

from actors.ranks import attention_rank
from planner.scheduling.batching import ALL, BatchingView, BatchSelection
from tests.support.rank_process import main

ENVIRONMENT = "BATCHING"


def static_batching(view: BatchingView) -> Iterable[BatchSelection]:
    """No sequence joins before the whole batch has ended (the baseline of QLLM, Section 4)."""
    if view.in_flight:
        return ()
    return (BatchSelection(starts=0),) if view.running else (ALL,)


POLICIES = {"static_batching": static_batching}

if __name__ == "__main__":
    name = os.environ.get(ENVIRONMENT)
    if name:
        make = partial(attention_rank.attention_rank, batching=POLICIES[name])
        attention_rank.attention_rank = make  # type: ignore[assignment]
    main()
