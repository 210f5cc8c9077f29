"""A rank's process that forms batches by a baseline: see
benchmarks/cases/priorities_paper.py.

BATCHING in the environment: a name of benchmarks/support/batching_baselines.py; empty: as
configured.
"""

import os
from functools import partial

from actors.ranks.attention_rank import attention_rank
from actors.ranks.shell import RANK_FACTORIES
from benchmarks.support import batching_baselines
from contracts.ranks import Group
from tests.support.rank_process import main

ENVIRONMENT = "BATCHING"

if __name__ == "__main__":
    name = os.environ.get(ENVIRONMENT)
    if name:
        RANK_FACTORIES[Group.ATTENTION] = partial(
            attention_rank, batching=getattr(batching_baselines, name)
        )
    main()
