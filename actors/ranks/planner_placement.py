"""The planner's part in placement: what ranks sample of their routing comes in, what experts should
stand elsewhere goes out, and what became of it comes back.

loop of the service                               a thread, one look at a time
RoutingReport ── RoutingWindow
every LOOK_S  ── Routing of now ───────────────>  spread of tokens, find_step, profile
PlacementProposal to every expert rank  <───────  Step
PlacementHeld, PlacementOutcome ── Follower

Nothing waits for a look: plans are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from actors.ranks.routing_record import RoutingRecord
from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.errors import ConfigError
from contracts.logs import event
from contracts.placement import Placement
from contracts.planning import (
    Outcome,
    PlacementHeld,
    PlacementOutcome,
    PlacementProposal,
    RoutingReport,
)
from contracts.worker import Group, WorkerSpec, rank_names
from models.spec.model import ModelSpec
from planner.costs.model_shape import ModelShape
from planner.costs.routing_shape import Spread
from planner.findep.placed_routing import routing_shape
from planner.online.planner import OnlinePlanner
from planner.placement.following import LOOK_S, Follower, MoveCosts, Step, find_step
from planner.placement.slots import ExpertPlacement, check_fits
from planner.placement.window import Routing, RoutingWindow

log = logging.getLogger("tandem.planner")

SOLVE_S = 5.0
"""Seconds of a look after which no further layer is begun."""
LEAST_SPREAD_TOKENS = 256

Send = Callable[[str, PlacementProposal], None]


class Looked(NamedTuple):
    """What a look has found. spread: of the tokens over the expert ranks as they are."""

    spread: Spread | None = None
    step: Step | None = None
    was_due: bool = False


class PlannerPlacement:
    """All but `_look` is called on the service's loop. send: to an expert rank by name."""

    def __init__(
        self,
        spec: WorkerSpec,
        model: ModelSpec,
        shape: ModelShape,
        planner: OnlinePlanner,
        telemetry: Telemetry,
        send: Send,
    ) -> None:
        self._spec, self._model, self._planner = spec, model, planner
        self._telemetry, self._send = telemetry, send
        if spec.config.placement.follow != "off":
            telemetry.count(metrics.PLACEMENT_PROPOSALS, by=0)
            telemetry.set(metrics.PLACEMENT_GAIN, to=0.0)
        config = spec.config.placement
        self._config = config
        self._window = RoutingWindow(
            model.num_experts, len(model.moe_layers), model.top_k, model.vocab_size
        )
        self._follower = Follower(spec.placement, config)
        self._expert_bytes = shape.expert_elements * shape.element_bytes
        self._held: dict[str, bool] = {}  # whether it said so, also of ranks that are not used yet
        self._record = RoutingRecord(spec, model)
        self._thread: threading.Thread | None = None
        self._closing = False

    # ---- what ranks say; raises ValueError for what none of this group does

    def take_routing(self, report: RoutingReport) -> None:
        arrays = self._window.add(monotonic_s(), report.tokens, report.ids, report.paths)
        self._record.add(*arrays)

    def take_held(self, name: str, held: PlacementHeld) -> None:
        self._check(name, held.placement)
        self._held[name] = True
        self._follower.held(held.placement, held.newest)

    def take_outcome(self, name: str, outcome: PlacementOutcome) -> None:
        self._check_name(name)
        now_s = monotonic_s()
        if outcome.outcome is Outcome.RETIRED:
            self._follower.retired(name, outcome.generation, now_s)
        elif outcome.outcome is Outcome.FAILED:
            event(
                log,
                "placement_failed",
                rank=name,
                generation=outcome.generation,
                reason=outcome.reason,
            )
            self._follower.failed(outcome.generation, now_s)

    def lost(self, name: str) -> None:
        """Its connection has ended: what it holds, it will say again."""
        if name in self._held:
            self._held[name] = False

    # ---- looks

    async def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(loop)

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins one, unless one is going on."""
        if self._thread is not None or self._spec.placement.ranks == 0:
            return
        now_s = monotonic_s()
        routing, follower = self._window.routing(now_s), self._follower
        is_due = follower.is_due(now_s, routing) and self._have_said()
        current, unit_ms = follower.current, self._planner.unit_ms() or (None, None)
        costs = MoveCosts(self._expert_bytes, *unit_ms)
        generation, gains = follower.newest + 1, follower.least_gains(now_s)

        def run() -> None:
            looked = Looked(was_due=is_due)
            try:
                self._record.count()
                looked = looked._replace(spread=_spread_now(routing, current))
                if is_due:
                    step = find_step(
                        routing,
                        current,
                        costs,
                        self._config,
                        generation=generation,
                        least_gains=gains,
                        go_on=lambda: not self._closing and monotonic_s() < now_s + SOLVE_S,
                    )
                    looked = looked._replace(step=step)
            except (ConfigError, ValueError, ArithmeticError) as error:
                event(log, "placement_look_failed", logging.ERROR, reason=error)
            finally:
                if not self._closing:
                    loop.call_soon_threadsafe(self._looked, looked)

        name = f"{self._spec.name}-placement"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _looked(self, looked: Looked) -> None:
        self._thread = None
        now_s = monotonic_s()
        if looked.spread is not None:
            self._planner.spread_over(looked.spread)
        if looked.step is not None and self._have_said(looked.step):
            self._propose(looked.step, now_s)
        elif looked.was_due:
            self._follower.nothing_found(now_s)

    def _have_said(self, step: Step | None = None) -> bool:
        """Whether all ranks that experts are on have said what they hold, and `step` is still one
        from there: the launcher has put them on more ranks or fewer meanwhile."""
        current = self._follower.current
        is_next = step is None or step.placement.generation > self._follower.newest
        there = is_next and (step is None or step.placement.ranks == current.ranks)
        names = rank_names(Group.EXPERT, current.ranks)
        return there and all(self._held.get(name) for name in names)

    def _propose(self, step: Step, now_s: float) -> None:
        self._follower.proposed(step, now_s)
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
        """Any thread, once nothing comes in any more: ends a look, and writes the profile."""
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


def _spread_now(routing: Routing, current: Placement) -> Spread | None:
    if routing.sampled < LEAST_SPREAD_TOKENS:
        return None
    slots = ExpertPlacement(current)
    layers = [layer for layer, line in enumerate(current.expert_of_slot) if line]
    return routing_shape([(routing.layer(p), slots.layer(n)) for p, n in enumerate(layers)]).mean
