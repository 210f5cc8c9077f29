"""When best-effort work is held back although the rank has nothing else to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class LivePass(NamedTuple):
    """A live LS batch: when its next token is due, and for how long it would still take if it ran
    alone, as predicted (both groups, the way there and back)."""

    due_s: float
    left_s: float


def would_be_late(passes: Iterable[LivePass], slice_s: float, now_s: float) -> bool:
    """Whether a slice of `slice_s` seconds, run now, would cost an LS pass its due time, or make
    one later that has lost it.

    Due times decide, not classes: to hold BE for every LS decode costs half of its throughput, for
    tokens that would have been in time. Where LS is hopelessly late there is too much of it: then
    it is ready nearly always, and BE has what its share gives.
    """
    return any(now_s + slice_s + each.left_s > each.due_s for each in passes)
