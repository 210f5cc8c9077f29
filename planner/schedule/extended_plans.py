"""Plans outside of FinDEP's search space, on the same stage models.

uneven          7 samples as 4 + 3, where the paper has 7 x 1, 1 x 7 or leaves one out
chunked         a sample cut along its length: several micro-batches of one long sample
late shared     deferred shared experts, so that attention and A2E run earlier

There is no closed form for unequal micro-batches, but a fast lower bound: `search` tries plans in
the order of their bounds until a bound exceeds the best makespan. The result is the exact optimum.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from contracts.plan import Order, Plan
from planner.arrays import Array
from planner.costs.stages import LEAST_ME, PlanSpec
from planner.schedule.recurrence import makespan_ms
from planner.schedule.schedule import Piece, pieces_of, schedule_of_pieces
from planner.schedule.solver import PlannedBatch, solve

_FINE = 16  # all values of r2 up to here are tried, beyond it every quarter octave
_LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # and r1 - 1


class Cut(NamedTuple):
    """A cut of a batch into micro-batches; r2 and the order of `plan` are open."""

    plan: Plan
    pieces: Sequence[Piece]
    samples: int


class _Candidate(NamedTuple):
    bound_ms_per_sample: float
    cut: int
    r2: int


def search(
    spec: PlanSpec,
    cuts: Sequence[Cut],
    *,
    late_shared: bool = False,
    start: PlannedBatch | None = None,
) -> PlannedBatch:
    """Return the plan of least time per sample, or `start` if none is better.

    Searches all cuts, values of r2, the paper's two orders and, with late_shared, lags of shared
    experts. Raises ValueError without a candidate.
    """
    best = start
    for candidate in sorted(_candidates(spec, cuts)):
        if best and candidate.bound_ms_per_sample * best.samples >= best.makespan_ms:
            break
        cut = cuts[candidate.cut]
        for plan in _orders(spec, cut, candidate.r2, late_shared=late_shared):
            schedule = schedule_of_pieces(spec, plan, cut.pieces)
            planned = PlannedBatch(plan, makespan_ms(schedule), cut.samples)
            if best is None or planned.samples_per_s > best.samples_per_s * (1 + 1e-12):
                best = planned
    if best is None:
        raise ValueError("cuts=[]: there is no batch to plan")
    return best


def _orders(spec: PlanSpec, cut: Cut, r2: int, *, late_shared: bool) -> Iterator[Plan]:
    """Yield the cut with r2 token groups under every order; `me` is of the mean micro-batch."""
    mean_amount = sum(piece.amount for piece in cut.pieces) / len(cut.pieces)
    plan = msgspec.structs.replace(cut.plan, r2=r2, me=spec.me(mean_amount, r2))
    yield plan
    if not spec.has_shared:
        return
    yield msgspec.structs.replace(plan, order=Order.AASS)
    if late_shared:
        most = plan.r1 - 1
        for lag in sorted({lag for lag in (*_LAGS, most) if 1 <= lag <= most}):
            yield msgspec.structs.replace(plan, shared_lag=lag)


def _candidates(spec: PlanSpec, cuts: Iterable[Cut]) -> Iterator[_Candidate]:
    for index, cut in enumerate(cuts):
        r2 = _group_counts(spec, cut)
        bounds = batch_lower_bound(spec, cut.pieces, r2) / cut.samples
        for bound, count in zip(bounds.tolist(), r2.tolist(), strict=True):
            yield _Candidate(bound, index, count)


def _group_counts(spec: PlanSpec, cut: Cut) -> Array:
    """Return the values of r2 to try; every group keeps a token per expert if possible."""
    least = min(piece.amount for piece in cut.pieces) * spec.tokens_per_expert_per_sample
    most = max(1, min(spec.max_r2, int(least / LEAST_ME)))
    coarse = np.floor(_FINE * 2 ** np.arange(0, 13, 0.25)).astype(np.int64)
    counts = np.concatenate([np.arange(1, _FINE), coarse[coarse < most], [most]])
    return np.unique(counts[counts <= most])


def batch_lower_bound(spec: PlanSpec, pieces: Sequence[Piece], r2: Array) -> Array:
    """Return times in ms [values of r2] that no order of the batch's tasks can beat.

    This is `lower_bound` of planner/schedule/solver.py for different micro-batches.
    """
    columns = np.array(pieces)
    attention, shared, amount = columns[:, 0, None], columns[:, 1, None], columns[:, 2, None]
    least, total = _server_times(spec, amount, r2)
    others = least.sum(axis=0) - least
    trip: Array = (others + total).max(axis=0)
    work = spec.num_layers * (attention + shared).sum()
    alone = spec.num_layers * (attention + np.maximum(shared, trip)).max(axis=0)
    bound = np.maximum(np.maximum(work, work - shared.sum() + trip.min(axis=0)), alone)
    before = np.concatenate([np.zeros_like(least[:1]), least.cumsum(axis=0)[:-1]])
    heads = (attention + before).min(axis=1)
    tails = (others - before).min(axis=1)
    served = (heads + spec.num_layers * total.sum(axis=1) + tails).max(axis=0)
    together: Array = np.maximum(bound, served)
    return together


def _server_times(spec: PlanSpec, amount: Array, r2: Array) -> tuple[Array, Array]:
    """Return (one token group, all groups) in ms [A2E experts E2A, micro-batches, values]."""
    stages, me = spec.stages, amount * spec.tokens_per_expert_per_sample
    models = (stages.a2e, stages.expert, stages.e2a)
    least = [model.alpha_ms + model.beta_ms * me * (1 / r2) for model in models]
    total = [model.alpha_ms * r2 + model.beta_ms * me for model in models]
    return np.array(least), np.array(total)


_MOST_MICRO_BATCHES = 16  # more cost more launches than they gain
CHUNK_COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 16)


def solve_extended(spec: PlanSpec) -> PlannedBatch:
    """Return the best plan of all kinds, or FinDEP's best where none is better.

    A kind for which the spec lacks numbers is left out.
    """
    splits = list(_splits(spec.max_samples))
    cuts = [_cut(spec, sizes, ()) for sizes in splits]
    if spec.attention_quadratic_fraction is not None:
        cuts.extend(
            _cut(spec, sizes, ends)
            for sizes in splits
            for ends in _chunk_ends(spec.attention_quadratic_fraction)
            if len(sizes) * len(ends) <= _MOST_MICRO_BATCHES
        )
    return search(spec, cuts, late_shared=True, start=solve(spec).best)


def _cut(spec: PlanSpec, sizes: tuple[int, ...], ends: tuple[float, ...]) -> Cut:
    plan = Plan(
        r1=len(sizes) * max(1, len(ends)),
        ma=max(sizes),
        micro_batch_samples=sizes if min(sizes) < max(sizes) else (),
        sequence_chunks=ends,
    )
    return Cut(plan, pieces_of(spec, plan, sizes), sum(sizes))


def _splits(max_samples: int) -> Iterator[tuple[int, ...]]:
    """Yield sizes of micro-batches: equal ones, and uneven ones that take all samples."""
    for r1 in range(1, min(max_samples, _MOST_MICRO_BATCHES) + 1):
        yield (max_samples // r1,) * r1
        if max_samples % r1:
            sizes = _even(max_samples, r1)
            yield sizes
            yield sizes[::-1]


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
