"""Exact makespans of equal micro-batches in closed form, for numbers and arrays.

Symbols as in docs/notation.md: a, s, c1, e, c2 are the times of attention, shared expert, A2E,
experts and E2A; X = a + s; Y = max(c1, e, c2); P = r2*Y; F = max(X, P); Q = c1 + e + c2 + (r2 -
1)*Y, from the end of attention to the last reply; G = a + Q.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.arrays import Array

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
    """Return the makespan under ASAS (FinDEP Eq. 13, with (r2 - 1)*Y counted once).

    (T - 1) * max(G, r1*F) + max(X, G) + (r1 - 1)*F
    """
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
    that ends in u is heaviest as T loops there. With B the heavier loop, C a round trip, k = T - 1:

        max(T * r1*X,  a + Q + max(k*B, k//2 * C + k%2 * B) + (r1 - 1)*m)
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
