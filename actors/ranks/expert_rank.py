"""An expert rank: its experts of every layer, and the loop that serves token groups."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch

from actors.channels.base import Endpoint
from actors.channels.factory import rank_endpoint
from actors.channels.handshake import Identity
from actors.experts.caching import expert_cache
from actors.experts.expert_server import ExpertServer
from actors.experts.rank_experts import AllThere, RankExperts, SomeThere
from actors.planning.planner_link import PlannerLink
from actors.planning.stage_report import ExpertRecorder
from actors.ranks.priorities import Priorities
from actors.ranks.rank import Links, Rank, recording
from actors.ranks.serving_rank import prepare_process
from actors.telemetry.rank_metrics import RankMetrics
from contracts.clock import monotonic_s
from contracts.events import TaskSpan
from contracts.worker import RankReady, WorkerSpec
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import clamped_gate
from models.experts.moe import ExpertHalf
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line
from planner.findep.expert_queues import oldest_of_best_class
from planner.placement.slots import check_fits

IDLE_POLL_S = 0.1


def expert_rank(spec: WorkerSpec) -> Rank:
    """Loads its experts and begins to listen: attention ranks connect to it, not the other way
    round. Raises CheckpointError."""
    started_s = monotonic_s()
    prepare_process(spec)
    device, folder = torch.device(spec.device), Path(spec.model_folder)
    model = check_checkpoint(folder)
    check_fits(spec.placement, spec.expert_ranks, model.num_experts, model.moe_layers)
    telemetry = RankMetrics(spec, monotonic_s)
    reports = ExpertReports(spec)
    endpoint = rank_endpoint(spec, device, monotonic_s)
    experts = _experts(spec, model, endpoint, telemetry)
    recorded = recording(telemetry, spec.config.trace.spans, reports.observe)
    recorded = recorded.following(endpoint.bytes_moved)
    priorities = Priorities(spec.config.priority, telemetry, spec.name)
    choice = priorities.preemption(oldest_of_best_class, priorities.user.serve)
    server = ExpertServer(
        endpoint, experts, timeline=recorded.timeline, clock=monotonic_s, choice=choice
    )
    ready = RankReady(
        name=spec.name,
        pid=os.getpid(),
        channel_address=endpoint.listen(spec.host),
        load_s=monotonic_s() - started_s,
    )
    loop = ExpertLoop(endpoint, server, experts, reports)
    return Rank(spec, ready, loop, telemetry, recorded, Links(join_planner=reports.join))


def _experts(
    spec: WorkerSpec, model: ModelSpec, endpoint: Endpoint, telemetry: RankMetrics
) -> RankExperts:
    """All of its own, or as many as the section `experts` says."""
    dtype = resolve_dtype(model, spec.config.model.dtype)
    device, own = torch.device(spec.device), spec.own_experts
    if not spec.config.experts.is_bounded:
        progress = progress_line(spec.name, sys.stderr)
        checkpoint = Checkpoint(Path(spec.model_folder))
        return AllThere(
            ExpertHalf.load(checkpoint, model, own, dtype=dtype, device=device, progress=progress)
        )
    cache = expert_cache(spec, ExpertLayout(model, dtype, device), telemetry, own=own)
    endpoint.watch(cache.fileno())
    return SomeThere(cache, own, clamped_gate(model))


class ExpertReports:
    """Tells a planner how long calls of experts take."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._link: PlannerLink | None = None
        self._recorder: ExpertRecorder | None = None

    def join(self, address: str) -> None:
        """The planner there, from now on."""
        planner = self._spec.config.planner
        me = Identity(name=self._spec.name, token=self._spec.token, epoch=None)
        self._link = PlannerLink(
            me, address, answer_deadline_s=planner.answer_deadline_s, clock=monotonic_s
        )
        if planner.refit:
            self._recorder = ExpertRecorder(self._spec.name, planner.report_s, self._link.report)

    def observe(self, span: TaskSpan) -> None:
        if self._recorder is not None:
            self._recorder.observe(span)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class ExpertLoop:
    """A `Loop` of a `Rank`."""

    def __init__(
        self,
        endpoint: Endpoint,
        server: ExpertServer,
        experts: RankExperts,
        reports: ExpertReports,
    ) -> None:
        self.server = server
        self._endpoint, self._experts, self._reports = endpoint, experts, reports

    @property
    def problem(self) -> str:
        return self._endpoint.stuck

    def run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self.server.step(IDLE_POLL_S)

    def refuse(self, reason: str, stopping: threading.Event) -> None:
        """Every peer learns of it by its link."""
        self._endpoint.close()

    def wake(self) -> None:
        self._endpoint.wake()

    def close(self) -> None:
        try:
            self._reports.close()
            self.server.close()
            self._experts.close()
        finally:
            self._endpoint.close()

    load = (0, 0)

    def sections(self) -> dict[str, dict[str, float]]:
        return {}

    def notes(self) -> dict[str, str]:
        return {}
