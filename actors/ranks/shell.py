"""What Ray actors and plain processes have in common: one worker, driven by named calls."""

from __future__ import annotations

import msgspec

from actors.channels.neighbour import here
from actors.ranks.attention_worker import AttentionWorker
from actors.ranks.expert_worker import ExpertWorker
from actors.ranks.planner_worker import PlannerWorker
from actors.ranks.prefill_worker import PrefillWorker
from actors.ranks.stub_worker import StubWorker
from contracts.errors import LaunchError
from contracts.events import TaskSpan
from contracts.garbage import spare_what_lives_on
from contracts.logs import set_up_logging
from contracts.plan import Plan
from contracts.worker import Group, RankReady, RankStatus, WorkerSpec

Worker = AttentionWorker | ExpertWorker | PrefillWorker | PlannerWorker | StubWorker
_KINDS: dict[Group, type[Worker]] = {
    Group.ATTENTION: AttentionWorker,
    Group.EXPERT: ExpertWorker,
    Group.PREFILL: PrefillWorker,
    Group.PLANNER: PlannerWorker,
}


class WorkerShell:
    """Holds one worker. Weights load in `prepare`, so that its errors reach the launcher."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def prepare(self, spec: WorkerSpec) -> RankReady:
        """Makes the worker: loads weights, listens. Raises what keeps it from doing so."""
        self._worker = _make(spec)
        return msgspec.structs.replace(self._worker.ready, whereabouts=here())

    def connect(self, addresses: dict[str, str]) -> None:
        self._made.connect(addresses)

    def join_planner(self, address: str) -> None:
        """Attention and expert ranks only: connects to the planner in the background."""
        worker = self._made
        if isinstance(worker, AttentionWorker | ExpertWorker):
            worker.join_planner(address)

    def start(self) -> None:
        spare_what_lives_on()
        self._made.start()

    def status(self) -> RankStatus:
        return self._made.status()

    def spans(self) -> list[TaskSpan]:
        return self._made.spans()

    def pin_plan(self, plan: Plan | None) -> None:
        """Attention ranks only: the plan of all batches from now on."""
        worker = self._made
        if isinstance(worker, AttentionWorker):
            worker.pin_plan(plan)

    def metrics(self) -> str:
        """Prometheus text."""
        return self._made.metrics()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    @property
    def _made(self) -> Worker:
        if self._worker is None:
            raise LaunchError("the worker is used before prepare()")
        return self._worker


class LoggedShell(WorkerShell):
    """In a process of its own, whose log it sets up."""

    def prepare(self, spec: WorkerSpec) -> RankReady:
        set_up_logging(spec.name, spec.config.log)
        return super().prepare(spec)


def _make(spec: WorkerSpec) -> Worker:
    if spec.group is not Group.PREFILL:
        return _KINDS[spec.group](spec)
    return StubWorker(spec) if spec.config.prefill.engine == "stub" else PrefillWorker(spec)
