"""A rank's life, the same for every kind: start, stop, status, metrics, spans, and how it ends.

A plain class: Ray (actors/ranks/remote.py) and plain processes (tests/support/rank_process.py) are
thin
shells around it. What kind of rank it is says its loop; a function makes it (`attention_rank` and
its like).
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from actors.telemetry.exporter import Exporter
from actors.telemetry.rank_metrics import RankMetrics, channel_bytes
from actors.telemetry.scrape_key import ScrapeKey
from actors.telemetry.telemetry import Telemetry
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.logs import event
from contracts.plan import Plan
from contracts.ranks import RankReady, RankSpec, RankStatus
from contracts.traces import RankTrace, TaskSpan

log = logging.getLogger("tandem.worker")

_STOP_S = 10.0


class RankLoop(Protocol):
    """What a rank does, in one thread."""

    @property
    def problem(self) -> str:
        """Why it cannot serve; empty: it can."""

    def run(self, stopping: threading.Event) -> None:
        """Until it is to stop. What it raises is the end of the rank."""

    def refuse(self, reason: str, stopping: threading.Event) -> None:
        """After that: tells everybody who asks, until it is to stop."""

    def wake(self) -> None:
        """Ends its waiting. Called from any thread."""

    def drain(self, within_s: float) -> None:
        """Takes nothing new, and has ended or handed over by then what it has. From any thread."""

    @property
    def drained(self) -> threading.Event:
        """Set once it has."""

    def close(self) -> None:
        """Ends every thread and link. May be called twice, from any thread."""

    @property
    def load(self) -> tuple[int, int]:
        """How many sequences are running, and waiting. From any thread."""

    def sections(self) -> dict[str, dict[str, float]]:
        """Of the status: totals by topic. From any thread."""

    def notes(self) -> dict[str, str]:
        """Of the status, in words. From any thread."""


class RankHooks(NamedTuple):
    """How others join a rank. By default they do not."""

    connect: Callable[[dict[str, str]], None] = lambda addresses: None  # name -> channel address
    join_planner: Callable[[str], None] = lambda address: None
    pin_plan: Callable[[Plan | None], None] = lambda plan: None  # of all batches from now on
    resize: Callable[[int, int], None] = lambda attention, expert: None  # ranks of the group


_NO_HOOKS = RankHooks()


class Recording(NamedTuple):
    """Where a rank's spans go: to its timeline, and from there to its metrics. bytes_moved: sent to
    other ranks and received from them, so far."""

    timeline: Timeline
    metrics: RankMetrics
    bytes_moved: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def following(self, bytes_moved: Callable[[], tuple[int, int]]) -> Recording:
        """The same, whose metrics follow the timeline and what is moved."""
        self.metrics.attach(self.timeline, bytes_moved)
        return self._replace(bytes_moved=bytes_moved)

    def sections(self) -> dict[str, dict[str, float]]:
        """exposed_s: in which the rank waited while a payload for it was under way."""
        return {
            "stage_s": dict(self.timeline.stage_seconds),
            "channel_bytes": channel_bytes(self.bytes_moved()),
            "totals": {"exposed_s": self.timeline.exposed_s},
        }


def recording(
    metrics: RankMetrics, capacity: int, *observers: Callable[[TaskSpan], None]
) -> Recording:
    """capacity: spans of the timeline. hear: who else hears of every span."""

    def observe(span: TaskSpan) -> None:
        metrics.span(span)
        for each in observers:
            each(span)

    return Recording(Timeline(capacity, observe), metrics)


class Rank:
    """Made with its weights loaded and listening. Then: connect, start; status at any time; stop.

    recording: None where there are no tasks; then timeline has what there is instead.
    """

    def __init__(
        self,
        spec: RankSpec,
        ready: RankReady,
        loop: RankLoop,
        telemetry: Telemetry,
        recording: Recording | None,
        hooks: RankHooks = _NO_HOOKS,
        timeline: Timeline | None = None,
    ) -> None:
        self.spec = spec
        self.ready = ready
        self.loop = loop
        self.connect, self.join_planner, self.pin_plan, self.resize = hooks
        self._recording = recording
        self._timeline = timeline if recording is None else recording.timeline
        self._telemetry = telemetry
        self._exporter: Exporter | None = None
        self._failure = ""
        self._started_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{spec.name}-loop")

    def start(self) -> None:
        self._started_s = monotonic_s()
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop, every thread and every link. Waiting requests get an error."""
        self._stopping.set()
        self.loop.wake()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self.loop.close()
        if self._exporter is not None:
            self._exporter.close()

    def drain(self, within_s: float) -> None:
        """One that has not started, has failed or is to stop has left already."""
        is_at_work = self._thread.is_alive() and not self._failure
        if is_at_work and not self._stopping.is_set():
            self.loop.drain(within_s)
            self.loop.wake()
        else:
            self.loop.drained.set()

    def wait_drained(self, timeout_s: float) -> bool:
        """Whether it has left by then."""
        return self.loop.drained.wait(timeout_s)

    def status(self) -> RankStatus:
        reason = self._failure or self.loop.problem
        running, waiting = self.loop.load
        sections = {} if self._recording is None else self._recording.sections()
        for name, numbers in self.loop.sections().items():
            sections[name] = sections.get(name, {}) | numbers
        return RankStatus(
            name=self.spec.name,
            healthy=not reason,
            reason=reason,
            running=running,
            waiting=waiting,
            epoch=self.spec.epoch,
            uptime_s=monotonic_s() - self._started_s if self._started_s else 0.0,
            sections=sections,
            notes=self.loop.notes(),
        )

    def metrics(self) -> str:
        """Prometheus text."""
        return self._telemetry.exposition()

    def export_metrics(self) -> str:
        """Where it is scraped from now on, as `RankReady` has it."""
        config = self.spec.config
        if not config.metrics.exporters:
            return ""
        key = ScrapeKey(config.http)
        self._exporter = Exporter(self._telemetry, key=key, name=self.spec.name)
        return self._exporter.open(config.metrics.host or self.spec.host)

    def spans(self) -> list[TaskSpan]:
        """The last recorded task spans."""
        return [] if self._recording is None else self._recording.timeline.spans()

    def clock_s(self) -> float:
        """What its clock shows now."""
        return monotonic_s()

    def trace(self, since_s: float) -> RankTrace:
        """What it has done since then, on its clock, as far as it keeps that."""
        if self._timeline is None:
            return RankTrace(rank=self.spec.name)
        return self._timeline.since(self.spec.name, since_s)

    def _run(self) -> None:
        """An error that nobody foresaw fails the rank by name instead of hanging it."""
        try:
            with torch.inference_mode():
                self.loop.run(self._stopping)
        except BaseException as error:  # noqa: BLE001 - logged, with its traceback
            self._failure = f"{self.spec.name} failed: {type(error).__name__}: {error}"
            event(log, "rank_failed", logging.CRITICAL, error, reason=self._failure)
            traceback.clear_frames(
                error.__traceback__
            )  # they hold memory that links must give back
            self.loop.refuse(self._failure, self._stopping)
