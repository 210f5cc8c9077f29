"""Clocks as parameters, so that policies and tests control time."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds of a monotonic clock that all processes of one node share."""

monotonic_s = time.monotonic
