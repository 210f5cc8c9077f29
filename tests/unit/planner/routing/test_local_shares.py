"""Routing of requests to the worker with their experts: prediction and choice."""

import numpy as np
import pytest

from benchmarks.placement.synthetic import planted
from planner.placement.routing import LocalShares
from planner.routing.backlog import Backlog, HeldRequest
from planner.routing.open_requests import token_work
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import SaturationConfig
from tests.support.routing import BLOCK, prompt_of

WORKERS, TOP_K, EXPERTS = 2, 2, 8


def planted_shares() -> tuple[LocalShares, float]:
    """Return a table in which even ids have their experts on worker 0; and the mean share there."""
    layers, even = [], []
    for seed in range(3):
        routing, group_E = planted(EXPERTS, TOP_K, WORKERS, stray=0.0, tokens=500, seed=seed)
        layers.append((routing.counts, group_E[:, None] == np.arange(WORKERS)))
        even.append((group_E[routing.sets_PK] == 0).mean())
    return LocalShares(layers, TOP_K), float(np.mean(even))


def backlog_of(shares: LocalShares, weight: float) -> Backlog:
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=1 << 40)
    router = Router(RouterConfig(WORKERS, saturation, block_tokens=BLOCK), token_work)
    locality = lambda *tokens: [weight * share for share in shares.of_tokens(*tokens)]  # noqa: E731
    return Backlog(router, token_work, locality=locality)


def test_share_follows_counts_and_is_the_mean_for_ids_without_any() -> None:
    shares, mean = planted_shares()
    assert shares.of_tokens([2, 4, 6])[0] > 0.9
    assert shares.of_tokens([1, 3])[1] > 0.9
    for unknown in ([80], [10**9, 5000]):
        assert shares.of_tokens(unknown) == pytest.approx([mean, 1 - mean], abs=1e-6)
    assert shares.of_tokens([1, 1, 2, 2], start=2) == shares.of_tokens([2, 2])
    assert shares.of_tokens([2, 2], start=2) == shares.of_tokens([]) == [0.0, 0.0]
    long = range(10**12)  # only MAX_LOOKED_UP of it are made
    assert shares.of_tokens(long, start=1) == pytest.approx([mean, 1 - mean], abs=0.01)
    assert shares.of_tokens([1, 2] * 999) == pytest.approx(shares.of_tokens([1, 2]), abs=0.01)


def test_prefix_wins_over_experts_and_load_bounds_their_weight() -> None:
    backlog = backlog_of(planted_shares()[0], 4.0)
    document, odd, homes = [2] * 4 * BLOCK, [1] * BLOCK, []
    more = [[n] * BLOCK for n in range(3, 79, 2)]  # without a limit worker 1 would get them all
    for number, tokens in enumerate((document, [*document, *odd], odd, *more)):
        backlog.put(HeldRequest(prompt_of(tokens, number), token_ids=tokens))
        homes += [each.worker for each in backlog.take()]
    assert homes[:5] == [0, 0, 1, 1, 1]
    assert 10 < sum(homes) < len(homes) - 10


def test_requests_have_more_local_pairs_at_equal_load() -> None:
    """Requests mix both kinds of ids; the pairs that are counted are drawn anew, with strays."""
    shares, _ = planted_shares()
    rng = np.random.default_rng(0)
    routing, group_E = planted(EXPERTS, TOP_K, WORKERS, stray=0.3, tokens=8000, seed=9)
    order = np.argsort(routing.ids_P % 2 + rng.normal(0, 0.7, 8000))
    rows = np.split(order, np.sort(rng.choice(8000, 199, replace=False)))
    rng.shuffle(rows)
    rates, loads = [], []
    for weight in (0.0, 4.0):
        backlog = backlog_of(shares, weight)
        local, load_W = 0, np.zeros(WORKERS)
        for number, row in enumerate(rows):
            ids = routing.ids_P[row].tolist()
            backlog.put(HeldRequest(prompt_of([number, *ids], number), token_ids=ids))
            (sent,) = backlog.take()
            local += int((group_E[routing.sets_PK[row]] == sent.worker).sum())
            load_W[sent.worker] += len(row)
        rates.append(local / (TOP_K * load_W.sum()))
        loads.append(load_W.max() / load_W.mean())
    assert rates[1] > rates[0] + 0.07
    assert max(loads) < 1.1
