"""The expert ranks of a stage probe: servers with the real experts, which note their calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from actors.channels.base import Endpoint
from actors.experts.expert_server import ExpertServer
from actors.experts.rank_experts import AllThere
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.placement import Placement
from kernels.steps import Steps
from models.experts.moe import ExpertHalf
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint


class ExpertTask(NamedTuple):
    """One token group in one layer: `pairs` (token, expert) pairs over `active` experts."""

    layer: int
    active: int
    pairs: int
    seconds: float


class ProbedExperts:
    """Owned by the thread that steps the attention rank."""

    def __init__(
        self,
        ends: Sequence[Endpoint],
        checkpoint: Checkpoint,
        spec: ModelSpec,
        placement: Placement,
        dtype: torch.dtype,
        clock: Clock,
    ) -> None:
        """An end for each rank of `placement`, which has every expert once, in order. Raises
        CheckpointError."""
        self._ranks: list[tuple[_Watched, ExpertServer]] = []
        for end, (low, high) in zip(ends, placement.slot_bounds, strict=True):
            watched: Any = _Watched(
                ExpertHalf.load(checkpoint, spec, range(low, high), dtype=dtype)
            )
            server = ExpertServer(end, AllThere(watched), timeline=Timeline(0), clock=clock)
            self._ranks.append((watched, server))

    def step(self) -> list[ExpertTask]:
        """What all ranks, one after the other, had to do; with the thread's CPU time."""
        found: list[ExpertTask] = []
        for watched, server in self._ranks:
            watched.calls.clear()
            start_s = time.thread_time()
            server.step(0.0)
            seconds = time.thread_time() - start_s
            found += (ExpertTask(*call, seconds) for call in watched.calls)
        return found


class _Watched:
    """An expert half that notes (layer, active experts, pairs) of its calls; it has all of one that
    a server uses."""

    def __init__(self, half: ExpertHalf) -> None:
        self._half = half
        self.calls: list[tuple[int, int, int]] = []

    def steps(
        self,
        layer: int,
        x_UD: torch.Tensor,
        rows_N: torch.Tensor,
        weights_N: torch.Tensor,
        counts_e: torch.Tensor,
    ) -> Steps[torch.Tensor]:
        self.calls.append((layer, int((counts_e > 0).sum()), rows_N.shape[0]))
        return self._half.steps(layer, x_UD, rows_N, weights_N, counts_e)
