"""Prometheus metrics of a rank."""

from __future__ import annotations

from collections.abc import Callable

from actors.telemetry.telemetry import Telemetry
from actors.telemetry.timeline import Timeline
from contracts import metrics
from contracts.clock import Clock
from contracts.ranks import Group, RankSpec
from contracts.traces import BUSY, TRANSFERS, Stage, TaskSpan

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

    def span(self, span: TaskSpan) -> None:
        """Record a span. Called by the loop's thread."""
        note = self._stages.get(span.stage)
        if note is None:
            if span.stage not in _EXPORTED:
                return
            note = self._stages[span.stage] = self.buffered_observer(
                metrics.STAGE, span.stage, self._spec.name
            )
        seconds = span.end_s - span.start_s
        note(seconds if seconds > 0.0 else 0.0)

    def attach(self, timeline: Timeline, bytes_moved: Callable[[], tuple[int, int]]) -> None:
        """Read the totals of a timeline and of channels at each scrape."""
        spec, direction = self._spec, _DIRECTIONS.get(self._spec.group, "e2a")
        stage_s = timeline.stage_seconds
        busy = self.rate(lambda: sum(stage_s[stage] for stage in BUSY))
        self.read(
            metrics.CHANNEL_BYTES, direction, spec.backend, of=growth(lambda: bytes_moved()[0])
        )
        self.read(metrics.EXPOSED_COMMUNICATION, spec.name, of=lambda: timeline.exposed_s)
        self.read(metrics.RANK_BUSY, spec.group, spec.name, of=lambda: min(1.0, busy()))

    def read_blocks(self, counts: Callable[[], dict[str, int]]) -> None:
        """Read the numbers of KV blocks by state at each scrape."""

        def count(state: str) -> Callable[[], float]:
            return lambda: counts()[state]

        for state in counts():
            self.read(metrics.KV_BLOCKS, self._spec.name, state, of=count(state))

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


def channel_bytes(moved: tuple[int, int]) -> dict[str, float]:
    """Return the section of a rank's status."""
    return dict(zip(("sent", "received"), moved, strict=True))


def growth(total: Callable[[], float]) -> Callable[[], float]:
    """Return a function for the growth of `total` since its last call, initially since 0."""
    before = 0.0

    def grown() -> float:
        nonlocal before
        now = total()
        before, by = now, now - before
        return by

    return grown
