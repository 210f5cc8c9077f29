"""The planner as a service: answers the ranks' requests and learns from their reports.

rank ── PlanRequest ───────────> OnlinePlanner (planner/online/planner.py)
     <── PlanResponse ──────────
     ── BatchReport, ExpertReport ──> refit
     <── ModelsChanged ──────  when the stage models have changed
     ── RoutingSampleReport, CurrentPlacement, PlacementReport ──> actors/ranks/planner_placement.py
     <── PlacementProposal ──
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import msgspec

from actors.channels.handshake import Identity, Remote
from actors.channels.heartbeat import EventLoopWatchdog
from actors.planning.planner_inputs import shape_of
from actors.ranks.planner_placement import PlannerPlacement
from actors.ranks.rank import Rank, RankHooks, RankLoop
from actors.rpc.client_server import AuthenticatedServer
from actors.telemetry.telemetry import Telemetry, Timeline
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.errors import ConfigError, HandshakeError
from contracts.logs import event
from contracts.messages import FRAME_ERRORS, encode_frame, read_frame
from contracts.metrics import Pipeline
from contracts.plan import Order
from contracts.planner_messages import (
    MAX_PLANNER_FRAME_BYTES,
    PLANNER_PURPOSE,
    BatchReport,
    CurrentPlacement,
    ExpertReport,
    FromPlanner,
    ModelsChanged,
    PlacementProposal,
    PlacementReport,
    PlanRequest,
    PlanResponse,
    RoutingSampleReport,
    ToPlanner,
    TrafficReport,
)
from contracts.ranks import Group, RankReady, RankSpec
from contracts.traces import Stage, TaskSpan
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint, element_bytes
from planner.costs.model_shape import count_tokens
from planner.online.capacity import Traffic, capacity
from planner.online.models import OnlineSetup
from planner.online.planner import NoPlanError, OnlinePlanner

log = logging.getLogger("tandem.planner")

STOP_DEADLINE_S = 2.0
MAX_BUFFERED_BYTES = 8 << 20  # a rank that reads nothing is disconnected beyond this
_decode = msgspec.msgpack.Decoder(ToPlanner).decode


def planner_rank(spec: RankSpec) -> Rank:
    """Create the planner and listen; ranks connect to it. Raises CheckpointError."""
    service = PlannerService(spec)
    ready = RankReady(name=spec.name, pid=os.getpid(), channel_address=service.listen())
    telemetry = service.plan_metrics.telemetry
    hooks = RankHooks(resize=service.resize)
    return Rank(spec, ready, service, telemetry, None, hooks, timeline=service.timeline)


class PlannerService(RankLoop):
    """An asyncio loop in its own thread reads, solves and writes."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        model = check_checkpoint(Path(spec.model_folder))
        setup = _setup(spec, model)
        self._planner = OnlinePlanner(setup)
        self._share = setup.shape.top_k / setup.shape.num_experts  # tokens per expert
        self.plan_metrics = PlanMetrics(setup.attention_ranks * self._share)
        self._identity = Identity(name=spec.name, token=spec.token, epoch=None)
        self._encoder = msgspec.msgpack.Encoder()
        self._writers: dict[asyncio.StreamWriter, str] = {}  # names of the peers
        self._placement = PlannerPlacement(
            spec, model, setup.shape, self._planner, self.plan_metrics.telemetry, self._send
        )
        self._capacity = PlannerCapacity(spec, self._planner, self.plan_metrics.telemetry)
        self._watching: list[asyncio.Task[None]] = []
        self.timeline = Timeline(spec.config.trace.spans)
        self._answered, self._published_version = 0, self._planner.version
        self.drained = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._watch = EventLoopWatchdog(spec.name, spec.config.log.stall_threshold_s)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"{spec.name}-service", daemon=True
        )

    def resize(self, attention_ranks: int, expert_ranks: int) -> None:
        """Plan for a group of this size from now on. Thread-safe."""
        self._loop.call_soon_threadsafe(self._resize, attention_ranks, expert_ranks)

    def _resize(self, attention_ranks: int, expert_ranks: int) -> None:
        try:
            self._planner.resize(attention_ranks, expert_ranks)
        except ConfigError as error:
            event(log, "hardware_size_mismatch", logging.WARNING, reason=error)
            self._planner.reset_models(attention_ranks, expert_ranks)
        self.plan_metrics.tokens_per_expert = attention_ranks * self._share
        self._publish_version()

    def listen(self) -> str:
        """Listen and return the channel address."""
        self._thread.start()
        self._loop.call_soon_threadsafe(self._watch.start, self._loop)
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        return listening.result(self._spec.config.channel.connect_timeout_s)

    # ---- RankLoop

    @property
    def problem(self) -> str:
        return "" if self._thread.is_alive() else f"{self._spec.name}: its service has ended"

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._watch.close()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(STOP_DEADLINE_S)
        self._placement.close(STOP_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_DEADLINE_S)
        self._loop.close()

    def sections(self) -> dict[str, dict[str, float]]:
        """totals: number of responses and version of the models."""
        return {"totals": {"answers": self._answered, "models": self._planner.version}}

    # ---- on the service's thread

    async def _listen(self) -> str:
        self._server = AuthenticatedServer(self._identity, answer=_only_ranks, serve=self._serve)
        self._watching = [
            asyncio.create_task(self._placement.watch(self._loop)),
            asyncio.create_task(self._capacity.watch()),
        ]
        return self._server.open(self._spec.host)

    async def _close(self) -> None:
        for watching in self._watching:
            watching.cancel()
        await self._server.close(STOP_DEADLINE_S / 2)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, remote: Remote
    ) -> None:
        try:
            self._writers[writer] = remote.name
            self._write(writer, ModelsChanged(self._planner.version))
            while True:
                body = await read_frame(reader, MAX_PLANNER_FRAME_BYTES)
                self._handle(writer, remote.name, _decode(body))
        except (OSError, EOFError, ValueError, *FRAME_ERRORS) as error:
            event(log, "planner_connection_ended", rank=remote.name, reason=error)
        finally:
            del self._writers[writer]
            if remote.name not in self._writers.values():
                self._placement.remove_peer(remote.name)

    def _handle(self, writer: asyncio.StreamWriter, name: str, message: ToPlanner) -> None:
        """Handle a message. Raises ValueError for an invalid one."""
        match message:
            case PlanRequest():
                started_s = monotonic_s()
                self._write(writer, self._answer(message))
                span = TaskSpan(self._spec.name, Stage.SOLVE, started_s, monotonic_s())
                self.timeline.add(span)
            case TrafficReport():
                self._capacity.add_traffic(message)
            case RoutingSampleReport():
                self._placement.handle_routing(message)
            case CurrentPlacement():
                self._placement.handle_held(name, message)
            case PlacementReport():
                self._placement.handle_outcome(name, message)
            case _:
                self._learn(message)
        if self._planner.version != self._published_version:
            self._publish_version()

    def _learn(self, report: BatchReport | ExpertReport) -> None:
        if isinstance(report, ExpertReport):
            self._planner.observe_experts(report)
            return
        batches = [times.batch for times in report.micro_batches]
        predicted_ms = self._planner.predict_ms(report.plan, batches)
        self.plan_metrics.publish(report, predicted_ms)
        self._planner.observe_batch(report)
        self._capacity.add_batch(report)

    def _publish_version(self) -> None:
        self._published_version = self._planner.version
        event(log, "stage_models_changed", version=self._published_version)
        for each in list(self._writers):
            self._write(each, ModelsChanged(self._published_version))

    def _answer(self, query: PlanRequest) -> PlanResponse:
        started_s = monotonic_s()
        self._answered += 1
        known = self._planner.known(query.batch)
        try:
            planned = known or self._planner.plan(query.batch)
        except NoPlanError as error:
            return PlanResponse(
                number=query.number, version=self._planner.version, reason=str(error)
            )
        return PlanResponse(
            number=query.number,
            version=self._planner.version,
            plan=planned.plan,
            trial=planned.trial,
            solve_ms=0.0 if known else 1e3 * (monotonic_s() - started_s),
        )

    def _send(self, name: str, message: PlacementProposal) -> None:
        for writer, each in list(self._writers.items()):
            if each == name:
                self._write(writer, message)

    def _write(self, writer: asyncio.StreamWriter, message: FromPlanner) -> None:
        writer.write(encode_frame(self._encoder.encode(message)))
        if writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            writer.transport.abort()


PERIOD_S = 15.0  # a large group takes a third of a second to compute
MAX_UNSHARED_FRACTION = 0.5  # below this, a batch mostly has the experts to itself
SAMPLED_BATCHES = 6  # largest batches of a period, nearest to the knee


class PlannerCapacity:
    """Capacity metrics of the group (docs/design/planner.md). Owned by the service's thread."""

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
    return sum(count_tokens(times.batch) for times in report.micro_batches)


class PlanMetrics:
    """Metrics of the latest batch measured by any rank."""

    def __init__(self, tokens_per_expert: float) -> None:
        """tokens_per_expert: that an expert receives if each attention rank has one token."""
        self.telemetry = Telemetry()
        self.tokens_per_expert = tokens_per_expert

    def publish(self, report: BatchReport, predicted_ms: float | None) -> None:
        """predicted_ms: for the batch as cut, before its times were learned from."""
        plan, telemetry = report.plan, self.telemetry
        sizes = [len(times.batch) for times in report.micro_batches]
        tokens = sum(stop - start for m in report.micro_batches for start, stop in m.batch)
        me = tokens / len(sizes) * self.tokens_per_expert / plan.r2
        for field, value in (("ma", max(sizes)), ("r1", len(sizes)), ("me", me), ("r2", plan.r2)):
            telemetry.set(metrics.PLAN, field, to=value)
        for order in Order:
            telemetry.set(metrics.PLAN_INFO, order, to=float(order is plan.order))
        telemetry.set(metrics.PLAN_MEASURED, to=report.measured_ms / 1e3)
        if predicted_ms is not None:
            telemetry.set(metrics.PLAN_PREDICTED, to=predicted_ms / 1e3)
        if report.by_planner:
            telemetry.set(metrics.PLAN_SOLVE, to=report.solve_ms / 1e3)


def _only_ranks(remote: Remote) -> bytes:
    if remote.purpose != PLANNER_PURPOSE:
        raise HandshakeError(f"purpose {remote.purpose!r}: the planner serves {PLANNER_PURPOSE!r}")
    return b""


def _setup(spec: RankSpec, model: ModelSpec) -> OnlineSetup:
    config = spec.config
    return OnlineSetup(
        shape=shape_of(model, element_bytes(model, config.model.dtype)),
        attention_ranks=spec.attention_ranks,
        expert_ranks=spec.expert_ranks,
        max_batch_tokens=config.schedule.max_batch_tokens,
        backend=spec.backend,
        hardware=spec.hardware,
        beyond=config.planner.extended_search,
        refit=config.planner.refit,
    )
