"""A rank's process whose experts are read as if they were larger: see benchmarks/offloaded_ranks.

TIMES in the environment: so many times.
"""

from __future__ import annotations

import os
from functools import partial

from actors.experts import caching
from actors.ranks.process import main
from benchmarks.larger_experts import LargerTier

ENVIRONMENT = "TIMES"

if __name__ == "__main__":
    vars(caching)["FileTier"] = partial(LargerTier, times=int(os.environ[ENVIRONMENT]))
    main()
