"""Ranks filled to one level of pairs."""

from __future__ import annotations

from collections.abc import Sequence

Group = tuple[tuple[int, ...], int]  # ranks, and how many items go to these


def levelled(groups: Sequence[Group], pairs: int, load_R: list[int]) -> list[list[int]]:
    """How many of its items every group gives to each of its ranks. groups: of items of so many
    pairs each. load_R grows. All are looked at once more when all have their items."""
    parts = [shares(ranks, items, pairs, load_R) for ranks, items in groups]
    for number, (ranks, items) in enumerate(groups if len(groups) > 1 else ()):
        for rank, part in zip(ranks, parts[number], strict=True):
            load_R[rank] -= part * pairs
        parts[number] = shares(ranks, items, pairs, load_R)
    return parts


def shares(ranks: tuple[int, ...], items: int, pairs: int, load_R: list[int]) -> list[int]:
    """How many of the items, of that many pairs each, every rank gets: the least loaded are filled
    to one level. load_R grows."""
    if len(ranks) == 2:
        one, other = ranks
        first = (items * pairs + load_R[other] - load_R[one] + pairs) // (2 * pairs)
        first = 0 if first < 0 else items if first > items else first
        load_R[one] += first * pairs
        load_R[other] += (items - first) * pairs
        return [first, items - first]
    heights = [load_R[rank] for rank in ranks]
    parts = [0] * len(ranks)
    if items > len(ranks):
        level = _level(heights, items * pairs)
        parts = [max(0, (level - height) // pairs) for height in heights]
        heights = [height + part * pairs for height, part in zip(heights, parts, strict=True)]
    for _ in range(items - sum(parts)):
        lowest = heights.index(min(heights))
        parts[lowest] += 1
        heights[lowest] += pairs
    for rank, height in zip(ranks, heights, strict=True):
        load_R[rank] = height
    return parts


def _level(heights: list[int], pairs: int) -> int:
    """To which so many pairs fill the lowest."""
    filled, level, count = pairs, 0, 0
    for height in sorted(heights):
        if count and height * count >= filled:
            break
        filled, count = filled + height, count + 1
        level = filled // count
    return level
