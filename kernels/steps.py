"""Interruptible work: a generator that yields where other work may run first.

Its frame is the suspended state, so results do not depend on what ran in between: the same
operations in the same order give equal bits (QLLM, Section 3: preemption at experts).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from torch import Tensor

TILE_ROWS = 512  # between two yields: a few milliseconds of a product
LIGHT_ROWS = 2048  # for operations without a large product

T = TypeVar("T")

Steps = Generator[None, None, T]


def run_to_end(steps: Steps[T]) -> T:
    """Run all steps and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            value: T = done.value
            return value


def row_tiles(x_TD: Tensor, size: int | None = None) -> Iterator[slice]:
    """Return slices of `size` rows of x (None: TILE_ROWS). A GPU only queues: one slice."""
    rows = x_TD.shape[0]
    size = (size or TILE_ROWS) if x_TD.device.type == "cpu" else max(1, rows)
    return (slice(first, min(rows, first + size)) for first in range(0, rows, size))


def map_tiles(
    row_function: Callable[[Tensor], Tensor], x_TD: Tensor, size: int | None = None
) -> Steps[Tensor]:
    """Return row_function(x), computed tile by tile. It must treat rows independently."""
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
    """Add part to total tile by tile.

    With different dtypes torch makes temporaries, which cost more than a layer's products in memory
    that is touched for the first time.
    """
    for tile in row_tiles(total_TD):
        total_TD[tile] += part_TD[tile]
        if tile.stop < total_TD.shape[0]:
            yield


def zero_tiled(total_TD: Tensor) -> Steps[Tensor]:
    """Zero and return total tile by tile: the first touch of a page costs a microsecond or two."""
    for tile in row_tiles(total_TD):
        total_TD[tile].zero_()
        if tile.stop < total_TD.shape[0]:
            yield
    return total_TD
