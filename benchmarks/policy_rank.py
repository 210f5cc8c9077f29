"""A rank's process that forms batches by a baseline: see benchmarks/priorities.

BATCHING in the environment: a name of planner/policies/baselines.py; empty: as configured.
"""

from __future__ import annotations

import os
from functools import partial

from actors.ranks.attention_rank import attention_rank
from actors.ranks.process import main
from actors.ranks.shell import MAKE
from contracts.worker import Group
from planner.policies import baselines

ENVIRONMENT = "BATCHING"

if __name__ == "__main__":
    name = os.environ.get(ENVIRONMENT)
    if name:
        MAKE[Group.ATTENTION] = partial(attention_rank, batching=getattr(baselines, name))
    main()
