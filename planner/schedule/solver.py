"""The plan with the most samples per second, exactly (FinDEP Section 4, Algorithm 1).

Throughput grows with ma and with r1, and the makespan is convex in r2: Theorems 1, 3 and 4, which
hold for both orders (docs/notation.md). So only the pairs (ma, r1) of which neither can grow alone
are searched, and r2 is narrowed down. All pairs are computed at once, as arrays [pairs, values of
r2].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from contracts.plan import Order, Plan
from planner.arrays import Array
from planner.costs.stages import LEAST_ME, Linear, PlanSpec
from planner.schedule.closed_forms import (
    LayerTimes,
    aass_makespan,
    asas_makespan,
    layer_times,
    lower_bound,
    pppipe_makespan,
)

_GRID = 64  # values of r2 computed at once
MakespanForm = Callable[[LayerTimes, Any, int], Any]


class PlannedBatch(msgspec.Struct, frozen=True):
    """A plan with its `samples` of one attention rank in `makespan_ms`."""

    plan: Plan
    makespan_ms: float
    samples: int

    @property
    def samples_per_s(self) -> float:
        """Samples per second of one attention rank."""
        return self.samples / self.makespan_ms * 1e3


class Solution(msgspec.Struct, frozen=True):
    """The best plan and the baselines' best plans.

    lower_bound_ms: no plan within the limits of the spec, in any order of tasks, computes as many
    samples as `best` in less time.
    """

    best: PlannedBatch
    naive: PlannedBatch
    pppipe: PlannedBatch
    lower_bound_ms: float


def solve(spec: PlanSpec) -> Solution:
    """Return the best plan of FinDEP's search space.

    Of equal plans, the one with fewer and larger pieces, and ASAS before AASS.
    """
    pairs = _Pairs(spec)
    forms = {Order.ASAS: asas_makespan}
    if spec.has_shared:  # without, both orders are the same
        forms[Order.AASS] = aass_makespan
    candidates = [_best(pairs, order, form) for order, form in forms.items()]
    best = max(candidates, key=lambda planned: planned.samples_per_s)
    _, bounds = minimise(pairs.objective(lower_bound), pairs.most_r2)
    return Solution(
        best,
        _naive(pairs),
        _pppipe(pairs),
        best.samples * float((bounds / pairs.samples[:, 0]).min()),
    )


class _Pairs:
    """Candidate pairs (ma, r1), r1 ascending, as columns [pairs, 1]."""

    def __init__(self, spec: PlanSpec) -> None:
        ma, r1 = _frontier(spec.max_samples)
        tokens = ma * spec.tokens_per_expert_per_sample
        count = int(np.count_nonzero(tokens >= LEAST_ME))  # ma descends: the first ones
        self.spec = spec
        self.ma, self.r1, self._tokens = ma[:count], r1[:count], tokens[:count]
        self.samples = self.ma * self.r1
        self._attention = _at(spec.stages.attention, self.ma)
        self._shared = _at(spec.shared, self.ma)
        most = np.floor(self._tokens[:, 0] / LEAST_ME)
        self.most_r2 = np.clip(most, 1, spec.max_r2).astype(np.int64)

    def times(self, r2: Array) -> LayerTimes:
        stages, me = self.spec.stages, self._tokens / r2
        group = (_at(stages.a2e, me), _at(stages.expert, me), _at(stages.e2a, me))
        return layer_times(self._attention, self._shared, group, r2)

    def objective(self, form: MakespanForm) -> Callable[[Array], Array]:
        """Return a function from r2 [pairs, n] to `form` in ms."""
        return lambda r2: form(self.times(r2), self.r1, self.spec.num_layers)

    def planned(self, order: Order, index: int, r2: int, makespan_ms: float) -> PlannedBatch:
        ma, r1 = int(self.ma[index, 0]), int(self.r1[index, 0])
        plan = Plan(r1=r1, r2=r2, order=order, ma=ma, me=self.spec.me(ma, r2))
        return PlannedBatch(plan, makespan_ms, ma * r1)


def _at(model: Linear, x: Array) -> Array:
    return model.alpha_ms + model.beta_ms * x


@functools.lru_cache(maxsize=256)
def _frontier(max_samples: int) -> tuple[Array, Array]:
    """Return (ma, r1), r1 * ma <= max_samples, of which neither can grow alone, ma descending."""
    sizes = {max_samples // r1 for r1 in range(1, int(max_samples**0.5) + 2) if r1 <= max_samples}
    sizes |= {max_samples // size for size in sizes}
    ma = np.array(sorted(sizes, reverse=True), dtype=np.float64)[:, None]
    r1 = np.floor_divide(max_samples, ma)
    ma.flags.writeable = r1.flags.writeable = False  # shared by all callers
    return ma, r1


def minimise(objective: Callable[[Array], Array], most: Array) -> tuple[Array, Array]:
    """Return (r2 [pairs], minimum [pairs]) of a convex objective over 1 .. most [pairs].

    The minimum lies between the neighbours of a grid's best point, which are the next bounds.
    """
    low, high = np.ones_like(most), most
    while True:
        width = int((high - low).max())
        steps = min(width + 1, _GRID)
        if width < _GRID:
            r2 = np.minimum(low[:, None] + np.arange(steps), high[:, None])
        else:
            r2 = low[:, None] + (high - low)[:, None] * np.arange(steps) // (steps - 1)
        values = objective(r2)
        at, rows = values.argmin(axis=1), np.arange(len(r2))
        if width < _GRID:
            return r2[rows, at], values[rows, at]
        low, high = r2[rows, np.maximum(at - 1, 0)], r2[rows, np.minimum(at + 1, steps - 1)]


def _best(pairs: _Pairs, order: Order, form: MakespanForm) -> PlannedBatch:
    r2, makespans = minimise(pairs.objective(form), pairs.most_r2)
    index = int((makespans / pairs.samples[:, 0]).argmin())
    return pairs.planned(order, index, int(r2[index]), float(makespans[index]))


def _pppipe(pairs: _Pairs) -> PlannedBatch:
    """Return PPPipe with its own best (ma, r1)."""
    makespans = pairs.objective(pppipe_makespan)(np.ones_like(pairs.ma))[:, 0]
    index = int((makespans / pairs.samples[:, 0]).argmin())
    return pairs.planned(Order.PPPIPE, index, 1, float(makespans[index]))


def _naive(pairs: _Pairs) -> PlannedBatch:
    """Return naive with its own best ma, the largest, which is the first pair."""
    makespans = pairs.objective(pppipe_makespan)(np.ones_like(pairs.ma))[:, 0]
    return pairs.planned(Order.NAIVE, 0, 1, float(makespans[0]))
