"""A rank's process that forms another batch while others run: see benchmarks/live_batches.py.

LIVE_BATCHES in the environment: how many, and within how many layers another one may join.
"""

from __future__ import annotations

import os
from functools import partial

from actors.ranks.attention_rank import attention_rank
from actors.ranks.prefill_rank import prefill_rank
from actors.ranks.shell import RANK_FACTORIES
from contracts.ranks import Group
from planner.scheduling.batching import joining
from tests.support.rank_process import main

ENVIRONMENT = "LIVE_BATCHES"

if __name__ == "__main__":
    most, within_layers = map(int, os.environ[ENVIRONMENT].split(","))
    policy = joining(most=most, within_layers=within_layers)
    RANK_FACTORIES[Group.ATTENTION] = partial(attention_rank, batching=policy)
    RANK_FACTORIES[Group.PREFILL] = partial(prefill_rank, batching=policy)
    main()
