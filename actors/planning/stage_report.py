"""Task spans condensed to the times that the planner learns from."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from actors.telemetry.telemetry import Recorded
from contracts.planner_messages import ExpertReport, MicroBatchReport, NewTokens, RowsTime
from contracts.traces import Stage, TaskSpan
from planner.schedule.batch_plan import step

MAX_SPANS = 8192  # of one report


class SpanRecorder:
    """Keeps the spans between `begin` and `end`, at most MAX_SPANS."""

    def __init__(self) -> None:
        self._spans: list[Recorded] | None = None

    def observe(self, span: Recorded) -> None:
        spans = self._spans
        if spans is not None and len(spans) < MAX_SPANS:
            spans.append(span)

    def begin(self) -> None:
        self._spans = []

    def end(self) -> list[Recorded]:
        spans, self._spans = self._spans or [], None
        return spans


def expert_report(rank: str, spans: Sequence[TaskSpan]) -> ExpertReport | None:
    """Return the report, or None if the spans contain no call."""
    calls = list(expert_calls(spans))
    if not calls:
        return None
    return ExpertReport(
        rank=rank, experts=_medians(calls), a2e=_medians(_undisturbed(spans, Stage.A2E))
    )


def makespan_ms(spans: Sequence[TaskSpan], batch: int) -> float:
    """Return the time from a batch's first attention task to its last task; 0 if it has none."""
    own = [s for s in spans if s.batch == batch and s.stage in (Stage.ATTENTION, Stage.FINISH)]
    if not own:
        return 0.0
    return 1e3 * (max(s.end_s for s in own) - min(s.start_s for s in own))


def micro_batch_times(
    spans: Sequence[TaskSpan], batch: int, parts: Sequence[list[NewTokens]]
) -> list[MicroBatchReport]:
    """Return the times of the micro-batches with these new tokens, or [] if one has none."""
    by_task: defaultdict[tuple[int, Stage], dict[int, float]] = defaultdict(dict)
    finish_ms: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        if span.batch == batch and span.stage in (Stage.ATTENTION, Stage.SEND, Stage.SHARED):
            by_task[span.micro_batch, span.stage][span.layer] = 1e3 * (span.end_s - span.start_s)
        elif span.batch == batch and span.stage is Stage.FINISH:
            finish_ms[span.micro_batch] += 1e3 * (span.end_s - span.start_s)
    result = []
    for index, part in enumerate(parts):
        attention, sending = by_task[index, Stage.ATTENTION], by_task[index, Stage.SEND]
        # Only layers with experts send. The first one embeds and has nothing to combine.
        layers = sorted(attention.keys() & sending.keys())
        layers = layers[1:] or layers
        if not layers:
            return []
        attention_ms = statistics.median(attention[layer] + sending[layer] for layer in layers)
        shared = by_task[index, Stage.SHARED].values()
        shared_ms = statistics.median(shared) if shared else 0.0
        send_ms = statistics.median(sending[layer] for layer in layers)
        attention_ms = max(attention_ms, 1e-6)
        result.append(MicroBatchReport(part, attention_ms, shared_ms, finish_ms[index], send_ms))
    return result


def transfer_times(spans: Sequence[TaskSpan], stage: Stage) -> list[RowsTime]:
    """Return median times of packets that arrived while the rank only waited for them."""
    return _medians(_undisturbed(spans, stage))


def expert_calls(spans: Sequence[TaskSpan]) -> Iterator[tuple[int, float]]:
    """Yield (rows, ms) of each call of experts, including the sending of its answers."""
    computed: TaskSpan | None = None
    for span in spans:
        if span.stage is Stage.EXPERT:
            computed = span
        elif span.stage is Stage.SEND and computed is not None:
            yield span.tokens, 1e3 * (span.end_s - computed.start_s)
            computed = None


def _undisturbed(spans: Sequence[TaskSpan], stage: Stage) -> Iterator[tuple[int, float]]:
    """Yield (rows, ms) of transfers within one wait of the receiver, without computation."""
    wait: TaskSpan | None = None
    for span in spans:
        if span.stage is Stage.WAIT:
            wait = span
        elif span.stage is stage and wait is not None and _within(span, wait):
            yield span.tokens, 1e3 * (span.end_s - span.start_s)


def _within(span: TaskSpan, wait: TaskSpan) -> bool:
    return wait.start_s <= span.start_s < span.end_s <= wait.end_s


def _medians(times: Iterable[tuple[int, float]]) -> list[RowsTime]:
    """Return the median time of each size step."""
    by_size: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for rows, ms in times:
        if rows > 0 and ms > 0:
            by_size[step(rows)].append((rows, ms))
    return [
        RowsTime(
            round(statistics.median(rows for rows, _ in sized)),
            statistics.median(ms for _, ms in sized),
        )
        for sized in by_size.values()
    ]
