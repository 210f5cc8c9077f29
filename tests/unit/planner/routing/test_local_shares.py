"""Routing of requests to the worker with their experts: prediction and choice."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement.synthetic import planted
from planner.routing.backlog import Backlog
from planner.routing.local_shares import MAX_TOKENS, LocalShares
from planner.routing.open_requests import token_work
from planner.routing.router import Router, RouterConfig
from planner.routing.saturation import SaturationConfig
from tests.support.routing import BLOCK, prompt_of

WORKERS, TOP_K, EXPERTS = 2, 2, 8


def planted_shares() -> tuple[LocalShares, float]:
    """Return a table in which even ids have their experts on worker 0; and the mean share there."""
    layers, pairs = [], np.zeros(WORKERS)
    for seed in range(3):
        routing, group_E = planted(EXPERTS, TOP_K, WORKERS, stray=0.0, tokens=500, seed=seed)
        holds_EW = group_E[:, None] == np.arange(WORKERS)
        layers.append((routing.counts, holds_EW))
        pairs += routing.counts.times_N @ holds_EW[routing.counts.experts_N]
    return LocalShares(layers, TOP_K), pairs[0] / pairs.sum()


def backlog_of(shares: LocalShares | None, weight: float = 4.0) -> Backlog:
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=1 << 40)
    router = Router(RouterConfig(WORKERS, saturation, block_tokens=BLOCK), token_work)
    if shares is None:
        return Backlog(router, token_work)
    return Backlog(
        router,
        token_work,
        locality=lambda ids, start: [weight * each for each in shares.of_tokens(ids, start)],
    )


def test_share_follows_counts_and_is_the_mean_for_ids_without_any() -> None:
    shares, mean = planted_shares()
    assert shares.of_tokens([2, 4, 6])[0] > 0.9
    assert shares.of_tokens([1, 3])[1] > 0.9
    for unknown in ([80], [10**9, 5000]):
        assert shares.of_tokens(unknown) == pytest.approx([mean, 1 - mean], abs=1e-6)
    assert shares.of_tokens([1, 1, 2, 2], start=2) == shares.of_tokens([2, 2])
    assert shares.of_tokens([2, 2], start=2) == shares.of_tokens([]) == [0.0, 0.0]


def test_only_evenly_spaced_tokens_of_a_long_prompt_are_looked_up() -> None:
    class Counted(list[int]):
        seen = 0

        def __getitem__(self, which: slice) -> list[int]:  # type: ignore[override]
            found = super().__getitem__(which)
            self.seen += len(found)
            return found

    shares, _ = planted_shares()
    ids = Counted([1, 2] * 50_000 + [2] * 100_000)
    found = shares.of_tokens(ids, start=1)
    assert 0 < ids.seen <= MAX_TOKENS
    assert found == pytest.approx(shares.of_tokens(ids[:1000] + ids[-1000:]), abs=0.02)


def test_prefix_wins_over_experts_and_experts_over_small_differences_of_load() -> None:
    shares, _ = planted_shares()
    backlog = backlog_of(shares)
    document = [2] * 4 * BLOCK
    odd = [1] * BLOCK
    homes: dict[int, int] = {}
    for number, tokens in enumerate((document, [*document, *odd], odd, [3] * BLOCK, [5] * BLOCK)):
        backlog.put(prompt_of(tokens, number), token_ids=tokens)
        homes |= {each.prompt.key.number: each.decision.worker for each in backlog.take()}
    assert homes == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    for number in range(10, 30):  # without a limit worker 1 would get them all
        tokens = [2 * number + 1] * BLOCK
        backlog.put(prompt_of(tokens, number), token_ids=tokens)
        homes |= {each.prompt.key.number: each.decision.worker for each in backlog.take()}
    assert {homes[number] for number in range(10, 30)} == {0, 1}


def test_requests_have_more_local_pairs_at_equal_load() -> None:
    """Requests mix both kinds of ids; the pairs that are counted are drawn anew, with strays."""
    shares, _ = planted_shares()
    rng = np.random.default_rng(0)
    routing, group_E = planted(EXPERTS, TOP_K, WORKERS, stray=0.3, tokens=8000, seed=9)
    rows = []
    for _ in range(100):
        part, length = rng.random(), int(rng.integers(8, 60))
        kinds = rng.random(length) < part
        rows.append([int(rng.choice(np.flatnonzero(routing.ids_P % 2 == kind))) for kind in kinds])
    rates, loads = [], []
    for backlog in (backlog_of(None), backlog_of(shares)):
        local, load_W = 0, np.zeros(WORKERS)
        for number, row in enumerate(rows):
            ids = routing.ids_P[row].tolist()
            backlog.put(prompt_of([number, *ids], number), token_ids=ids)
            (sent,) = backlog.take()
            local += int((group_E[routing.sets_PK[row]] == sent.decision.worker).sum())
            load_W[sent.decision.worker] += len(row)
        rates.append(local / (TOP_K * load_W.sum()))
        loads.append(load_W.max() / load_W.mean())
    assert rates[0] == pytest.approx(0.5, abs=0.04)
    assert rates[1] > rates[0] + 0.07
    assert max(loads) < 1.1
