"""Work that may be interrupted: a generator that yields where others may go first.

Its frame is the parked state, so that what it gives does not depend on what ran between its yields:
the same operations in the same order, equal bits (QLLM, Section 3: preemption at experts).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from torch import Tensor

TILE_ROWS = 512  # of a batch, between two yields: a few milliseconds of a product
LIGHT_ROWS = 2048  # of what is no product, or a narrow one

T = TypeVar("T")

Steps = Generator[None, None, T]


def run_to_end(steps: Steps[T]) -> T:
    """Runs it to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            value: T = done.value
            return value


def row_tiles(x_TD: Tensor, size: int | None = None) -> Iterator[slice]:
    """Of the rows of x, so many at a time (None: TILE_ROWS); all of them on a GPU, where a step is
    only queued."""
    rows = x_TD.shape[0]
    size = (size or TILE_ROWS) if x_TD.device.type == "cpu" else max(1, rows)
    return (slice(first, min(rows, first + size)) for first in range(0, rows, size))


def map_tiles(
    row_function: Callable[[Tensor], Tensor], x_TD: Tensor, size: int | None = None
) -> Steps[Tensor]:
    """of_rows(x), which takes each row for itself. It yields between two tiles."""
    tiles = list(row_tiles(x_TD, size))
    if len(tiles) <= 1:
        return row_function(x_TD)
    out: Tensor | None = None
    for tile in tiles:
        part = row_function(x_TD[tile])
        if out is None:
            out = part.new_empty((x_TD.shape[0], *part.shape[1:]))
        out[tile] = part
        if tile.stop < x_TD.shape[0]:
            yield
    assert out is not None
    return out


def add_tiled(total_TD: Tensor, part_TD: Tensor) -> Steps[None]:
    """total += part, tile by tile: where dtypes differ torch makes temporaries, and in memory that
    is touched for the first time those of a whole batch cost more than a layer's products."""
    for tile in row_tiles(total_TD):
        total_TD[tile] += part_TD[tile]
        if tile.stop < total_TD.shape[0]:
            yield


def zero_tiled(total_TD: Tensor) -> Steps[Tensor]:
    """total, zero, tile by tile: touched for the first time a page costs a microsecond or two."""
    for tile in row_tiles(total_TD):
        total_TD[tile].zero_()
        if tile.stop < total_TD.shape[0]:
            yield
    return total_TD
