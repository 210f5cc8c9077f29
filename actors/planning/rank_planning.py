"""Choice of an attention rank's plans, and its reports to the planner.

The rank requests plans *ahead*: while a batch runs, for the batches that may come next. A batch
whose plan is not known yet runs under the default plan. Nothing here waits.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.observer import Observer
from actors.engine.micro_batch import cut_batch
from actors.planning.planner_link import KnownPlan, PlannerLink
from actors.planning.stage_report import (
    SpanRecorder,
    makespan_ms,
    micro_batch_times,
    transfer_times,
)
from actors.rpc.client_server import ClientMessage
from actors.telemetry.telemetry import Recorded, Telemetry, spans_of
from contracts import metrics
from contracts.clock import Clock
from contracts.logs import event
from contracts.plan import Plan
from contracts.planner_messages import (
    TRIAL_REPORTS,
    Batch,
    BatchReport,
    NoPlanReason,
    PlanSource,
    TrafficReport,
)
from contracts.ranks import RankSpec
from contracts.traces import Stage, TaskSpan
from planner.schedule.batch_plan import bucket_of, default_plan, fit_plan

log = logging.getLogger("tandem.planning")

READY = "ready"


class RankPlanning(Observer):
    """Owned by the rank's loop thread; `batches`, `chosen` and `state` may be read by any thread.

    batches: number of batches by plan. chosen: by source: "planner", "pinned" or "default REASON".
    """

    def __init__(
        self,
        spec: RankSpec,
        *,
        chunk_cost: Callable[[int, int], float],
        upcoming: Callable[[], Iterable[Batch]],
        clock: Clock,
        telemetry: Telemetry,
        pool_tokens: int = 0,
    ) -> None:
        """Set up without a planner. upcoming: returns the batches that may come next."""
        self.batches: Counter[str] = Counter()
        self.chosen: Counter[str] = Counter()
        self._config, self._name = spec.config, spec.name
        self._chunk_cost = chunk_cost
        self._upcoming = upcoming
        self._upcoming_changed = False
        self._clock = clock
        self._telemetry = telemetry
        self.link = PlannerLink(spec, clock)
        self._pinned: Plan | None = None
        self._recorder = SpanRecorder()
        self._reported_s = clock()
        self._running: dict[int, _RunningBatch] = {}  # by the batch's number
        self._recorded_batch: int | None = None
        self._trials: dict[int, tuple[int, int]] = {}  # version, batches run; by decode rows
        self._ended_s: float | None = None  # end of the last batch
        self._logged_state: str = NoPlanReason.OFF
        self._traffic = TrafficCounter(spec.name, pool_tokens, clock)

    @property
    def state(self) -> str:
        """ "ready", or why no plan of the planner can be expected."""
        unavailable_reason = self.link.unavailable_reason()
        return (
            f"cold: {self.link.cold}"
            if unavailable_reason is NoPlanReason.COLD
            else unavailable_reason or READY
        )

    def pin(self, plan: Plan | None) -> None:
        self._pinned = plan

    def observe(self, span: Recorded) -> None:
        self._recorder.observe(span)

    def choose(self, batch: ScheduledBatch) -> Plan:
        """Return the plan of a batch: pinned, from the planner, or the default."""
        plan = self._pinned
        chooser, reason, known = PlanSource.PINNED, None, None
        if plan is None:
            plan, known, reason = self._look_up_plan(new_tokens(batch))
            chooser = PlanSource.PLANNER
        if plan is None:
            plan = default_plan(self._config.schedule, batch.tokens)
            chooser = PlanSource.DEFAULT
        self.chosen[f"{chooser} {reason}" if reason else str(chooser)] += 1
        self._telemetry.count(metrics.PLAN_BATCHES, self._name, chooser, reason or "")
        self.batches[general_label(plan)] += 1
        self._running[batch.number] = _RunningBatch(batch, plan, known, self._waiting_since(batch))
        self._record_if_due(batch, is_trial=known is not None and known.is_trial)
        return plan

    def received(self, message: ClientMessage) -> None:
        self._upcoming_changed = True

    def formed(self, batch: ScheduledBatch) -> None:
        self._upcoming_changed = True

    def stepped(self) -> None:
        if self._upcoming_changed and self._running:  # while the experts compute
            self._upcoming_changed = False
            self.request_upcoming()

    def request_upcoming(self) -> None:
        """Request plans of the batches that may come next, unless known."""
        if not self.link.is_joined or self._pinned is not None:
            return
        for upcoming in self._upcoming():
            known = self.link.plans.get(bucket_of(upcoming))
            if known is None or self.link.is_stale(known):
                self.link.request_plan(upcoming)

    def completed(self, batch: ScheduledBatch) -> None:
        running = self._running.pop(batch.number, None)
        self._ended_s = self._clock()
        if running is not None and running.since_s is not None:
            running.duration_ms = 1e3 * (self._ended_s - running.since_s)
        traffic = self._traffic.add(batch)
        if traffic is not None:
            self.link.report(lambda: traffic)
        if self._recorded_batch != batch.number:
            return
        self._recorded_batch, spans = None, self._recorder.end()
        if running is not None and running.known is not None and running.known.is_trial:
            self._count_trial(running.known)
        if running is not None and spans:
            self.link.report(lambda: self._report(running, list(spans_of(spans))))

    def dropped(self, batch: ScheduledBatch) -> None:
        self._running.pop(batch.number, None)

    def sections(self) -> dict[str, dict[str, float]]:
        return {"plans": dict(self.batches), "chosen_by": dict(self.chosen)}

    def notes(self) -> dict[str, str]:
        return {"planner": self.state}

    def _look_up_plan(
        self, batch: Batch
    ) -> tuple[Plan | None, KnownPlan | None, NoPlanReason | None]:
        """Return (plan, its response, why there is no plan)."""
        link = self.link
        known = link.plans.get(bucket_of(batch))
        if known is None or link.is_stale(known):
            link.request_plan(batch)
        if known is not None:
            known = known._replace(is_trial=self._is_trial_due(known))
        unavailable_reason = link.unavailable_reason()
        self._log_state(unavailable_reason or READY)
        plan = None if known is None else known.plan
        if known is None or plan is None:
            return None, None, unavailable_reason or NoPlanReason.NEW_SHAPE
        schedule = self._config.schedule
        plan = fit_plan(plan, known.batch, batch, max_tokens=schedule.max_batch_tokens)
        if plan is None:
            link.request_plan(batch)
            return None, None, NoPlanReason.MISFIT
        return plan, known, None

    def _is_trial_due(self, known: KnownPlan) -> bool:
        """Return whether the next batch is measured under the trial of an answer."""
        version, count = self._trials.get(bucket_of(known.batch).decode_rows, (0, 0))
        is_run = version == known.answer.version and count >= TRIAL_REPORTS
        return known.answer.trial is not None and not self._running and not is_run

    def _count_trial(self, known: KnownPlan) -> None:
        rows, version = bucket_of(known.batch).decode_rows, known.answer.version
        before, count = self._trials.get(rows, (0, 0))
        self._trials[rows] = version, count + 1 if version == before else 1

    def _log_state(self, state: str) -> None:
        if state != self._logged_state:
            self._logged_state = state
            level = (
                logging.WARNING if state in (NoPlanReason.LOST, NoPlanReason.SLOW) else logging.INFO
            )
            event(log, "planner_state", level, rank=self._name, state=self.state)

    def _waiting_since(self, batch: ScheduledBatch) -> float | None:
        """Return the end of the previous batch, if a sequence could have continued then."""
        goes_on = any(chunk.sequence.generated for chunk in batch.chunks)
        return self._ended_s if goes_on and not self._running else None

    def _record_if_due(self, batch: ScheduledBatch, *, is_trial: bool) -> None:
        """Record a batch that runs alone, if a report is due or it is a trial."""
        if len(self._running) > 1:
            self._recorded_batch, _ = None, self._recorder.end()
            return
        config, now_s = self._config.planner, self._clock()
        is_due = is_trial or now_s - self._reported_s >= config.report_interval_s
        if self.link.is_joined and config.refit and is_due:
            self._reported_s, self._recorded_batch = now_s, batch.number
            self._recorder.begin()

    def _report(self, running: _RunningBatch, spans: list[TaskSpan]) -> BatchReport | None:
        number = running.batch.number
        costs = [self._chunk_cost(chunk.start, chunk.stop) for chunk in running.batch.chunks]
        cut = cut_batch(running.batch, running.plan, costs)
        parts = [[(chunk.start, chunk.stop) for chunk in part.chunks] for part in cut]
        times, measured_ms = micro_batch_times(spans, number, parts), makespan_ms(spans, number)
        if not times or not measured_ms > 0:
            return None
        return BatchReport(
            rank=self._name,
            plan=running.plan,
            measured_ms=measured_ms,
            micro_batches=times,
            e2a=transfer_times(spans, Stage.E2A),
            between_ms=max(0.0, running.duration_ms - measured_ms),
            by_planner=running.known is not None,
            solve_ms=0.0 if running.known is None else running.known.answer.solve_ms,
        )


@dataclass(slots=True, eq=False)
class _RunningBatch:
    """A batch in flight and the source of its plan.

    since_s: when its sequences began to wait only for it, or None. duration_ms: since then, or 0.
    """

    batch: ScheduledBatch
    plan: Plan
    known: KnownPlan | None
    since_s: float | None
    duration_ms: float = 0.0


def new_tokens(batch: ScheduledBatch) -> Batch:
    """Return [start, stop) of each sequence in order."""
    return [(chunk.start, chunk.stop) for chunk in batch.chunks]


@functools.lru_cache(maxsize=256)
def general_label(plan: Plan) -> str:
    """Return the plan's label without the sizes of one batch."""
    return msgspec.structs.replace(plan, ma=None, me=None, micro_batch_samples=()).label


REPORT_S = 1.0


class TrafficCounter:
    """Counts a rank's tokens for the planner. Owned by the loop thread."""

    def __init__(self, rank: str, pool_tokens: int, clock: Clock) -> None:
        self._rank, self._pool_tokens, self._clock = rank, pool_tokens, clock
        self._start_s = clock()
        self._counts: Counter[str] = Counter()

    def add(self, batch: ScheduledBatch) -> TrafficReport | None:
        """Count a completed batch; return a report every REPORT_S."""
        for chunk in batch.chunks:
            new = chunk.stop - chunk.start
            if new == 1:
                self._counts["decode_tokens"] += 1
                self._counts["positions"] += chunk.start
            else:
                self._counts["prompts"] += 1
                self._counts["prompt_tokens"] += new
                self._counts["starts"] += chunk.start
        seconds = self._clock() - self._start_s
        if seconds < REPORT_S:
            return None
        counts, self._counts = self._counts, Counter()
        self._start_s += seconds
        return TrafficReport(
            rank=self._rank, seconds=seconds, pool_tokens=self._pool_tokens, **counts
        )
