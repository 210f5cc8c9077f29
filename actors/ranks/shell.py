"""What Ray actors and plain processes have in common: one rank, driven by named calls."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from actors.channels.neighbour import here
from actors.ranks.attention_rank import attention_rank
from actors.ranks.expert_rank import ExpertLoop, expert_rank
from actors.ranks.planner_rank import planner_rank
from actors.ranks.prefill_rank import prefill_rank
from actors.ranks.rank import Rank
from actors.ranks.terminated import at_sigterm
from contracts.errors import LaunchError
from contracts.events import TaskSpan
from contracts.garbage import spare_what_lives_on
from contracts.logs import set_up_logging
from contracts.placement import PlacedExperts, WantedPlacement
from contracts.plan import Plan
from contracts.stacks import watch_interpreter
from contracts.traces import RankTrace
from contracts.worker import Group, RankReady, RankStatus, WorkerSpec

LATE_S = 5.0  # for a loop that is in a long step to hand over what it has

MAKE: dict[Group, Callable[[WorkerSpec], Rank]] = {
    Group.ATTENTION: attention_rank,
    Group.EXPERT: expert_rank,
    Group.PREFILL: prefill_rank,
    Group.PLANNER: planner_rank,
}


class WorkerShell:
    """Holds one rank. Weights load in `prepare`, so that its errors reach the launcher."""

    def __init__(self) -> None:
        self._rank: Rank | None = None

    def prepare(self, spec: WorkerSpec) -> RankReady:
        """Makes the rank: loads weights, listens. Raises what keeps it from doing so."""
        self._rank = MAKE[spec.group](spec)
        return msgspec.structs.replace(
            self._rank.ready, whereabouts=here(), metrics_address=self._rank.export_metrics()
        )

    def connect(self, addresses: dict[str, str]) -> None:
        self._made.connect(addresses)

    def place(self, wanted: WantedPlacement) -> None:
        """Expert ranks only: that is to be its next placement (placing.py)."""
        self._experts.place(wanted)

    def placed(self) -> PlacedExperts:
        """Expert ranks only."""
        return self._experts.placed()

    def join_planner(self, address: str) -> None:
        """Attention and expert ranks only: connects to the planner in the background."""
        self._made.join_planner(address)

    def start(self) -> None:
        spare_what_lives_on()
        self._made.start()

    def status(self) -> RankStatus:
        return self._made.status()

    def spans(self) -> list[TaskSpan]:
        return self._made.spans()

    def clock_s(self) -> float:
        return self._made.clock_s()

    def trace(self, since_s: float) -> RankTrace:
        return self._made.trace(since_s)

    def pin_plan(self, plan: Plan | None) -> None:
        """Attention ranks only: the plan of all batches from now on."""
        self._made.pin_plan(plan)

    def leave(self, within_s: float) -> None:
        """Takes nothing new; ends what it has by then, or hands it over (leaving.py)."""
        self._made.leave(within_s)

    def resize(self, attention_ranks: int, expert_ranks: int) -> None:
        """The planner only: plans for a group of this size from now on."""
        self._made.resize(attention_ranks, expert_ranks)

    def metrics(self) -> str:
        """Prometheus text."""
        return self._made.metrics()

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()

    @property
    def _experts(self) -> ExpertLoop:
        loop = self._made.loop
        if not isinstance(loop, ExpertLoop):
            raise LaunchError(f"{self._made.spec.name} is no expert rank: it has no placement")
        return loop

    @property
    def _made(self) -> Rank:
        if self._rank is None:
            raise LaunchError("the rank is used before prepare()")
        return self._rank


class LoggedShell(WorkerShell):
    """In a process of its own, whose log it sets up. It leaves in order at SIGTERM."""

    def __init__(self) -> None:
        super().__init__()
        at_sigterm(self._leave)

    def prepare(self, spec: WorkerSpec) -> RankReady:
        set_up_logging(spec.name, spec.config.log)
        watch_interpreter(2 * spec.config.log.stacks_after_s)
        return super().prepare(spec)

    def _leave(self) -> None:
        if self._rank is not None:
            drain_s = self._rank.spec.config.groups.drain_s
            self._rank.leave(drain_s)
            self._rank.wait_left(drain_s + LATE_S)
            self._rank.stop()
