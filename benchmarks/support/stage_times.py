"""How long each task of a batch kept its rank or its link busy, from the spans of the ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from planner.schedule.batch_plan import balanced_ranges, chunk_bounds
from tests.support.spans import length, union

COMPUTED = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT)
SENT = (Stage.A2E, Stage.E2A)
STAGES = (*COMPUTED, *SENT)
_LEAST_MS = 1e-3  # of a packet that came right behind another one

Chunks = tuple[tuple[int, int], ...]


class Samples(NamedTuple):
    """A batch of `sequences` of `tokens` tokens each."""

    sequences: int
    tokens: int


class StageSample(NamedTuple):
    """One task as it ran.

    chunks: (start, stop) of each sequence of its micro-batch (attention, shared). tokens: of its
    call or packet. beside_fraction: of its time, in which the other group computed too.
    """

    stage: Stage
    chunks: Chunks
    tokens: int
    ms: float
    beside_fraction: float = 0.0


class _Task(NamedTuple):
    span: TaskSpan
    start_s: float
    end_s: float


def micro_batches(plan: Plan, samples: Samples) -> list[Chunks]:
    """The chunks of each micro-batch, in the executor's order."""
    sizes = plan.micro_batch_samples
    if not sizes:
        parts = plan.r1 // max(1, len(plan.sequence_chunks))
        sizes = tuple(b - a for a, b in balanced_ranges([1.0] * samples.sequences, parts))
    bounds = chunk_bounds(samples.tokens, plan.sequence_chunks or (1.0,))
    return [(bound,) * size for size in sizes for bound in bounds]


def makespan_ms(spans: Sequence[TaskSpan]) -> float:
    """From the first attention to the last answer of the experts, as plans count it."""
    layers = [span for span in spans if span.stage in STAGES]
    return 1e3 * (max(s.end_s for s in layers) - min(s.start_s for s in layers))


def stage_samples(spans: Sequence[TaskSpan], plan: Plan, samples: Samples) -> list[StageSample]:
    """Every task of the batch."""
    pieces = micro_batches(plan, samples)
    tasks = list(_tasks(spans))
    busy = {
        stages: union([(t.start_s, t.end_s) for t in tasks if t.span.stage in stages])
        for stages in (COMPUTED[:2], COMPUTED[2:])
    }
    found = []
    for span, start_s, end_s in tasks:
        is_expert = span.stage is Stage.EXPERT
        other = busy[COMPUTED[:2] if is_expert else COMPUTED[2:]]
        found.append(
            StageSample(
                span.stage,
                () if is_expert else pieces[span.micro_batch],
                span.tokens,
                1e3 * (end_s - start_s),
                _covered_s(other, start_s, end_s) / (end_s - start_s),
            )
        )
    return [*found, *_transfers(spans)]


def _covered_s(intervals: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    inside = ((max(a, start_s), min(b, end_s)) for a, b in intervals)
    return length((a, b) for a, b in inside if a < b)


def _tasks(spans: Sequence[TaskSpan]) -> Iterator[_Task]:
    """Tasks of ranks, from when they could have started to when the rank is free again: cutting and
    copying packets (SEND) and what the loop does between two tasks keep a rank busy too."""
    arrived_s: defaultdict[tuple[Stage, int, int, int], float] = defaultdict(float)
    for span in spans:
        if span.stage is Stage.A2E:
            arrived_s[span.stage, span.layer, span.micro_batch, span.token_group] = span.end_s
        elif span.stage is Stage.E2A:  # the last of all token groups
            key = (span.stage, span.layer + 1, span.micro_batch, 0)
            arrived_s[key] = max(arrived_s[key], span.end_s)
    of_rank = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.stage not in SENT:
            of_rank[span.resource].append(span)
    for ran in of_rank.values():
        yield from _tasks_of_rank(ran, arrived_s)


def _tasks_of_rank(
    ran: Sequence[TaskSpan], arrived_s: dict[tuple[Stage, int, int, int], float]
) -> Iterator[_Task]:
    free_s, last = 0.0, None
    for span in ran:
        if span.stage is Stage.SEND and last is not None:
            last = last._replace(end_s=span.end_s)
        else:
            if last is not None:
                yield last
            needs = Stage.A2E if span.stage is Stage.EXPERT else Stage.E2A
            group = span.token_group if span.stage is Stage.EXPERT else 0
            arrival_s = arrived_s.get((needs, span.layer, span.micro_batch, group), 0.0)
            start_s = min(max(free_s, arrival_s), span.start_s) or span.start_s
            last = _Task(span, start_s, span.end_s) if span.stage in COMPUTED else None
        free_s = span.end_s
    if last is not None:
        yield last


def _transfers(spans: Iterable[TaskSpan]) -> Iterator[StageSample]:
    """A packet's own time on its link: from when the one before it has left the link."""
    of_link = defaultdict(list)
    for span in spans:
        if span.stage in SENT:
            of_link[span.stage].append(span)
    for stage, sent in of_link.items():
        free_s = 0.0
        for span in sorted(sent, key=lambda span: span.end_s):
            ms = 1e3 * (span.end_s - max(span.start_s, free_s))
            free_s = span.end_s
            yield StageSample(stage, (), span.tokens, max(ms, _LEAST_MS))
