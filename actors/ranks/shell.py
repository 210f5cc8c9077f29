"""Interface of one rank for Ray actors and plain processes, as named calls."""

from __future__ import annotations

import msgspec

from actors.channels.local_process import own_identity
from actors.ranks.rank import Rank, on_sigterm
from contracts.clock import monotonic_s
from contracts.errors import LaunchError
from contracts.interpreter import freeze_heap, watch_interpreter
from contracts.logs import set_up_logging
from contracts.placement import PlacementState, PlacementUpdate
from contracts.plan import Plan
from contracts.ranks import Group, RankReady, RankSpec, RankStatus
from contracts.traces import RankTrace

DRAIN_GRACE_S = 5.0  # for a loop in a long step


def _make_rank(spec: RankSpec) -> Rank:
    """Import what only this kind of rank needs: a launcher and a planner load no torch."""
    match spec.group:
        case Group.ATTENTION:
            from actors.ranks.attention_rank import attention_rank

            return attention_rank(spec)
        case Group.EXPERT:
            from actors.ranks.expert_rank import expert_rank

            return expert_rank(spec)
        case Group.PREFILL:
            from actors.ranks.prefill_rank import prefill_rank

            return prefill_rank(spec)
        case Group.PLANNER:
            from actors.ranks.planner_rank import planner_rank

            return planner_rank(spec)


class WorkerShell:
    """Holds one rank in its own process. SIGTERM drains it."""

    def __init__(self) -> None:
        self._rank: Rank | None = None
        on_sigterm(self._drain)

    def prepare(self, spec: RankSpec) -> RankReady:
        """Make the rank: load weights and listen. Its errors reach the launcher."""
        set_up_logging(spec.name, spec.config.log)
        watch_interpreter(2 * spec.config.log.stall_threshold_s)
        self._rank = _make_rank(spec)
        return msgspec.structs.replace(
            self._rank.ready,
            process_identity=own_identity(),
            metrics_address=self._rank.export_metrics(),
        )

    def connect(self, addresses: dict[str, str]) -> None:
        self._made.hooks.connect(addresses)

    def place(self, update: PlacementUpdate) -> None:
        """Start a placement update (actors/ranks/expert_resize.py); expert ranks only."""
        self._made.hooks.place(update)

    def placed(self) -> PlacementState:
        """Return the state of the placement; expert ranks only."""
        return self._made.hooks.placed()

    def join_planner(self, address: str) -> None:
        """Connect to the planner in the background; attention and expert ranks only."""
        self._made.hooks.join_planner(address)

    def start(self) -> None:
        freeze_heap()
        self._made.start()

    def status(self) -> RankStatus:
        return self._made.status()

    def clock_s(self) -> float:
        return monotonic_s()

    def trace(self, since_s: float) -> RankTrace:
        return self._made.trace(since_s)

    def pin_plan(self, plan: Plan | None) -> None:
        """Set the plan of all later batches; attention ranks only."""
        self._made.hooks.pin_plan(plan)

    def drain(self, within_s: float) -> None:
        """Accept nothing new; complete or hand over all work in time."""
        self._made.drain(within_s)

    def resize(self, attention_ranks: int, expert_ranks: int) -> None:
        """Plan for a group of this size from now on; the planner only."""
        self._made.hooks.resize(attention_ranks, expert_ranks)

    def metrics(self) -> str:
        return self._made.metrics()

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()

    @property
    def _made(self) -> Rank:
        if self._rank is None:
            raise LaunchError("the rank is used before prepare()")
        return self._rank

    def _drain(self) -> None:
        if self._rank is not None:
            drain_timeout_s = self._rank.spec.config.groups.drain_timeout_s
            self._rank.drain(drain_timeout_s)
            self._rank.wait_drained(drain_timeout_s + DRAIN_GRACE_S)
            self._rank.stop()
