"""How often a micro-batch calls for attention: long prompts tile by tile, short ones and decode in
groups that are padded to their longest, as `kernels/attention.py` does on a CPU (a test holds both
together). Of few sequences that are unlike, each is a call; of many alike ones, many are one.

    prompts of 1,024, 60, 58, 9 tokens        tiles of 128: 8      60 and 58: 1      9: 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

TILE_ROWS = 128
SHORT_SCORES = 1 << 14  # (query, key) pairs of a sequence that is grouped
MIN_FILL = 0.75  # of a group: of its queries, and of its keys
GROUP_SLOTS = 4096  # keys of a group, padding included


class Calls(NamedTuple):
    """Of prompts, tiles and groups; of decode, groups."""

    prompts: float
    decodes: float

    @property
    def total(self) -> float:
        return self.prompts + self.decodes


def calls_of(chunks: Iterable[tuple[int, int]], window: int | None, *, groups_short: bool) -> Calls:
    """Of chunks (start, stop) in a layer that sees `window` tokens (None: all)."""
    tiles = 0
    short: list[tuple[int, int]] = []  # new tokens, context
    widths: list[int] = []
    for start, stop in chunks:
        if stop - start == 1:
            widths.append(_width(stop, window))
        elif groups_short and _is_short(start, stop, window):
            short.append((stop - start, stop))
        else:
            tiles += -(-(stop - start) // TILE_ROWS)
    return Calls(float(tiles + _short_groups(short)), float(_decode_groups(widths)))


def share_of(start: int, stop: int, window: int | None, *, groups_short: bool) -> Calls:
    """What such a chunk adds where there are many like it."""
    if stop - start == 1:
        return Calls(0.0, 1.0 / max(1, GROUP_SLOTS // _width(stop, window)))
    if groups_short and _is_short(start, stop, window):
        return Calls(1.0 / max(1, GROUP_SLOTS // stop), 0.0)
    return Calls(float(-(-(stop - start) // TILE_ROWS)), 0.0)


def _width(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _is_short(start: int, stop: int, window: int | None) -> bool:
    return (window is None or stop <= window) and (stop - start) * stop <= SHORT_SCORES


def _short_groups(short: Sequence[tuple[int, int]]) -> int:
    """Grown in descending order of new tokens; one that is alone is a tile."""
    groups = members = longest = least = most = 0
    for count, context in sorted(short, reverse=True):
        low, high = min(least, context), max(most, context)
        fits = members and count >= MIN_FILL * longest and low >= MIN_FILL * high
        if fits and (members + 1) * high <= GROUP_SLOTS:
            members, least, most = members + 1, low, high
        else:
            groups, members, longest, least, most = groups + 1, 1, count, context, context
    return groups


def _decode_groups(widths: Sequence[int]) -> int:
    """Grown in descending order of what they see."""
    groups = members = longest = 0
    for width in sorted(widths, reverse=True):
        fits = members and (members + 1) * longest <= GROUP_SLOTS
        if fits and width >= MIN_FILL * longest:
            members += 1
        else:
            groups, members, longest = groups + 1, 1, width
    return groups
