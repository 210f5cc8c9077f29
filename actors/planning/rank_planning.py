"""Which plan an attention rank runs a batch under, and what it tells the planner.

It asks *ahead*: while a batch runs, about the batch that would come next. When that is formed, its
plan is looked up in a dict; if there is none, the default plan runs and the question is asked for
the next time. Nothing here waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from actors.batching.observer import Observer
from actors.batching.scheduled_batch import ScheduledBatch
from actors.channels.handshake import Identity
from actors.engine.micro_batch import cut_batch
from actors.planning.planner_link import KnownPlan, PlannerLink
from actors.planning.stage_report import (
    SpanRecorder,
    makespan_ms,
    micro_batch_times,
    transfer_times,
)
from actors.planning.traffic_count import TrafficCount
from actors.telemetry.telemetry import Telemetry
from actors.wire.client_server import FromClient
from contracts import metrics
from contracts.clock import Clock
from contracts.events import Stage, TaskSpan
from contracts.logs import event
from contracts.plan import Plan
from contracts.planning import Absence, Batch, BatchReport, Chooser, RoutingReport
from contracts.worker import WorkerSpec
from planner.findep.default_plan import default_plan
from planner.findep.fit_plan import fit_plan
from planner.online.buckets import bucket_of

log = logging.getLogger("tandem.planning")

READY = "ready"


class RankPlanning(Observer):
    """Owned by the rank's loop thread; `batches`, `chosen` and `state` may be read by any thread.

    batches: how many ran under which plan. chosen: how many by whose choice, as
    "planner", "pinned" or "default REASON".
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        chunk_cost: Callable[[int, int], float],
        upcoming: Callable[[], Iterable[Batch]],
        clock: Clock,
        telemetry: Telemetry,
        pool_tokens: int = 0,
    ) -> None:
        """`chunk_cost(start, stop)`: as the executor's, which cuts batches by it. upcoming: what
        would come next, while a batch runs. pool_tokens: that the rank's KV pool holds."""
        self.batches: Counter[str] = Counter()
        self.chosen: Counter[str] = Counter()
        self._spec = spec
        self._chunk_cost = chunk_cost
        self._upcoming = upcoming
        self._upcoming_changed = False
        self._clock = clock
        self._telemetry = telemetry
        self._link: PlannerLink | None = None
        self._pinned: Plan | None = None
        self._recorder = SpanRecorder()
        self._reported_s = clock()
        self._running: dict[int, _Running] = {}  # by the batch's number
        self._recorded: int | None = None  # the batch that is
        self._ended_s: float | None = None  # when the last batch did
        self._said: str = Absence.OFF
        self._traffic = TrafficCount(spec.name, pool_tokens, clock)

    @property
    def state(self) -> str:
        """ "ready", or why no plan of the planner can be hoped for."""
        if self._link is None:
            return Absence.OFF
        absence = self._link.absence()
        return f"cold: {self._link.cold}" if absence is Absence.COLD else absence or READY

    def join(self, address: str) -> None:
        """Connects to the planner, in the background, and again whenever it is lost. May be called
        again: it is elsewhere then."""
        if self._link is not None:
            self._link.move(address)
            return
        config = self._spec.config.planner
        me = Identity(name=self._spec.name, token=self._spec.token, epoch=None)
        self._link = PlannerLink(
            me, address, answer_deadline_s=config.answer_deadline_s, clock=self._clock
        )

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def pin(self, plan: Plan | None) -> None:
        self._pinned = plan

    def observe(self, span: TaskSpan) -> None:
        """Every span of the rank."""
        self._recorder.observe(span)

    def report_routing(self, make: Callable[[], RoutingReport]) -> None:
        """Sent by the link's thread, where there is a planner."""
        if self._link is not None:
            self._link.report(make)

    def choose(self, batch: ScheduledBatch) -> Plan:
        """The plan of a batch that has been formed: pinned, planned ahead, or the default."""
        plan = self._pinned
        who, reason, known = Chooser.PINNED, None, None
        if plan is None:
            plan, known, reason = self._planned(new_tokens(batch))
            who = Chooser.PLANNER
        if plan is None:
            plan = default_plan(self._spec.config.schedule, batch.tokens)
            who = Chooser.DEFAULT
        self.chosen[f"{who} {reason}" if reason else str(who)] += 1
        self._telemetry.count(metrics.PLAN_BATCHES, self._spec.name, who, reason or "")
        self.batches[general_label(plan)] += 1
        self._running[batch.number] = _Running(batch, plan, known, self._waited_since(batch))
        self._record_if_due(batch)
        return plan

    def received(self, message: FromClient) -> None:
        self._upcoming_changed = True

    def formed(self, batch: ScheduledBatch) -> None:
        self._upcoming_changed = True

    def stepped(self) -> None:
        if self._upcoming_changed and self._running:  # experts have work meanwhile
            self._upcoming_changed = False
            self.look_ahead()

    def look_ahead(self) -> None:
        """Asks for the plans of batches that would come next, unless they are known."""
        if self._link is None or self._pinned is not None:
            return
        for upcoming in self._upcoming():
            known = self._link.plans.get(bucket_of(upcoming))
            if known is None or self._link.is_stale(known):
                self._link.ask(upcoming)

    def completed(self, batch: ScheduledBatch) -> None:
        """The batch has run: what was recorded of it is told, on the link's thread."""
        running = self._running.pop(batch.number, None)
        self._ended_s = self._clock()
        if running is not None and running.since_s is not None:
            running.took_ms = 1e3 * (self._ended_s - running.since_s)
        traffic = self._traffic.add(batch)
        if self._link is not None and traffic is not None:
            self._link.report(lambda: traffic)
        if self._recorded != batch.number:
            return
        self._recorded, spans = None, self._recorder.end()
        if self._link is not None and running is not None and spans:
            self._link.report(lambda: self._report(running, spans))

    def dropped(self, batch: ScheduledBatch) -> None:
        self._running.pop(batch.number, None)

    def sections(self) -> dict[str, dict[str, float]]:
        return {"plans": dict(self.batches), "chosen_by": dict(self.chosen)}

    def notes(self) -> dict[str, str]:
        return {"planner": self.state}

    def _planned(self, batch: Batch) -> tuple[Plan | None, KnownPlan | None, Absence | None]:
        """(plan, the answer it is from, why there is none)."""
        link = self._link
        if link is None:
            return None, None, Absence.OFF
        known = link.plans.get(bucket_of(batch))
        if known is None or link.is_stale(known):
            link.ask(batch)
        absence = link.absence()
        self._say(absence or READY)
        if known is None or known.answer.plan is None:
            return None, None, absence or Absence.NEW_SHAPE
        schedule = self._spec.config.schedule
        plan = fit_plan(known.answer.plan, known.batch, batch, max_tokens=schedule.max_batch_tokens)
        if plan is None:
            link.ask(batch)
            return None, None, Absence.MISFIT
        return plan, known, None

    def _say(self, state: str) -> None:
        """Logs a change of what can be expected of the planner, once."""
        if state != self._said:
            self._said = state
            level = logging.WARNING if state in (Absence.LOST, Absence.SLOW) else logging.INFO
            event(log, "planner_state", level, rank=self._spec.name, state=self.state)

    def _waited_since(self, batch: ScheduledBatch) -> float | None:
        """When the batch before it ended, if some of its sequences could go on then."""
        goes_on = any(chunk.sequence.generated for chunk in batch.chunks)
        return self._ended_s if goes_on and not self._running else None

    def _record_if_due(self, batch: ScheduledBatch) -> None:
        """Records a batch that runs alone; what a second one would do to its times is not its
        own."""
        if len(self._running) > 1:
            self._recorded, _ = None, self._recorder.end()
            return
        config, now_s = self._spec.config.planner, self._clock()
        if self._link is not None and config.refit and now_s - self._reported_s >= config.report_s:
            self._reported_s, self._recorded = now_s, batch.number
            self._recorder.begin()

    def _report(self, running: _Running, spans: list[TaskSpan]) -> BatchReport | None:
        number = running.batch.number
        costs = [self._chunk_cost(chunk.start, chunk.stop) for chunk in running.batch.chunks]
        cut = cut_batch(running.batch, running.plan, costs)
        parts = [[(chunk.start, chunk.stop) for chunk in part.chunks] for part in cut]
        times, measured_ms = micro_batch_times(spans, number, parts), makespan_ms(spans, number)
        if not times or not measured_ms > 0:
            return None
        return BatchReport(
            rank=self._spec.name,
            plan=running.plan,
            measured_ms=measured_ms,
            micro_batches=times,
            e2a=transfer_times(spans, Stage.E2A),
            between_ms=max(0.0, running.took_ms - measured_ms),
            by_planner=running.known is not None,
            solve_ms=0.0 if running.known is None else running.known.answer.solve_ms,
        )


class _Running:
    """The batch that runs, and where its plan is from. since_s: since when its sequences waited for
    nothing but it (None: they have not); took_ms: from then to its end (0: not known)."""

    __slots__ = ("batch", "known", "plan", "since_s", "took_ms")

    def __init__(
        self, batch: ScheduledBatch, plan: Plan, known: KnownPlan | None, since_s: float | None
    ) -> None:
        self.batch = batch
        self.plan = plan
        self.known = known
        self.since_s = since_s
        self.took_ms = 0.0


def new_tokens(batch: ScheduledBatch) -> Batch:
    """[start, stop) of each sequence, in the batch's order."""
    return [(chunk.start, chunk.stop) for chunk in batch.chunks]


def general_label(plan: Plan) -> str:
    """The plan's label without the sizes of this one batch."""
    return Plan(
        r1=plan.r1,
        r2=plan.r2,
        order=plan.order,
        shared_lag=plan.shared_lag,
        sequence_chunks=plan.sequence_chunks,
    ).label
