"""A rank's own Prometheus metrics, under the names of contracts/metrics.py."""

from __future__ import annotations

from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.clock import Clock
from contracts.events import Stage, TaskSpan
from contracts.worker import Group, RankStatus, WorkerSpec

_EXPORTED = (
    *(Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.A2E, Stage.E2A),
    *(Stage.GATHER, Stage.HOST_COPY),
)
_BUSY = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.SEND, Stage.FINISH)


_DIRECTIONS = {Group.ATTENTION: "a2e", Group.PREFILL: "gather"}


class RankMetrics:
    """`observe` is called by the loop thread for each span, `text` by whoever scrapes."""

    def __init__(self, spec: WorkerSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self._telemetry = Telemetry()
        self._bytes_sent = 0
        self._chosen: dict[str, int] = {}
        self._busy_s = 0.0
        self._flops = 0
        self._scraped_s = clock()

    def observe(self, span: TaskSpan) -> None:
        if span.stage in _EXPORTED:
            seconds = max(0.0, span.end_s - span.start_s)
            self._telemetry.observe(metrics.STAGE, span.stage, self._spec.name, value=seconds)

    def text(self, status: RankStatus) -> str:
        """Prometheus text. The busy fraction is that of the time since the last call."""
        spec, telemetry = self._spec, self._telemetry
        direction = _DIRECTIONS.get(spec.group, "e2a")
        grown, self._bytes_sent = status.bytes_sent - self._bytes_sent, status.bytes_sent
        telemetry.count(metrics.CHANNEL_BYTES, direction, spec.backend, by=grown)
        telemetry.set(metrics.EXPOSED_COMMUNICATION, spec.name, to=status.exposed_s)
        elapsed_s = self._elapsed_s()
        telemetry.set(
            metrics.RANK_BUSY, spec.group, spec.name, to=self._busy_fraction(status, elapsed_s)
        )
        if spec.group is Group.PREFILL:
            self._set_prefill(status, elapsed_s)
        group = "prefill" if spec.group is Group.PREFILL else "attention_expert"
        telemetry.set(metrics.GROUP_EPOCH, group, to=status.epoch)
        for state, blocks in status.kv_blocks.items():
            telemetry.set(metrics.KV_BLOCKS, spec.name, state, to=blocks)
        for choice, count in status.chosen.items():
            chosen_by, _, reason = choice.partition(" ")
            grown = count - self._chosen.get(choice, 0)
            telemetry.count(metrics.PLAN_BATCHES, spec.name, chosen_by, reason, by=grown)
        self._chosen = status.chosen
        return telemetry.exposition()

    def _elapsed_s(self) -> float:
        """Since the last call."""
        before_s, self._scraped_s = self._scraped_s, self._clock()
        return self._scraped_s - before_s

    def _busy_fraction(self, status: RankStatus, elapsed_s: float) -> float:
        busy_s = sum(status.stage_s.get(stage, 0.0) for stage in _BUSY)
        fraction = (busy_s - self._busy_s) / elapsed_s if elapsed_s > 0 else 0.0
        self._busy_s = busy_s
        return min(1.0, fraction)

    def _set_prefill(self, status: RankStatus, elapsed_s: float) -> None:
        name, telemetry = self._spec.name, self._telemetry
        telemetry.set(metrics.LOAD, name, to=status.load)
        telemetry.set(metrics.SATURATION, name, to=status.saturation)
        flops, self._flops = status.computed_flops - self._flops, status.computed_flops
        if status.peak_flops_per_s > 0 and elapsed_s > 0:
            utilization = flops / elapsed_s / status.peak_flops_per_s
            telemetry.set(metrics.MODEL_FLOPS_UTILIZATION, name, to=utilization)
