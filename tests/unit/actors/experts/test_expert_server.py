"""The expert rank's loop with a fake endpoint and experts that take a second a step. Real ones:
tests/oracle/test_interrupted_tasks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from actors.channels.base import Header, Kind, Packet, Part, PeerLost
from actors.experts.expert_server import ExpertServer
from actors.experts.rank_experts import AllThere
from actors.telemetry.timeline import Timeline
from contracts.clock import ManualClock
from contracts.errors import PeerDeadError
from contracts.requests import Priority
from kernels.steps import Steps
from planner.findep.expert_queues import QueueHead, oldest_of_best_class
from planner.policies.preemption import Preemption

LAYER = {Priority.LS: 1, Priority.BE: 2}  # so that the log tells one from the other


class Rig:
    """log: the class of each step that ran. Calls have three."""

    def __init__(self, be_share: float) -> None:
        self.clock = ManualClock()
        self.log: list[Priority] = []
        self.answered: list[str] = []
        self.arrived: list[Any] = []
        choice: Preemption[QueueHead] = Preemption(oldest_of_best_class, be_share=be_share)
        endpoint: Any = SimpleNamespace(
            name="expert-0", poll=self._poll, reserve=self._reserve, commit=self._commit
        )
        half: Any = SimpleNamespace(steps=self._steps)
        self.server = ExpertServer(
            endpoint, AllThere(half), timeline=Timeline(100), clock=self.clock, choice=choice
        )

    def ask(self, priority: Priority, peer: str = "attention-0") -> None:
        header = Header(Kind.A2E, 1, 0, LAYER[priority], 0, 0, priority)
        nothing = torch.zeros(1, dtype=torch.int64)
        tensors = [torch.zeros(1, 1), nothing, torch.zeros(1), nothing]
        self.arrived.append(Packet(peer, header, tensors, self.clock(), None))

    def lose(self, peer: str) -> None:
        self.arrived.append(PeerLost(peer, PeerDeadError(peer)))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.server.step(0.0)

    def _steps(self, layer: int, x_UD: torch.Tensor, *pairs: object) -> Steps[torch.Tensor]:
        for _ in range(3):
            self.clock.advance(1.0)
            self.log.append(next(each for each in LAYER if LAYER[each] == layer))
            yield
        return x_UD

    def _poll(self, timeout_s: float) -> list[Any]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def _reserve(self, peer: str, parts: tuple[Part, ...]) -> Any:
        self.answered.append(peer)
        return SimpleNamespace(tensors=[torch.empty(part.shape) for part in parts])

    def _commit(self, reservation: Any, header: Header) -> None:
        """It is answered."""


LS, BE = Priority.LS, Priority.BE


def test_a_call_of_be_is_interrupted_between_its_steps_and_goes_on_after() -> None:
    rig = Rig(be_share=0.0)
    rig.ask(BE)
    rig.step()
    rig.ask(LS, "attention-1")
    rig.step(10)
    assert rig.log == [BE, LS, LS, LS, BE, BE]
    assert rig.answered == ["attention-1", "attention-0"]


def test_be_goes_on_beside_ls_without_end_as_far_as_its_share_goes() -> None:
    rig = Rig(be_share=0.25)
    rig.ask(BE)
    for _ in range(40):
        rig.ask(LS)
        rig.step()
    assert rig.log.count(BE) == 3
    assert rig.log.index(BE) <= 4


def test_after_a_rank_whose_be_work_waited_is_lost_idle_time_makes_no_credit() -> None:
    rig = Rig(be_share=0.25)
    rig.ask(BE, "attention-1")
    rig.ask(LS)
    rig.step(5)
    assert rig.log == [LS, BE, LS, LS]
    rig.lose("attention-1")
    rig.step(4)
    rig.clock.advance(3600.0)
    rig.ask(BE)
    rig.ask(LS)
    rig.step()
    assert rig.log[4:] == [LS]
