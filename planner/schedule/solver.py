"""The plan with the most samples per second, exactly (FinDEP Section 4, Algorithm 1).

Throughput grows with ma and with r1, and the makespan is convex in r2: Theorems 1, 3 and 4, which
hold for both orders (docs/notation.md). So only the pairs (ma, r1) of which neither can grow alone
are searched, and r2 is narrowed down. All pairs are computed at once, as arrays [pairs, values of
r2]. Makespans of equal micro-batches are exact in closed form.

Symbols as in docs/notation.md: a, s, c1, e, c2 are the times of attention, shared expert, A2E,
experts and E2A; X = a + s; Y = max(c1, e, c2); P = r2*Y; F = max(X, P); Q = c1 + e + c2 + (r2 -
1)*Y, from the end of attention to the last reply; G = a + Q.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from contracts.plan import Order, Plan
from planner.arrays import Array
from planner.costs.stages import LEAST_ME, Linear, PlanSpec

Values = float | Array


class LayerTimes(NamedTuple):
    """Times in ms of one layer's tasks of a micro-batch; trip: Q. period: P."""

    attention: Values
    shared: Values
    trip: Values
    period: Values


def layer_times(
    attention: Values, shared: Values, group: tuple[Values, Values, Values], r2: Values
) -> LayerTimes:
    """Return the times; `group`: ms of A2E, experts and E2A of one of r2 equal token groups."""
    slowest = np.maximum(np.maximum(group[0], group[1]), group[2])
    period = slowest * r2
    return LayerTimes(attention, shared, group[0] + group[1] + group[2] - slowest + period, period)


def asas_makespan(times: LayerTimes, r1: Values, num_layers: int) -> Any:
    """Return the makespan under ASAS (FinDEP Eq. 13, with (r2 - 1)*Y counted once)."""
    x, g = times.attention + times.shared, times.attention + times.trip
    f = np.maximum(x, times.period)
    return (num_layers - 1) * np.maximum(g, r1 * f) + np.maximum(x, g) + (r1 - 1) * f


def pppipe_makespan(times: LayerTimes, r1: Values, num_layers: int) -> Any:
    """Return the makespan with shared experts as part of attention; naive for r1 = 1."""
    whole = times.attention + times.shared
    return asas_makespan(times._replace(attention=whole, shared=0.0), r1, num_layers)


def aass_makespan(times: LayerTimes, r1: Values, num_layers: int) -> Any:
    """Return the makespan under AASS, for which the paper prints no form.

    Let u(t) be when the attention group is done with layer t - 1, and d(t) when the first
    micro-batch is back from layer t. Replies come every m = max(a, P), so (max-plus, T times)

        u' = max(u + r1*X,    d + (r1 - 1)*m + a + r1*s)      [ loop_u   cross_u ]
        d' = max(u + a + Q,   d + max(a + Q, r1*P))           [ cross_d  loop_d  ]

    from u = 0, d = -inf. A power of this 2x2 matrix is the heaviest walk of that many steps, and
    round trips u -> d -> u weigh linearly in their number: none, or as many as possible. A walk
    that ends in u is heaviest as T loops there.
    """
    a, s, trip, _ = times
    spread = (r1 - 1) * np.maximum(a, times.period)
    busy, back = r1 * (a + s), a + trip
    loop = np.maximum(np.maximum(busy, back), r1 * times.period)
    round_trip = back + spread + a + r1 * s
    pairs, odd = divmod(num_layers - 1, 2)
    steps = np.maximum((num_layers - 1) * loop, pairs * round_trip + odd * loop)
    return np.maximum(num_layers * busy, back + steps + spread)


def lower_bound(times: LayerTimes, r1: Values, num_layers: int) -> Any:
    """Return a time in ms that no order of these tasks can beat.

    With N = T * r1, the maximum of

        N*X              the attention group's work
        N*X - r1*s + Q   the last attention follows all work but the last layer's shared experts,
                         and its replies are outstanding
        G + (N - 1)*P    the slowest server's work, between the first attention and the last reply
        T * max(X, G)    one micro-batch alone

    ASAS is within 1 + 1/T of it: its form is at most T * max(G, r1*F) + max(G, F).
    """
    work = num_layers * r1 * (times.attention + times.shared)
    trip = times.attention + times.trip
    behind = np.maximum(work, work - r1 * times.shared + times.trip)
    alone = num_layers * np.maximum(times.attention + times.shared, trip)
    return np.maximum(np.maximum(behind, alone), trip + (num_layers * r1 - 1) * times.period)


_GRID = 64  # values of r2 computed at once
MakespanForm = Callable[[LayerTimes, Any, int], Any]


class PlannedBatch(msgspec.Struct, frozen=True):
    """A plan with its `samples` of one attention rank in `makespan_ms`.

    trial: another plan, to be measured.
    """

    plan: Plan
    makespan_ms: float
    samples: int
    trial: Plan | None = None

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
    least_ms = best.samples * float((bounds / pairs.samples[:, 0]).min())
    return Solution(best, *_baselines(pairs), least_ms)


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


def _baselines(pairs: _Pairs) -> tuple[PlannedBatch, PlannedBatch]:
    """Return naive with its best ma, that of the first pair, and PPPipe with its best (ma, r1)."""
    makespans = pairs.objective(pppipe_makespan)(np.ones_like(pairs.ma))[:, 0]
    best = int((makespans / pairs.samples[:, 0]).argmin())
    kinds = ((Order.NAIVE, 0), (Order.PPPIPE, best))
    naive, pppipe = (pairs.planned(order, n, 1, float(makespans[n])) for order, n in kinds)
    return naive, pppipe
