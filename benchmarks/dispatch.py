"""Time of cutting a micro-batch into packets, before and after slots had replicas:
`python -m benchmarks.dispatch`.

`before` is the code as it was with contiguous experts alone, kept here to compare with. Beside it:
contiguous experts, experts in any order, and a quarter more slots, in which replicas of the experts
that are wanted most stand at random ranks. Routing of `--skew`: expert number n is wanted like
1 / (n + 1) ** skew, in a random order of experts. Each sample times all four in turn, over
eight different micro-batches (CPU time of the thread); the ratios are of one sample. `load`: pairs
of the busiest rank over the mean, with replicas.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actors.moe.dispatch import RankSlice, plan_dispatch
from benchmarks.harness import Result, write_result
from planner.placement.slots import LayerSlots
from planner.schedule.batch_split import token_group_bounds

TOKENS = (16, 256, 2048, 8192)
TOP_K = (2, 6, 8)
EXPERTS = (16, 64, 256)
RANKS = (2, 4, 8)
BATCHES = 8
LIMITS = {"contiguous": 1.1, "placed": 1.1, "replicas": 1.3}


class BeforeSlots:
    """What dispatch looked up before: each expert in one slot."""

    def __init__(self, placed: LayerSlots) -> None:
        self.bounds, self.count = placed.bounds, placed.count
        self.slot_of_expert = np.array([slots[0] for slots in placed.slots_of_expert], np.int64)


def before(
    topk_ids_TK: np.ndarray,
    topk_weights_TK: np.ndarray,
    token_groups: Sequence[tuple[int, int]],
    placed: BeforeSlots,
) -> list[RankSlice]:
    """As dispatch was."""
    slots, groups = placed.count, len(token_groups)
    slot_TK = placed.slot_of_expert[topk_ids_TK]
    if groups > 1:
        starts = np.array([start for start, _ in token_groups[1:]])
        group_T = np.searchsorted(starts, np.arange(len(topk_ids_TK)), "right")
        slot_TK = slot_TK + group_T[:, None] * slots
    key_N = slot_TK.ravel()
    order_N = np.argsort(key_N, kind="stable")
    counts_GS = np.bincount(key_N, minlength=groups * slots).reshape(groups, slots)
    edges = np.concatenate([[0], np.cumsum(counts_GS.ravel())])
    token_N = order_N // topk_ids_TK.shape[1]
    weights_N = topk_weights_TK.ravel()[order_N]
    slices = []
    for group, (start, stop) in enumerate(token_groups):
        for rank, (low, high) in enumerate(placed.bounds):
            pairs = slice(edges[group * slots + low], edges[group * slots + high])
            if pairs.start == pairs.stop:
                continue
            rows_U, index_N = _before_rows(token_N[pairs] - start, stop - start)
            rows_U = None if rows_U is None else rows_U + start
            counts_e = counts_GS[group, low:high].astype(np.int32)
            slices.append(
                RankSlice(rank, group, start, stop, rows_U, index_N, weights_N[pairs], counts_e)
            )
    return slices


def _before_rows(token_N: np.ndarray, tokens: int) -> tuple[np.ndarray | None, np.ndarray]:
    present = np.zeros(tokens, dtype=np.int32)
    present[token_N] = 1
    position = np.cumsum(present, dtype=np.int32)
    if position[-1] == tokens:
        return None, token_N.astype(np.int32)
    return np.flatnonzero(present), position[token_N] - 1


def layers(rng: np.random.Generator, hot: np.ndarray, ranks: int) -> dict[str, LayerSlots]:
    """hot: experts, the one that is wanted most first."""
    experts = len(hot)
    each = experts // ranks
    bounds = [(rank * each, (rank + 1) * each) for rank in range(ranks)]
    mixed = rng.permutation(experts)
    more = max(1, each // 4)
    wide = [(rank * (each + more), (rank + 1) * (each + more)) for rank in range(ranks)]
    mine = [list(mixed[low:high]) for low, high in bounds]
    for expert in itertools.islice(hot, ranks * more):
        free = [m for m in mine if expert not in m and len(m) < each + more]
        if free:
            free[rng.integers(len(free))].append(expert)
    for have in mine:  # the last of the hot ones may have been everywhere
        have += [e for e in rng.permutation(experts) if e not in have][: each + more - len(have)]
    return {
        "contiguous": LayerSlots(range(experts), bounds),
        "placed": LayerSlots(mixed.tolist(), bounds),
        "replicas": LayerSlots([int(e) for have in mine for e in have], wide),
    }


def routed(rng: np.random.Generator, hot: np.ndarray, tokens: int, top_k: int, skew: float) -> Any:
    """[T, K] different experts of each token."""
    wanted_E = np.empty(len(hot))
    wanted_E[hot] = -skew * np.log(np.arange(1, len(hot) + 1))
    keys = wanted_E + rng.gumbel(size=(tokens, len(hot)))
    return np.ascontiguousarray(np.argsort(-keys, axis=1)[:, :top_k].astype(np.int64))


def measure(
    options: argparse.Namespace, case: tuple[int, int, int, int]
) -> tuple[dict[str, list[float]], float]:
    """Times of a dispatch, and the load with replicas."""
    tokens, top_k, experts, ranks = case
    rng = np.random.default_rng(options.seed)
    hot = rng.permutation(experts)
    batches = [routed(rng, hot, tokens, top_k, options.skew) for _ in range(BATCHES)]
    weights_TK = rng.random(batches[0].shape, np.float32)
    groups = token_group_bounds(tokens, options.r2)
    placed = layers(rng, hot, ranks)
    old = BeforeSlots(placed["contiguous"])
    _check(batches[0], weights_TK, groups, old, placed["contiguous"])
    calls: dict[str, Callable[[Any], Any]] = {
        "before": lambda ids_TK: before(ids_TK, weights_TK, groups, old)
    }
    for name, slots in placed.items():
        calls[name] = partial(_planned, weights_TK, groups, slots)
    repeats = max(1, 512 // (tokens * top_k))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(options.count + 2):
        for name, call in calls.items():
            time_us = _timed(call, batches, repeats)
            if number > 1:  # warm
                samples[name].append(time_us)
    return samples, statistics.mean(_load(ids_TK, placed["replicas"]) for ids_TK in batches)


def _planned(weights_TK: Any, groups: Any, placed: LayerSlots, ids_TK: Any) -> list[RankSlice]:
    return plan_dispatch(ids_TK, weights_TK, groups, placed)


def _load(ids_TK: Any, placed: LayerSlots) -> float:
    lows = [low for low, _ in placed.bounds[1:]]
    ranks_N = np.searchsorted(lows, placed.of_pairs(ids_TK).ravel(), "right")
    pairs_R = np.bincount(ranks_N, minlength=len(placed.bounds))
    return float(pairs_R.max() / pairs_R.mean())


def _check(ids: Any, weights: Any, groups: Any, old: BeforeSlots, new: LayerSlots) -> None:
    for one, other in zip(
        before(ids, weights, groups, old), plan_dispatch(ids, weights, groups, new), strict=True
    ):
        for mine, theirs in zip(one, other, strict=True):
            if not np.array_equal(mine, theirs):  # type: ignore[arg-type]
                raise SystemExit("the packets are no longer those of before")


def _timed(call: Callable[[Any], Any], batches: Sequence[Any], repeats: int) -> float:
    start_s = time.thread_time()
    for _ in range(repeats):
        for ids_TK in batches:
            call(ids_TK)
    return round((time.thread_time() - start_s) / repeats / len(batches) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--skew", type=float, default=0.5)
    parser.add_argument("--r2", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {"over": []}
    for case in itertools.product(options.tokens, TOP_K, EXPERTS, RANKS):
        name = "T={} K={} E={} R={}".format(*case)
        samples[name], load = measure(options, case)
        found = samples[name]
        row = {"before_us": statistics.median(found["before"]), "load": round(load, 3)}
        for variant, limit in LIMITS.items():
            ratios = [x / y for x, y in zip(found[variant], found["before"], strict=True)]
            row[variant] = round(statistics.median(ratios), 3)
            if row[variant] > limit:
                summary["over"].append(f"{name}: {variant} {row[variant]}")
        summary[name] = row
        print(name, *row.values(), flush=True)
    print(len(summary["over"]), "over their limits")
    settings = vars(options) | {"output": None, "limits": LIMITS}
    write_result(
        Result(
            name="dispatch", kind="measured", settings=settings, samples=samples, summary=summary
        ),
        options.output,
    )


if __name__ == "__main__":
    main()
