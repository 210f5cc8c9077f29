"""Python's cyclic garbage collector, in processes that live long."""

from __future__ import annotations

import gc


def spare_what_lives_on() -> None:
    """Once a process is ready: what it has made by then stays, so no collection need look at it
    again. Modules and weights are hundreds of thousands of objects; walking them took a fifth of
    a small request's time in a router."""
    gc.collect()
    gc.freeze()
