"""When traffic turned from one kind to another, by the experts that tokens go to.

    A A A A A A B B B      one turn, where B begins: B is what is coming
    A A B B A A B B        several: the kinds are one mixture
    A A A A A A A A        none

A turn is where runs of traffic differ much more between the two sides than within them (the ratio
of variances), and each is more like its own side: one run that is unlike all others is no turn.
Texts of one kind differ as well: they say themselves by how much. Pure.

Shapes: B runs of traffic, one after the other, N (layer, expert).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RATIO = 8.0
"""Of the variance between two sides to that within them. Runs of one kind have 1, the greatest over
all places 2 or 3."""
LEAST_RUNS = 6  # of fewer nothing is said
_SIDE = 3  # runs, at least


def turn_of(counts_BN: Floats) -> int | None:
    """The first run of the newer kind, where traffic turned once; None where it did not, or more
    than once. counts_BN: pairs; every run has some."""
    shares_BN = counts_BN / counts_BN.sum(1, keepdims=True)
    found = _place(shares_BN)
    if found is None or any(_place(side) for side in (shares_BN[:found], shares_BN[found:])):
        return None
    return found


def _place(shares_BN: Floats) -> int | None:
    """Where the two sides differ most, if they differ."""
    B = len(shares_BN)
    if B < LEAST_RUNS:
        return None
    left_B = np.arange(1, B)[:, None]
    sums_BN = np.cumsum(shares_BN, 0)
    apart_BN = sums_BN[:-1] / left_B - (sums_BN[-1] - sums_BN[:-1]) / (B - left_B)
    between_B = (apart_BN**2).sum(1) * (left_B * (B - left_B) / B)[:, 0]
    whole = float(((shares_BN - shares_BN.mean(0)) ** 2).sum())
    between_B[: _SIDE - 1] = between_B[B - _SIDE :] = 0.0
    at = int(between_B.argmax())
    within = max(whole - between_B[at], 1e-9 * whole) / (B - 2)
    if between_B[at] <= RATIO * within:
        return None
    return at + 1 if _is_clean(shares_BN, at + 1) else None


def _is_clean(shares_BN: Floats, at: int) -> bool:
    """Whether all runs are more like their own side, but the two where the sides meet: traffic may
    turn in the midst of one."""
    before_N, after_N = shares_BN[:at].mean(0), shares_BN[at:].mean(0)
    nearer_B = ((shares_BN - before_N) ** 2).sum(1) < ((shares_BN - after_N) ** 2).sum(1)
    return bool(nearer_B[: at - 1].all() and not nearer_B[at + 1 :].any())
