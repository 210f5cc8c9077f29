"""Metrics of a process, those of ranks, and ring buffers of task spans."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from contracts import metrics
from contracts.clock import Clock
from contracts.metrics import Metric, MetricKind
from contracts.ranks import Group, RankSpec
from contracts.traces import BUSY, TRANSFERS, BatchSpan, RankTrace, Stage, TaskSpan, boot_identity

_EXEMPLAR = "request_id"
_EXEMPLAR_CHARACTERS = 128 - len(_EXEMPLAR)  # OpenMetrics limits name and value together
MAX_BUFFERED = 1024  # observations per flush, which takes 0.05 ms
Totals = dict[tuple[str, ...], float]  # by labels
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _ObservationBuffer:
    """Observations that are not yet in the histogram. bounds: of its buckets."""

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        self._histogram, self._bounds = histogram, np.array(bounds)
        self._values: deque[float] = deque()
        self._flush_lock = threading.Lock()

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) >= MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        with self._flush_lock:
            values = [self._values.popleft() for _ in range(len(self._values))]
            buckets = np.searchsorted(self._bounds, values)
            counts = np.bincount(buckets, minlength=len(self._bounds) + 1)
            for bucket, count in zip(self._histogram._buckets, counts.tolist(), strict=True):
                if count:
                    bucket.inc(count)
            self._histogram._sum.inc(sum(values))


class Telemetry:
    """Metrics of one process. A metric appears with its first use."""

    def __init__(self) -> None:
        disable_created_metrics()  # no `_created` series beside every counter
        self._registry = CollectorRegistry()
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Counter | Gauge | Histogram] = {}
        self._readings: dict[str, _Reading] = {}
        self._collect_lock = threading.Lock()
        self._buffers: dict[tuple[str, tuple[str, ...]], _ObservationBuffer] = {}

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Counter)
        child.inc(by)

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Gauge)
        child.set(to)

    def observe(
        self, metric: Metric, *labels: str, value: float, request_id: str | None = None
    ) -> None:
        """Observe a value. request_id: exemplar of its bucket until the next one."""
        child = self._child(metric, labels)
        assert isinstance(child, Histogram)
        exemplar = {_EXEMPLAR: request_id[:_EXEMPLAR_CHARACTERS]} if request_id else None
        child.observe(value, exemplar)

    def buffered_observer(self, metric: Metric, *labels: str) -> Callable[[float], None]:
        """Return a function like `observe` at a tenth of the cost, for thousands of calls a second.

        Keep it; it may be called from any thread.
        """
        child = self._child(metric, labels)
        assert isinstance(child, Histogram)
        buffer = _ObservationBuffer(child, metric.buckets)
        return self._buffers.setdefault((metric.name, labels), buffer).add

    def read(self, metric: Metric, *labels: str, of: Callable[[], float]) -> None:
        """Call `of` at each scrape for a gauge's value or a counter's total."""
        self.read_each(metric, lambda: {labels: of()})

    def start(self, metric: Metric, *labels: str) -> None:
        """Export the series from now on, so that its first event is a growth from 0."""
        self._child(metric, labels)

    def read_each(self, metric: Metric, of: Callable[[], Totals]) -> None:
        """Call `of` at each scrape for a counter's totals or a gauge's values, by labels.

        New labels may appear. A gauge loses labels that are no longer returned. A metric that is
        read is not updated otherwise in this process.
        """
        self._readings.setdefault(metric.name, _Reading(metric, [], {})).sources.append(of)

    def exposition(self) -> str:
        """Return all metrics in Prometheus text format. Thread-safe."""
        text: bytes = generate_latest(self)
        return text.decode()

    def collect(self) -> list[Any]:
        """Return all metric families, as a collector of `prometheus_client`. Thread-safe."""
        with self._collect_lock:
            for buffer in list(self._buffers.values()):
                buffer.flush()
            readings = [reading.family() for reading in list(self._readings.values())]
            return [*self._registry.collect(), *filter(None, readings)]

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Counter | Gauge | Histogram:
        key = (metric.name, labels)
        child = self._children.get(key)
        if child is None:
            family = self._families.get(metric.name)
            if family is None:
                family = self._families[metric.name] = _make(metric, self._registry)
            child = self._children[key] = family.labels(*labels) if metric.labels else family
        return child


class _Reading(NamedTuple):
    """A metric that is read at each scrape. values: the latest, by labels."""

    metric: Metric
    sources: list[Callable[[], Totals]]
    values: Totals

    def family(self) -> CounterMetricFamily | GaugeMetricFamily | None:
        """Read the values; None while there are none."""
        metric, values = self.metric, {k: v for of in self.sources for k, v in of().items()}
        is_gauge = metric.kind is MetricKind.GAUGE
        if is_gauge:
            self.values.clear()
        self.values.update(values)
        make = GaugeMetricFamily if is_gauge else CounterMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family if family.samples else None


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind is MetricKind.HISTOGRAM:
        return Histogram(
            metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
        )
    kind = Counter if metric.kind is MetricKind.COUNTER else Gauge
    return kind(metric.name, metric.help, metric.labels, registry=registry)


class _Families:
    """Headers and series of pages, by family in the order of their first appearance."""

    def __init__(self) -> None:
        self._headers: dict[str, dict[str, str]] = {}
        self._series: dict[str, dict[str, float]] = {}

    def add(self, text: str) -> None:
        """Add a page. Series with equal labels are added up; gauges keep the maximum."""
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, keyword, family, *_ = line.split(" ", 3)
                self._headers.setdefault(family, {}).setdefault(keyword, line)
            elif line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values = self._series.setdefault(family, {})
                values[name] = _combined(values.get(name), float(value), self._is_gauge(family))

    def text(self, *, only_shared_counters: bool = False) -> str:
        """Return one page. only_shared_counters: without gauges and series of single ranks."""
        lines: list[str] = []
        for family in {**self._headers, **self._series}:
            series = self._series.get(family, {})
            if only_shared_counters:
                is_gauge = self._is_gauge(family)
                series = {} if is_gauge else {n: v for n, v in series.items() if _RANK not in n}
                if not series:
                    continue
            lines.extend(self._headers.get(family, {}).values())
            lines.extend(f"{name} {value}" for name, value in series.items())
        return "".join(f"{line}\n" for line in lines)

    def _is_gauge(self, family: str) -> bool:
        return self._headers.get(family, {}).get("TYPE", "").endswith(" gauge")


_RANK = 'rank="'


def merge_expositions(texts: Iterable[str]) -> str:
    """Merge pages into one that declares each family and series once, as Prometheus requires.

    Series with equal labels are added up; gauges keep the maximum.
    """
    families = _Families()
    for text in texts:
        families.add(text)
    return families.text()


class EndedCounters:
    """Counters of processes that have ended or do not answer: merged counters must not fall.

    Series with a label `rank` end with their rank.
    """

    def __init__(self, remembered: int = 64) -> None:
        """Create it. remembered: ended processes kept apart, whose late pages do no harm."""
        self._remembered = remembered
        self._pages: dict[str, str] = {}  # latest, by process
        self._ended = ""
        self._lock = threading.Lock()

    def page(self, current: Mapping[str, str | None]) -> str:
        """Return the page to merge with those of `current`, by process; None: it did not answer.

        Thread-safe.
        """
        with self._lock:
            for process, text in current.items():
                if text is not None:
                    families = _Families()
                    families.add(text)
                    self._pages[process] = families.text(only_shared_counters=True)
            ended = [process for process in self._pages if process not in current]
            for process in ended[: -self._remembered or None]:
                self._ended = merge_expositions([self._ended, self._pages.pop(process)])
            kept = [page for process, page in self._pages.items() if current.get(process) is None]
            return merge_expositions([self._ended, *kept])


def _combined(before: float | None, value: float, is_gauge: bool) -> float:
    if before is None:
        return value
    return max(before, value) if is_gauge else before + value


_EXPORTED = frozenset(
    (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, *TRANSFERS, Stage.GATHER, Stage.HOST_COPY)
)
RATE_S = 1.0
_DIRECTIONS = {Group.ATTENTION: "a2e", Group.PREFILL: "gather"}


class RankMetrics(Telemetry):
    """Metrics of ranks of every kind.

    Metrics of one kind of rank are set where they are measured, or read at each scrape.
    """

    def __init__(self, spec: RankSpec, clock: Clock) -> None:
        super().__init__()
        self._spec, self._clock = spec, clock
        self._stages: dict[Stage, Callable[[float], None]] = {}
        group = Group.PREFILL if spec.group is Group.PREFILL else "attention_expert"
        self.set(metrics.GROUP_EPOCH, group, to=spec.epoch)

    def span(self, span: Recorded) -> None:
        """Record spans. Called by the loop's thread."""
        if isinstance(span, TaskSpan):
            self._observe(span.stage, (span.end_s - span.start_s,))
            return
        for stage, seconds in span.seconds.items():
            self._observe(stage, seconds)

    def _observe(self, stage: Stage, seconds: Iterable[float]) -> None:
        note = self._stages.get(stage)
        if note is None:
            if stage not in _EXPORTED:
                return
            note = self._stages[stage] = self.buffered_observer(
                metrics.STAGE, stage, self._spec.name
            )
        for each in seconds:
            note(each if each > 0.0 else 0.0)

    def attach(self, timeline: Timeline, bytes_moved: Callable[[], tuple[int, int]]) -> None:
        """Read the totals of a timeline and of channels at each scrape."""
        spec, direction = self._spec, _DIRECTIONS.get(self._spec.group, "e2a")
        stage_s = timeline.stage_seconds
        busy = self.rate(lambda: sum(stage_s[stage] for stage in BUSY))
        self.read(metrics.CHANNEL_BYTES, direction, spec.backend, of=lambda: bytes_moved()[0])
        self.read(metrics.EXPOSED_COMMUNICATION, spec.name, of=lambda: timeline.exposed_s)
        self.read(metrics.RANK_BUSY, spec.group, spec.name, of=lambda: min(1.0, busy()))

    def rate(self, total: Callable[[], float]) -> Callable[[], float]:
        """Return a function for the growth of `total` per second.

        The rate is over RATE_S or the time since the last call, whichever is longer, so that two
        scrapers do not shorten each other's period.
        """
        before, before_s, latest = 0.0, self._clock(), 0.0

        def per_s() -> float:
            nonlocal before, before_s, latest
            now_s = self._clock()
            if now_s - before_s >= RATE_S:
                now = total()
                latest = (now - before) / (now_s - before_s)
                before, before_s = now, now_s
            return latest

        return per_s


def growth(total: Callable[[], float]) -> Callable[[], float]:
    """Return a function for the growth of `total` since its last call, initially since 0."""
    before = 0.0

    def grown() -> float:
        nonlocal before
        now = total()
        before, by = now, now - before
        return by

    return grown


class SpanGroup(NamedTuple):
    """Spans that are recorded at once, and made when they are read.

    stage, end_s: of the last one. seconds: of each, by stage.
    """

    stage: Stage
    end_s: float
    seconds: Mapping[Stage, Sequence[float]]
    make: Callable[[], Iterable[TaskSpan]]


Recorded = TaskSpan | SpanGroup


def spans_of(recorded: Iterable[Recorded]) -> Iterator[TaskSpan]:
    """Yield the spans, and those of groups."""
    for each in recorded:
        if isinstance(each, SpanGroup):
            yield from each.make()
        else:
            yield each


class Timeline:
    """The last `capacity` spans and batches, and the seconds of each stage since the start.

    A group counts as one span. observe: called with every span or group, for metrics. exposed_s:
    seconds in which the rank waited while a payload for it was in transfer. keeps: True if spans
    are kept.
    """

    def __init__(self, capacity: int, observe: Callable[[Recorded], None] | None = None) -> None:
        self._spans: deque[Recorded] = deque(maxlen=capacity)
        self._batches: deque[BatchSpan] = deque(maxlen=capacity)
        self.keeps = capacity > 0
        self._observe = observe
        self.exposed_s = 0.0
        self.stage_seconds = {stage.value: 0.0 for stage in Stage}

    def add(self, span: Recorded) -> None:
        if isinstance(span, TaskSpan):
            self.stage_seconds[span.stage] += span.end_s - span.start_s
        else:
            for stage, seconds in span.seconds.items():
                self.stage_seconds[stage] += sum(seconds)
        if self.keeps:
            self._spans.append(span)
        if self._observe is not None:
            self._observe(span)

    def add_batch(self, batch: BatchSpan) -> None:
        if self.keeps:
            self._batches.append(batch)

    def record_wait(
        self, start_s: float, end_s: float, transfers: Iterable[tuple[float, float]]
    ) -> None:
        """Record that the rank waited and that `transfers` arrived in that time."""
        inside = [(max(start_s, sent), min(end_s, arrived)) for sent, arrived in transfers]
        covered_s = start_s  # until when it is counted
        for sent, arrived in sorted(inside):
            self.exposed_s += max(0.0, arrived - max(sent, covered_s))
            covered_s = max(covered_s, arrived)

    def spans(self) -> list[TaskSpan]:
        return list(spans_of(list(self._spans)))

    def since(self, rank: str, since_s: float) -> RankTrace:
        """Return what has ended since `since_s` on the clock of the spans. Thread-safe."""
        is_full = len(self._spans) == self._spans.maxlen
        spans, batches = self.spans(), list(self._batches)
        return RankTrace(
            rank=rank,
            spans=[span for span in spans if span.end_s >= since_s],
            batches=[batch for batch in batches if batch.end_s >= since_s],
            is_cut=is_full and bool(spans) and spans[0].end_s >= since_s,
            boot=boot_identity(),
        )
