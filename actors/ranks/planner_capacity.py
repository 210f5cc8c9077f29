"""Capacity metrics of a group, by the model in docs/design/planner.md."""

from __future__ import annotations

import asyncio
import logging

from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.logs import event
from contracts.metrics import Pipeline
from contracts.planner_messages import BatchReport, TrafficReport
from contracts.ranks import Group, RankSpec
from planner.online.attention_stage import tokens_of
from planner.online.capacity import Traffic, capacity
from planner.online.planner import OnlinePlanner

log = logging.getLogger("tandem.planner")

PERIOD_S = 15.0  # a large group takes a third of a second to compute
MAX_UNSHARED_FRACTION = 0.5  # below this, a batch mostly has the experts to itself
SAMPLED_BATCHES = 6  # largest batches of a period, nearest to the knee


class PlannerCapacity:
    """Owned by the planner's service thread; computes in another thread."""

    def __init__(self, spec: RankSpec, planner: OnlinePlanner, telemetry: Telemetry) -> None:
        self._spec, self._planner, self._telemetry = spec, planner, telemetry
        self._traffic = Traffic(spec.config.schedule.max_batch_sequences)
        self._used_fraction = 0.0
        self._ran: list[BatchReport] = []

    def add_traffic(self, report: TrafficReport) -> None:
        self._traffic.add(report, monotonic_s())

    def add_batch(self, report: BatchReport) -> None:
        if self._planner.size[0] == 1 or self._used_fraction < MAX_UNSHARED_FRACTION:
            self._planner.observe_solo_batch(report)
        largest = sorted([*self._ran, report], key=_tokens, reverse=True)
        self._ran = largest[:SAMPLED_BATCHES]

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.publish(monotonic_s())

    async def publish(self, now_s: float) -> None:
        """Publish the capacity at the last minute's load; without load only that none is used."""
        telemetry = self._telemetry
        mix = self._traffic.mix(now_s, self._planner.size[0])
        if mix.is_empty:
            telemetry.set(metrics.CAPACITY_USED, Pipeline.GENERATION, self._spec.name, to=0.0)
            return
        ran, self._ran = self._ran, []
        try:
            found = await asyncio.to_thread(capacity, self._planner.group(mix), mix, ran)
        except ValueError as error:  # an invalid report of a rank
            event(log, "capacity_unknown", logging.WARNING, reason=error)
            return
        if found is None:
            return
        self._used_fraction = found.used_fraction
        telemetry.set(
            metrics.CAPACITY_USED, Pipeline.GENERATION, self._spec.name, to=found.used_fraction
        )
        for kind, gain in found.gains.items():
            telemetry.set(metrics.CAPACITY_GAIN, Pipeline.GENERATION, kind, to=gain)
        for resource, in_use in found.in_use.items():
            telemetry.set(metrics.CAPACITY_IN_USE, resource, to=in_use)
        for group, ranks in zip((Group.ATTENTION, Group.EXPERT), found.best, strict=True):
            telemetry.set(metrics.CAPACITY_RANKS, group, to=ranks)


def _tokens(report: BatchReport) -> int:
    return sum(tokens_of(times.batch) for times in report.micro_batches)
