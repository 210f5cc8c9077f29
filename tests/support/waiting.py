"""Waiting for what another process does."""

import time
from collections.abc import Callable

LOOK_PERIOD_S = 0.2


def wait_until(
    is_so: Callable[[], bool],
    otherwise: str,
    deadline_s: float,
    look_period_s: float = LOOK_PERIOD_S,
) -> None:
    """otherwise: what to say if it never is."""
    end_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end_s, otherwise
        time.sleep(look_period_s)
