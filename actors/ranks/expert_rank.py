"""An expert rank: its experts of every layer, and the loop that serves token groups."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path

import torch

from actors.channels.endpoint import Endpoint
from actors.channels.factory import rank_endpoint
from actors.moe.direct_calls import CallServer
from actors.moe.expert_server import ExpertServer
from actors.moe.rank_experts import CachedExperts, DeviceCachedExperts, ResidentExperts
from actors.offload.cache_factory import device_cache, expert_cache
from actors.planning.planner_link import PlacementCallbacks, PlannerLink
from actors.planning.stage_report import SpanRecorder, expert_report
from actors.ranks.rank import Rank, RankHooks, RankLoop, recording
from actors.ranks.serving_rank import Priorities, prepare_process
from actors.rebalance.expert_loading import ExpertLoader, ResidentExpertLoader
from actors.rebalance.expert_rebalancer import ExpertRebalancer
from actors.telemetry.telemetry import RankMetrics, Recorded, spans_of
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.placement import PlacementUpdate
from contracts.planner_messages import CurrentPlacement, MoveOutcome
from contracts.ranks import DRAINED, RankReady, RankSpec
from contracts.traces import Stage
from kernels.device import runs_on_device
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import clamped_gate
from models.experts.host_experts import fingerprint
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line
from planner.placement.slots import check_fits
from planner.scheduling.task_order import oldest_of_highest_class

IDLE_POLL_S = 0.1


def expert_rank(spec: RankSpec) -> Rank:
    """Load the experts and listen; attention ranks connect to it. Raises CheckpointError."""
    spec = prepare_process(spec)
    device, folder = torch.device(spec.device), Path(spec.model_folder)
    model = check_checkpoint(folder)
    check_fits(spec.placement, None, model.num_experts, model.moe_layers)
    telemetry = RankMetrics(spec, monotonic_s)
    reports = ExpertReports(spec)
    endpoint = rank_endpoint(spec, device, monotonic_s)
    endpoint.dump_stacks_after(spec.config.log.stall_threshold_s)
    experts, *loaders = _load_experts(spec, model, endpoint, telemetry)
    reports.rebalancer = rebalancer = ExpertRebalancer(
        endpoint,
        spec.placement,
        experts,
        *loaders,
        deadline_s=spec.config.placement.move_timeout_s,
        clock=monotonic_s,
        report=lambda outcome: reports.link.report(lambda: outcome),
        settled=lambda: reports.link.report(reports.current),
    )
    _register_metrics(rebalancer, spec.name, telemetry)
    recorded = recording(spec, telemetry, endpoint.bytes_moved, reports.observe)
    priorities = Priorities(spec.config.priority, telemetry, spec.name)
    choice = priorities.preemption(oldest_of_highest_class, priorities.user.serve)
    server = ExpertServer(
        endpoint,
        experts,
        timeline=recorded.timeline,
        choice=choice,
        generations=rebalancer,
        device=device,
    )
    ready = RankReady(name=spec.name, pid=os.getpid(), channel_address=endpoint.listen(spec.host))
    loop = ExpertLoop(endpoint, server, rebalancer, reports.link)
    hooks = RankHooks(
        join_planner=reports.link.join, place=rebalancer.propose, placed=rebalancer.placed
    )
    return Rank(spec, ready, loop, telemetry, recorded, hooks)


def _load_experts(
    spec: RankSpec, model: ModelSpec, endpoint: Endpoint, telemetry: RankMetrics
) -> tuple[ResidentExperts | CachedExperts, ExpertLoader, ExpertLoader]:
    """Load all of the rank's experts, or open a cache of them if `experts` limits their number.

    Returns them with the loaders of proposals and of leases.
    """
    dtype, device = resolve_dtype(model, spec.config.model.dtype), torch.device(spec.device)
    own, generation = spec.own_experts, spec.placement.generation
    if spec.config.experts.is_bounded:
        known = own if any(own.values()) else None  # a rank added later: any expert
        cached: CachedExperts
        if runs_on_device(device):
            layout = ExpertLayout(model, dtype, device, packed=False)
            held = device_cache(spec, layout, telemetry, own=known)
            cached = DeviceCachedExperts(held, own, generation)
        else:
            cache = expert_cache(spec, ExpertLayout(model, dtype, device), telemetry, own=known)
            endpoint.watch(cache.fileno())
            cached = CachedExperts(cache, own, clamped_gate(model), generation)
        return cached, ExpertLoader(spec, model), ExpertLoader(spec, model, urgent=True)
    moves = spec.config.placement.rebalance != "off"
    folder, progress = Path(spec.model_folder), progress_line(spec.name, sys.stderr)
    checkpoint = Checkpoint(folder)
    loaded = fingerprint(folder)
    half = ExpertHalf.load(
        checkpoint,
        model,
        own,
        dtype=dtype,
        device=device,
        progress=progress,
        separate=moves,
        storage_format=spec.config.experts.storage_format,
    )
    calls = CallServer(endpoint) if device.type == "cpu" else None
    resident = ResidentExperts(half, generation, calls)
    layout = ExpertLayout(model, dtype, device)
    urgent_loader = ResidentExpertLoader(spec, layout, resident, loaded, urgent=True)
    return resident, ResidentExpertLoader(spec, layout, resident, loaded), urgent_loader


def _register_metrics(rebalancer: ExpertRebalancer, name: str, telemetry: RankMetrics) -> None:
    telemetry.read(metrics.PLACEMENT_GENERATION, name, of=lambda: rebalancer.placement.generation)
    for outcome in MoveOutcome:
        of = partial(rebalancer.outcomes.counts.__getitem__, outcome)
        telemetry.read(metrics.EXPERT_MOVES, name, outcome, of=of)
    telemetry.read(metrics.EXPERTS_MOVED, name, of=lambda: rebalancer.outcomes.loaded_bytes)
    telemetry.read(metrics.EXPERT_MOVE_TIME, name, of=lambda: rebalancer.outcomes.load_s)


class ExpertReports:
    """Reports expert calls and the placement to the planner; owned by the loop thread."""

    rebalancer: ExpertRebalancer

    def __init__(self, spec: RankSpec) -> None:
        self._name, self._config = spec.name, spec.config.planner
        self.link = PlannerLink(
            spec,
            monotonic_s,
            PlacementCallbacks(
                self.current,
                lambda placement: self.rebalancer.propose(PlacementUpdate(placement=placement)),
            ),
        )
        self._recorder = SpanRecorder()
        self._period_start_s: float | None = None

    def current(self) -> CurrentPlacement:
        placement, newest = self.rebalancer.placement, self.rebalancer.generations.newest
        return CurrentPlacement(rank=self._name, placement=placement, newest=newest)

    def observe(self, span: Recorded) -> None:
        """Record a span; send a report after every `report_interval_s` of work."""
        if not self._config.refit or not self.link.is_joined:
            return
        if self._period_start_s is None:
            self._period_start_s = span.end_s
            self._recorder.begin()
        self._recorder.observe(span)
        # SEND ends a call.
        worked_s = span.end_s - self._period_start_s
        if span.stage is Stage.SEND and worked_s >= self._config.report_interval_s:
            spans, self._period_start_s = self._recorder.end(), None
            self.link.report(lambda: expert_report(self._name, list(spans_of(spans))))


class ExpertLoop(RankLoop):
    """Serves token groups."""

    def __init__(
        self,
        endpoint: Endpoint,
        server: ExpertServer,
        rebalancer: ExpertRebalancer,
        link: PlannerLink,
    ) -> None:
        self.server, self.rebalancer = server, rebalancer
        self._endpoint, self._link = endpoint, link
        self.drained = threading.Event()
        self._until_s: float | None = None  # end of the drain
        self._has_announced = False

    @property
    def problem(self) -> str:
        return self._endpoint.stall_reason

    @torch.inference_mode()
    def run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self.server.step(IDLE_POLL_S)
            self._finish_drain()

    def _finish_drain(self) -> None:
        """Complete the drain once attention ranks use this rank's experts elsewhere."""
        until_s = self._until_s
        if until_s is None or self.drained.is_set():
            return
        if not self._has_announced:
            self._has_announced = True
            self.rebalancer.announce_drain()
        if self.rebalancer.is_drained or monotonic_s() >= until_s:
            self.drained.set()

    def refuse(self, reason: str, stopping: threading.Event) -> None:
        """Close all links, which notifies every peer."""
        self._endpoint.close()

    def wake(self) -> None:
        self._endpoint.wake()

    def drain(self, within_s: float) -> None:
        self._until_s = monotonic_s() + within_s

    def close(self) -> None:
        try:
            self._link.close()
            self.server.close()
            self.rebalancer.close()
            self.rebalancer.store.close()
        finally:
            self._endpoint.close()

    def sections(self) -> dict[str, dict[str, float]]:
        rebalancer = self.rebalancer
        outcomes = {
            outcome.value: count for outcome, count in list(rebalancer.outcomes.counts.items())
        }
        return {
            "placement": {
                "generation": rebalancer.placement.generation,
                "ranks": rebalancer.placement.ranks,
                "experts": rebalancer.store.count,
                **outcomes,
                "loaded_bytes": rebalancer.outcomes.loaded_bytes,
                "load_s": rebalancer.outcomes.load_s,
            }
        }

    def notes(self) -> dict[str, str]:
        under_way = self.rebalancer.generations.under_way
        notes = {} if under_way is None else {"placement": f"generation {under_way} is pending"}
        return notes | ({"leaving": DRAINED} if self.drained.is_set() else {})
