"""Routing as in MoE-Prefill: one request at a time, and it waits while all workers are saturated.

Section 7, and Eq. 1 of the threshold. The product's routers hold requests for a worker instead
(planner/routing/backlog.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from contracts.routing_messages import Prompt
from planner.routing.router import RouteCandidate, RoutePolicy, Router, by_match_then_load
from planner.routing.worker_state import MARGIN_FRACTION


class RouteDecision(NamedTuple):
    """The choice for a request; cached_tokens: expected. added: the request's work there."""

    worker: int
    cached_tokens: int
    added: int


def prefix_then_load(candidates: Sequence[RouteCandidate]) -> RouteCandidate:
    """Return the longest match, then the least load, then the first."""
    return min(candidates, key=by_match_then_load)


def route_unsaturated(router: Router, prompt: Prompt) -> RouteDecision | None:
    """Place a request by the paper's cascade; None if all workers are saturated."""
    candidates = [each for each in router.candidates(prompt) if each.queued < each.threshold]
    return _book(router, prompt, prefix_then_load(candidates)) if candidates else None


def route(router: Router, prompt: Prompt, policy: RoutePolicy) -> RouteDecision:
    return _book(router, prompt, policy(router.candidates(prompt)))


def _book(router: Router, prompt: Prompt, chosen: RouteCandidate) -> RouteDecision:
    router.assign(prompt, chosen.worker)
    cached_tokens = router.cached_tokens(prompt, chosen.matched_blocks)
    return RouteDecision(chosen.worker, cached_tokens, chosen.added)


def transfer_threshold_flops(
    *, transfer_s: float, layers: int, flops_per_s: float, margin_fraction: float = MARGIN_FRACTION
) -> float:
    """Return FLOPs of a batch whose layers last as long as the slowest expert transfer.

    Eq. 1, reconstructed: (1 + gamma) * L * T_x * P.
    """
    return (1 + margin_fraction) * layers * transfer_s * flops_per_s
