"""Plans outside of FinDEP's search space, on the same stage models.

uneven          7 samples as 4 + 3, where the paper has 7 x 1, 1 x 7 or leaves one out
chunked         a sample cut along its length: several micro-batches of one long sample
late shared     deferred shared experts, so that attention and A2E run earlier
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator

from contracts.plan import Plan
from planner.costs.stages import PlanSpec
from planner.schedule.plan_search import Cut, search
from planner.schedule.schedule import pieces_of
from planner.schedule.solver import PlannedBatch, solve

_MOST_MICRO_BATCHES = 16  # more cost more launches than they gain
CHUNK_COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 16)


class PlanExtension(enum.Flag):
    """Kinds of plans beyond the paper."""

    UNEVEN = enum.auto()
    CHUNKED = enum.auto()
    LATE_SHARED = enum.auto()


ALL_EXTENSIONS = PlanExtension.UNEVEN | PlanExtension.CHUNKED | PlanExtension.LATE_SHARED


def solve_extended(spec: PlanSpec, kinds: PlanExtension = ALL_EXTENSIONS) -> PlannedBatch:
    """Return the best plan with the given kinds, or FinDEP's best where none is better.

    A kind for which the spec lacks numbers is left out.
    """
    chunked = PlanExtension.CHUNKED in kinds and spec.attention_quadratic_fraction is not None
    splits = list(_splits(spec.max_samples, uneven=PlanExtension.UNEVEN in kinds))
    cuts = [_cut(spec, sizes, ()) for sizes in splits]
    if chunked:
        cuts.extend(
            _cut(spec, sizes, ends)
            for sizes in splits
            for ends in _chunk_ends(spec.attention_quadratic_fraction or 0.0)
            if len(sizes) * len(ends) <= _MOST_MICRO_BATCHES
        )
    return search(
        spec, cuts, late_shared=PlanExtension.LATE_SHARED in kinds, start=solve(spec).best
    )


def _cut(spec: PlanSpec, sizes: tuple[int, ...], ends: tuple[float, ...]) -> Cut:
    plan = Plan(
        r1=len(sizes) * max(1, len(ends)),
        ma=max(sizes),
        micro_batch_samples=sizes if min(sizes) < max(sizes) else (),
        sequence_chunks=ends,
    )
    return Cut(plan, pieces_of(spec, plan, sizes), sum(sizes))


def _splits(max_samples: int, *, uneven: bool) -> Iterator[tuple[int, ...]]:
    """Yield sizes of micro-batches with as many samples as fit."""
    for r1 in range(1, min(max_samples, _MOST_MICRO_BATCHES) + 1):
        if uneven and max_samples % r1:
            sizes = _even(max_samples, r1)
            yield sizes
            yield sizes[::-1]
        else:
            yield (max_samples // r1,) * r1


def _even(samples: int, parts: int) -> tuple[int, ...]:
    size, more = divmod(samples, parts)
    return (size + 1,) * more + (size,) * (parts - more)


def equal_ends(chunks: int) -> tuple[float, ...]:
    """Return `sequence_chunks` of equal length."""
    return tuple(index / chunks for index in range(1, chunks + 1))


def _chunk_ends(quadratic: float) -> Iterator[tuple[float, ...]]:
    """Yield cuts into equal lengths, and into equal attention with longer early chunks.

    Attention up to v is (1 - q) * v + q * v^2 of all, solved for v.
    """
    for chunks in CHUNK_COUNTS:
        yield equal_ends(chunks)
        if quadratic > 0:
            linear = 1 - quadratic
            equal = [
                ((linear * linear + 4 * quadratic * part) ** 0.5 - linear) / (2 * quadratic)
                for part in equal_ends(chunks)[:-1]
            ]
            if all(a < b for a, b in itertools.pairwise((0.0, *equal, 1.0))):
                yield (*equal, 1.0)
