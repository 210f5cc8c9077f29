"""Python's cyclic garbage collector, in processes that live long."""

from __future__ import annotations

import gc


def spare_what_lives_on() -> None:
    """Once a process is ready: what it has made by then stays, so no collection need look at it
    again. Modules and weights are hundreds of thousands of objects; walking them took a quarter
    of a router's time per row."""
    gc.collect()
    gc.freeze()
