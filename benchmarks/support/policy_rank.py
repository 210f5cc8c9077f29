"""A rank's process that forms batches by a baseline: see
benchmarks/cases/priorities_paper.py.

BATCHING in the environment: a name of benchmarks/support/batching_baselines.py; empty: as
configured.
"""

import os
from functools import partial

from actors.ranks import attention_rank
from benchmarks.support import batching_baselines
from tests.support.rank_process import main

ENVIRONMENT = "BATCHING"

if __name__ == "__main__":
    name = os.environ.get(ENVIRONMENT)
    if name:
        make = partial(attention_rank.attention_rank, batching=getattr(batching_baselines, name))
        attention_rank.attention_rank = make  # type: ignore[assignment]
    main()
