"""Choice of the worker for a prefill-only request: MoE-Prefill's rule and variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LOAD_FOR_SAVED = 8  # extra load that is accepted per unit of saved work


class RouteCandidate(NamedTuple):
    """A worker that accepts requests, and the load a request would meet there.

    matched_blocks: leading blocks that are committed or pending. added: work of the request. load:
    work of open requests. queued: the part of it in no running batch. threshold: queued work from
    which on the worker is saturated. saved: work of further tokens that the worker has in a block
    that starts alike. All in one unit; an LS request counts no BE work.
    """

    worker: int
    matched_blocks: int
    added: int
    load: int
    queued: int
    threshold: int
    saved: int = 0


RoutePolicy = Callable[[Sequence[RouteCandidate], int], RouteCandidate | None]

"""(candidates by worker, at least one; requests routed before) → choice, or None to wait."""


def prefix_then_load(candidates: Sequence[RouteCandidate], turn: int) -> RouteCandidate | None:
    """Return the unsaturated worker with the longest match, then the least load, then the first.

    MoE-Prefill, Section 7.
    """
    open_ones = unsaturated(candidates)
    return min(open_ones, key=_by_match_then_load) if open_ones else None


def prefix_within_round(candidates: Sequence[RouteCandidate], turn: int) -> RouteCandidate:
    """Return the choice for a request that may wait: a worker is full one threshold above the best.

    Siblings then stay with a prefix that costs more to recompute than to wait for.
    """
    return _near(candidates, lambda soonest, threshold: soonest + threshold)


def prefix_while_busy(candidates: Sequence[RouteCandidate], turn: int) -> RouteCandidate:
    """Return the choice for a background request: a worker is full at twice the best completion.

    Later requests fill the other workers' queues; without any, those take over (`Backlog.take`).
    """
    return _near(candidates, lambda soonest, threshold: soonest + max(soonest, threshold))


def _near(candidates: Sequence[RouteCandidate], limit: Callable[[int, int], int]) -> RouteCandidate:
    """Return the longest match, then the least load, among workers below `limit`."""
    soonest = min(c.load + c.added for c in candidates)
    near = [c for c in candidates if c.load + c.added < limit(soonest, c.threshold)]
    return min(near, key=_by_match_then_load)


def unsaturated(candidates: Sequence[RouteCandidate]) -> list[RouteCandidate]:
    """Return the candidates below the threshold (F3 of the paper, for the next batch)."""
    return [candidate for candidate in candidates if candidate.queued < candidate.threshold]


def _by_match_then_load(candidate: RouteCandidate) -> tuple[int, int, int]:
    load = candidate.load - LOAD_FOR_SAVED * candidate.saved
    return -candidate.matched_blocks, load, candidate.worker
