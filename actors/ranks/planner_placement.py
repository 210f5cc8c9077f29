"""The planner's part in placement: samples of the ranks' routing in, proposals out, outcomes in.

service's loop                                         a thread
RoutingSampleReport ── RoutingWindow
every POLL_INTERVAL_S  ── current routing ────────────>  token spread, find_rebalance_step, profile
PlacementProposal to every expert rank  <────────────  RebalanceStep
CurrentPlacement, PlacementReport ── RebalancePolicy

Plans are answered meanwhile: nothing waits for the thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.errors import CheckpointError, ConfigError
from contracts.logs import event
from contracts.placement import Placement
from contracts.planner_messages import (
    CurrentPlacement,
    MoveOutcome,
    PlacementProposal,
    PlacementReport,
    RoutingSampleReport,
)
from contracts.ranks import Group, RankSpec, rank_names
from models.prediction.routing_counts import RoutingCounter
from models.spec.checkpoint_files import ROUTING
from models.spec.model import ModelSpec
from planner.costs.model_shape import ModelShape
from planner.costs.routing_shape import Spread
from planner.online.planner import OnlinePlanner
from planner.placement.rebalance_policy import (
    POLL_INTERVAL_S,
    MoveCosts,
    RebalancePolicy,
    RebalanceStep,
    find_rebalance_step,
)
from planner.placement.routing import RoutingWindow, WindowRouting
from planner.placement.slots import ExpertPlacement, check_fits
from planner.schedule.placed_routing import routing_shape

log = logging.getLogger("tandem.planner")

MAX_SOLVE_S = 5.0
"""Seconds after which a solve begins no further layer."""
LEAST_SPREAD_TOKENS = 256

Send = Callable[[str, PlacementProposal], None]


class SolveResult(NamedTuple):
    """Result of a solve. spread: of the current tokens over the expert ranks."""

    spread: Spread | None = None
    step: RebalanceStep | None = None
    is_due_at_start: bool = False


class PlannerPlacement:
    """Owned by the service's loop. send: sends a proposal to an expert rank by name."""

    def __init__(
        self,
        spec: RankSpec,
        model: ModelSpec,
        shape: ModelShape,
        planner: OnlinePlanner,
        telemetry: Telemetry,
        send: Send,
    ) -> None:
        self._spec, self._model, self._planner = spec, model, planner
        self._telemetry, self._send = telemetry, send
        if spec.config.placement.rebalance != "off":
            telemetry.count(metrics.PLACEMENT_PROPOSALS, by=0)
            telemetry.set(metrics.PLACEMENT_GAIN, to=0.0)
        config = spec.config.placement
        self._config = config
        self._window = RoutingWindow(
            model.num_experts, len(model.moe_layers), model.top_k, model.vocab_size
        )
        self._policy = RebalancePolicy(spec.placement, config)
        self._expert_bytes = shape.expert_elements * shape.element_bytes
        self._held: dict[str, bool] = {}  # ranks that have reported their placement
        self._record = RoutingRecord(spec, model)
        self._thread: threading.Thread | None = None
        self._closing = False

    # ---- messages of ranks; ValueError for one that no rank of the group sends

    def handle_routing(self, report: RoutingSampleReport) -> None:
        arrays = self._window.add(monotonic_s(), report.tokens, report.ids, report.paths)
        self._record.add(*arrays)

    def handle_held(self, name: str, held: CurrentPlacement) -> None:
        self._check(name, held.placement)
        self._held[name] = True
        self._policy.record_held(held.placement, held.newest)

    def handle_outcome(self, name: str, outcome: PlacementReport) -> None:
        self._check_name(name)
        now_s = monotonic_s()
        if outcome.outcome is MoveOutcome.RETIRED:
            self._policy.record_retired(name, outcome.generation, now_s)
        elif outcome.outcome is MoveOutcome.FAILED:
            event(
                log,
                "placement_failed",
                rank=name,
                generation=outcome.generation,
                reason=outcome.reason,
            )
            self._policy.record_failure(outcome.generation, now_s)

    def remove_peer(self, name: str) -> None:
        """Handle a lost connection; the rank reports its placement again when it reconnects."""
        if name in self._held:
            self._held[name] = False

    # ---- solving

    async def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            self.start_solve(loop)

    def start_solve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a solve, unless one is running."""
        if self._thread is not None or self._spec.placement.ranks == 0:
            return
        now_s = monotonic_s()
        routing, policy = self._window.routing(now_s), self._policy
        is_due = policy.is_due(now_s, routing) and self._have_reported()
        current, unit_ms = policy.current, self._planner.unit_ms() or (None, None)
        costs = MoveCosts(self._expert_bytes, *unit_ms)
        generation = policy.newest + 1

        def run() -> None:
            result = SolveResult(is_due_at_start=is_due)
            try:
                self._record.count()
                result = result._replace(spread=_spread_now(routing, current))
                if is_due:
                    step = find_rebalance_step(
                        routing,
                        current,
                        costs,
                        self._config,
                        generation=generation,
                        should_continue=lambda: (
                            not self._closing and monotonic_s() < now_s + MAX_SOLVE_S
                        ),
                    )
                    result = result._replace(step=step)
            except (ConfigError, ValueError, ArithmeticError) as error:
                event(log, "placement_solve_failed", logging.ERROR, reason=error)
            finally:
                if not self._closing:
                    loop.call_soon_threadsafe(self._on_solved, result)

        name = f"{self._spec.name}-placement"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _on_solved(self, result: SolveResult) -> None:
        self._thread = None
        now_s = monotonic_s()
        if result.spread is not None:
            self._planner.spread_over(result.spread)
        if result.step is not None and self._have_reported(result.step):
            self._propose(result.step, now_s)
        elif result.is_due_at_start:
            self._policy.record_no_step(now_s)

    def _have_reported(self, step: RebalanceStep | None = None) -> bool:
        """Return True if all ranks in use have reported, and `step` starts from their placement."""
        current = self._policy.current
        is_next = step is None or step.placement.generation > self._policy.newest
        is_current = is_next and (step is None or step.placement.ranks == current.ranks)
        names = rank_names(Group.EXPERT, current.ranks)
        return is_current and all(self._held.get(name) for name in names)

    def _propose(self, step: RebalanceStep, now_s: float) -> None:
        self._policy.record_proposal(step, now_s)
        self._telemetry.count(metrics.PLACEMENT_PROPOSALS)
        self._telemetry.set(metrics.PLACEMENT_GAIN, to=step.gain_fraction)
        event(
            log,
            "placement_proposed",
            generation=step.placement.generation,
            gain_fraction=f"{step.gain_fraction:.3f}",
            load_bytes=step.load_bytes,
            is_whole=step.is_whole,
        )
        for name in rank_names(Group.EXPERT, step.placement.ranks):
            self._send(name, PlacementProposal(step.placement))

    def close(self, deadline_s: float) -> None:
        """Stop solving and write the profile, once no message arrives any more. Thread-safe."""
        self._closing = True
        thread = self._thread
        if thread is not None:
            thread.join(deadline_s)
        if thread is None or not thread.is_alive():
            self._record.close()

    def _check_name(self, name: str) -> None:
        if name not in rank_names(Group.EXPERT, self._model.num_experts):
            raise ValueError(f"{name} is no expert rank of this group, and speaks of placement")

    def _check(self, name: str, placement: Placement) -> None:
        self._check_name(name)
        launched = self._spec.placement
        try:
            check_fits(placement, None, self._model.num_experts, self._model.moe_layers)
        except ConfigError as error:
            raise ValueError(f"{name}: {error.message}") from None
        is_launched = placement.generation == launched.generation
        if is_launched and placement.slots_per_rank != launched.slots_per_rank:
            raise ValueError(
                f"{name} has slots_per_rank={placement.slots_per_rank}, this group was launched "
                f"with {launched.slots_per_rank}"
            )


def _spread_now(routing: WindowRouting, current: Placement) -> Spread | None:
    if routing.sampled < LEAST_SPREAD_TOKENS:
        return None
    slots = ExpertPlacement(current)
    layers = [layer for layer, line in enumerate(current.expert_of_slot) if line]
    return routing_shape([(routing.layer(p), slots.layer(n)) for p, n in enumerate(layers)]).mean


WRITE_S = 60.0
MAX_PENDING_REPORTS = 64  # since the last solve

CountArrays = tuple[NDArray[Any], NDArray[Any]]


class RoutingRecord:
    """Writes routing.safetensors to the folder `placement.record`, if set, every minute.

    `add` on one thread; `count` and `close` on another, or later.
    """

    def __init__(self, spec: RankSpec, model: ModelSpec) -> None:
        """Set up the counter. Raises CheckpointError."""
        folder = spec.config.placement.record
        self._path = None if folder is None else Path(folder) / ROUTING
        self._pending: list[CountArrays] = []
        self._written_s, self._written_tokens = monotonic_s(), 0
        self._counter: RoutingCounter | None = None
        if self._path is not None:
            self._counter = RoutingCounter(Path(spec.model_folder), model)

    def add(self, ids_P2: NDArray[Any], paths_PLK: NDArray[Any]) -> None:
        """Add checked arrays, which must not change any more."""
        if self._counter is not None and len(self._pending) < MAX_PENDING_REPORTS:
            self._pending.append((ids_P2, paths_PLK))

    def count(self) -> None:
        """Count the pending arrays; write if it is time to."""
        waiting, self._pending = self._pending, []
        if self._counter is None:
            return
        for ids_P2, paths_PLK in waiting:
            self._counter.add(ids_P2, paths_PLK)
        if monotonic_s() >= self._written_s + WRITE_S:
            self._write(self._counter)

    def close(self) -> None:
        self.count()
        if self._counter is not None:
            self._write(self._counter)

    def _write(self, counter: RoutingCounter) -> None:
        self._written_s = monotonic_s()
        if self._path is None or counter.tokens == self._written_tokens:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            counter.counts().write(self._path)
            self._written_tokens = counter.tokens
        except (CheckpointError, OSError) as error:
            event(log, "routing_record_failed", logging.ERROR, reason=error)
