"""An expert rank: its experts of every layer, and the loop that serves token groups.

A plain class, like actors/ranks/attention_worker.py.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch

from actors.channels.factory import rank_endpoint
from actors.channels.handshake import Identity
from actors.experts.expert_server import ExpertServer
from actors.planning.planner_link import PlannerLink
from actors.planning.stage_report import ExpertRecorder
from actors.ranks.memory import bound_memory
from actors.telemetry.rank_metrics import RankMetrics, channel_bytes
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.events import TaskSpan
from contracts.worker import RankReady, RankStatus, WorkerSpec
from models.experts.moe import ExpertHalf
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line
from planner.placement.slots import check_fits

IDLE_POLL_S = 0.1


class ExpertWorker:
    """Made with its weights loaded and listening. Then: start; status, spans; stop."""

    def __init__(self, spec: WorkerSpec) -> None:
        started_s = monotonic_s()
        config, device, folder = spec.config, torch.device(spec.device), Path(spec.model_folder)
        torch.set_num_threads(config.groups.torch_threads)
        bound_memory()
        self.spec = spec
        model = check_checkpoint(folder)
        check_fits(spec.placement, spec.expert_ranks, model.num_experts, model.moe_layers)
        self._half = ExpertHalf.load(
            Checkpoint(folder),
            model,
            spec.own_experts,
            dtype=resolve_dtype(model, config.model.dtype),
            device=device,
            progress=progress_line(spec.name, sys.stderr),
        )
        self._metrics = RankMetrics(spec, monotonic_s)
        self._timeline = Timeline(config.trace.spans, self._observe)
        self._planner: PlannerLink | None = None
        self._recorder: ExpertRecorder | None = None
        self._endpoint = rank_endpoint(spec, device, monotonic_s)
        self._metrics.follow(self._timeline, self._endpoint.bytes_moved)
        self._server = ExpertServer(
            self._endpoint, self._half, timeline=self._timeline, clock=monotonic_s
        )
        self._reason = ""
        self._started_s = 0.0
        self._stopping = threading.Event()
        self._loop_thread = threading.Thread(target=self._run, name=f"{spec.name}-loop")
        self.ready = RankReady(
            name=spec.name,
            pid=os.getpid(),
            channel_address=self._endpoint.listen(spec.host),
            load_s=monotonic_s() - started_s,
        )

    def connect(self, addresses: dict[str, str]) -> None:
        """Attention ranks connect to expert ranks, not the other way round."""

    def join_planner(self, address: str) -> None:
        """Tells the planner there, from now on, how long calls of experts take."""
        planner = self.spec.config.planner
        me = Identity(name=self.spec.name, token=self.spec.token, epoch=None)
        self._planner = PlannerLink(
            me, address, answer_deadline_s=planner.answer_deadline_s, clock=monotonic_s
        )
        if planner.refit:
            self._recorder = ExpertRecorder(self.spec.name, planner.report_s, self._planner.report)

    def start(self) -> None:
        self._started_s = monotonic_s()
        self._loop_thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._endpoint.wake()
        if self._loop_thread.is_alive():
            self._loop_thread.join(10.0)
        if self._planner is not None:
            self._planner.close()
        self._endpoint.close()

    def status(self) -> RankStatus:
        reason = self._reason or self._endpoint.stuck
        return RankStatus(
            name=self.spec.name,
            healthy=not reason,
            reason=reason,
            epoch=self.spec.epoch,
            uptime_s=monotonic_s() - self._started_s if self._started_s else 0.0,
            sections={
                "stage_s": dict(self._timeline.stage_seconds),
                "channel_bytes": channel_bytes(self._endpoint.bytes_moved()),
                "totals": {"exposed_s": self._timeline.exposed_s},
            },
        )

    def metrics(self) -> str:
        """Prometheus text of this rank."""
        return self._metrics.exposition()

    def spans(self) -> list[TaskSpan]:
        """The last recorded task spans of this rank."""
        return self._timeline.spans()

    def _observe(self, span: TaskSpan) -> None:
        self._metrics.span(span)
        if self._recorder is not None:
            self._recorder.observe(span)

    def _run(self) -> None:
        """The loop. On an unforeseen error the links close, so that every peer learns of it."""
        try:
            with torch.inference_mode():
                while not self._stopping.is_set():
                    self._server.step(IDLE_POLL_S)
        except BaseException as error:
            self._reason = f"{self.spec.name} failed: {type(error).__name__}: {error}"
            self._endpoint.close()
            raise
