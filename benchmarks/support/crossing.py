"""Where a measured curve crosses a level."""

import itertools
from collections.abc import Sequence


def crossing(level: float, points: Sequence[tuple[float, float]]) -> float:
    """The x at which the line from point to point, and on from the last two, rises to `level`."""
    pieces = list(itertools.pairwise(sorted(points)))
    for (x, y), (next_x, next_y) in pieces:
        if level <= next_y or (next_x, next_y) == pieces[-1][1]:
            return x + (level - y) * (next_x - x) / (next_y - y)
    return float("nan")
