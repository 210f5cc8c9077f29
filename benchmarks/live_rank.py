"""A rank's process that forms another batch while others run: see benchmarks/live_batches.py.

LIVE_BATCHES in the environment: how many, and within how many layers another one may join.
"""

from __future__ import annotations

import os
from functools import partial

from actors.ranks.attention_rank import attention_rank
from actors.ranks.prefill_rank import prefill_rank
from actors.ranks.process import main
from actors.ranks.shell import MAKE
from contracts.worker import Group
from planner.policies.batching import joining

ENVIRONMENT = "LIVE_BATCHES"

if __name__ == "__main__":
    most, within_layers = map(int, os.environ[ENVIRONMENT].split(","))
    policy = joining(most=most, within_layers=within_layers)
    MAKE[Group.ATTENTION] = partial(attention_rank, batching=policy)
    MAKE[Group.PREFILL] = partial(prefill_rank, batching=policy)
    main()
