"""Plan of attention that reads K and V where they are in the pool (kernels/paged_attention.py).

A tile is consecutive rows of one sequence. The context of a row in decode is cut into splits of
fixed length, from the first position that the row sees, and their results are combined: so the
device is busy with few sequences too, and a row's bits depend on its own context only.

    blocks of a sequence   [ 7 | 2 | 9 ]     a row in decode at position 9, blocks of 4 tokens
    splits of 8 keys       |--- 0 ---|- 1 -|

Shapes: B sequences, W blocks of the longest, N tiles, S splits of all tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention_ops import SequenceRows
from kernels.device import upload

SPLIT_KEYS = 512
TILE_COLUMNS = 5
TILE_HEADS = 16  # query heads of a program, all of one KV head
_QUERIES = 64  # of a program for a prompt: rows times query heads; with latents half


class Pages(NamedTuple):
    """Block tables of a batch: blocks_BW int32, of block_tokens pool slots each."""

    blocks_BW: Tensor
    block_tokens: int


class Seen(NamedTuple):
    """Keys that a row at position p sees, and the length of a split.

    They begin at p - window + 1, or if chunked at the last multiple of window, and end at p.
    window 0: all up to p.
    """

    window: int = 0
    chunked: bool = False
    split_keys: int = SPLIT_KEYS

    def lowest(self, position: int) -> int:
        if not self.window:
            return 0
        if self.chunked:
            return position - position % self.window
        return max(0, position - self.window + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class PagedPart:
    """Tiles of equal most rows.

    tiles int32 [N, TILE_COLUMNS]: first row, rows, position of the first row, sequence, and the
    place of its first split's result, -1 if it has one split. longest: splits of a tile. splits: S.
    planned: what a library has planned, by kind of attention.
    """

    tiles: Tensor
    host_tiles: NDArray[np.int32]
    pages: Pages
    seen: Seen
    tile_rows: int
    longest: int
    splits: int
    planned: dict[str, Any] = dataclasses.field(default_factory=dict)


class PagedPlan(NamedTuple):
    """Parts for rows first .. last-1 of a batch."""

    parts: tuple[PagedPart, ...]
    first: int
    last: int


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def split_keys(entry_bytes: int, result_elements: int) -> int:
    """Return the length of a split whose result is at most a sixteenth of its keys and values.

    entry_bytes: of a token in the pool. result_elements: float32, of all heads.
    """
    keys = SPLIT_KEYS
    while keys * entry_bytes < 16 * 4 * result_elements:
        keys *= 2
    return keys


def plan_paged(
    sequences: Sequence[tuple[int, SequenceRows]],
    pages: Pages,
    seen: Seen,
    group: int,
    device: torch.device,
) -> PagedPlan:
    """Plan sequences, each with its row of the block tables.

    group: query heads of a KV head. Rows in decode and those of prompts are parts of their own:
    a kernel's bits depend on its size.
    """
    first = min(seq.first for _, seq in sequences)
    queries = _QUERIES if group <= TILE_HEADS else _QUERIES // 2
    tile_rows = queries // min(TILE_HEADS, next_power_of_2(group))
    decode = tiles_of([each for each in sequences if each[1].count == 1], 1, first, seen)
    prompt = tiles_of([each for each in sequences if each[1].count > 1], tile_rows, first, seen)
    kinds = [(1, *decode), (tile_rows, *prompt)]
    kinds = [each for each in kinds if len(each[1])]
    uploaded = upload([tiles for _, tiles, *_ in kinds], device)
    parts = tuple(
        PagedPart(on_device, tiles, pages, seen, rows, longest, splits)
        for on_device, (rows, tiles, longest, splits) in zip(uploaded, kinds, strict=True)
    )
    return PagedPlan(parts, first, max(seq.first + seq.count for _, seq in sequences))


def tiles_of(
    sequences: Sequence[tuple[int, SequenceRows]], rows: int, before: int, seen: Seen
) -> tuple[NDArray[np.int32], int, int]:
    """Return tiles of at most `rows` rows, the splits of the longest, and those of all."""
    tiles, longest, splits = list[tuple[int, ...]](), 1, 0
    for table, seq in sequences:
        for row in range(0, seq.count, rows):
            count, position, place = min(rows, seq.count - row), seq.start + row, -1
            cut = -(-(position + 1 - seen.lowest(position)) // seen.split_keys)
            if seq.count == 1 and cut > 1:
                place, splits, longest = splits, splits + cut, max(longest, cut)
            tiles.append((seq.first - before + row, count, position, table, place))
    return np.array(tiles, np.int32).reshape(-1, TILE_COLUMNS), longest, splits
