"""Which worker runs a prefill-only request: MoE-Prefill's rule, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LOAD_FOR_SAVED = 8  # load that a request may meet more of, for each unit of work that it saves


class RouteCandidate(NamedTuple):
    """A worker that takes requests, and what a request would meet there: an LS one counts no BE
    work, which it overtakes.

    matched_blocks: leading blocks that are committed or pending. added: work that the request
    would be; load: work of open requests; queued: the part of it that no running batch computes;
    threshold: queued work from which on the worker is saturated; saved: work of the tokens after
    the matched blocks that the worker has in a block which begins like theirs (one unit for all
    five, FLOPs or tokens). open_tokens: prompt tokens not yet computed, cached or not. waiting,
    running: open requests.
    """

    worker: int
    matched_blocks: int
    added: int
    load: int
    queued: int
    threshold: int
    saved: int = 0


RoutePolicy = Callable[[Sequence[RouteCandidate], int], RouteCandidate | None]
"""(candidates in order of workers, at least one; how many requests were routed before) → the
choice, or None: the request waits until a worker has reported."""


def prefix_then_load(candidates: Sequence[RouteCandidate], turn: int) -> RouteCandidate | None:
    """MoE-Prefill, Section 7: of the workers that are not saturated the one with the longest match,
    then the least load, then the first."""
    open_ones = unsaturated(candidates)
    return min(open_ones, key=_by_match_then_load) if open_ones else None


def prefix_within_round(candidates: Sequence[RouteCandidate], turn: int) -> RouteCandidate:
    """The same for a request that may have to wait (planner/routing/backlog.py): a worker is full
    where the request would be done one threshold later than at best. So siblings stay with a prefix
    that is dearer to compute again than to wait for."""
    return _near(candidates, lambda soonest, threshold: soonest + threshold)


def prefix_while_busy(candidates: Sequence[RouteCandidate], turn: int) -> RouteCandidate:
    """For one of many, of which the last one counts: full is also not before the request would be
    done twice as late as at best. What comes after it fills the other workers' lines, and if
    nothing comes they take over (`Backlog.take`)."""
    return _near(candidates, lambda soonest, threshold: soonest + max(soonest, threshold))


def _near(candidates: Sequence[RouteCandidate], limit: Callable[[int, int], int]) -> RouteCandidate:
    """The longest match, then the least load, of those where the request would be done before
    `limit(soonest, threshold)`."""
    soonest = min(c.load + c.added for c in candidates)
    near = [c for c in candidates if c.load + c.added < limit(soonest, c.threshold)]
    return min(near, key=_by_match_then_load)


def unsaturated(candidates: Sequence[RouteCandidate]) -> list[RouteCandidate]:
    """Below the threshold: F3 of the paper, for the next batch of a worker."""
    return [candidate for candidate in candidates if candidate.queued < candidate.threshold]


def _by_match_then_load(candidate: RouteCandidate) -> tuple[int, int, int]:
    load = candidate.load - LOAD_FOR_SAVED * candidate.saved
    return -candidate.matched_blocks, load, candidate.worker
