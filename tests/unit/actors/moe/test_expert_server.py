"""The expert rank's loop with a fake endpoint and experts that take one second per step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.moe.expert_server import ExpertServer, PlacementHandler
from actors.moe.rank_experts import ResidentExperts
from actors.telemetry.timeline import Timeline
from contracts.errors import PeerDeadError
from contracts.requests import Priority
from kernels.steps import Steps
from planner.scheduling.expert_queues import QueueHead, oldest_of_highest_class
from planner.scheduling.preemption import Preemption
from tests.support.manual_clock import ManualClock

LAYER = {Priority.LS: 1, Priority.BE: 2}  # so that the log tells one from the other


class Freed(PlacementHandler):
    """gone: generations that the next poll returns."""

    def __init__(self) -> None:
        self.gone: list[int] = []

    def poll(self) -> list[int]:
        gone, self.gone = self.gone, []
        return gone


class Rig:
    """log: class of each step. Calls have three steps."""

    def __init__(self, be_share: float) -> None:
        self.clock = ManualClock()
        self.log: list[Priority] = []
        self.answered: list[str] = []
        self.arrived: list[Any] = []
        choice: Preemption[QueueHead] = Preemption(oldest_of_highest_class, be_share=be_share)
        self.dropped: list[tuple[str, str]] = []
        self.generations = Freed()
        endpoint: Any = SimpleNamespace(
            name="expert-0",
            poll=self._poll,
            reserve=self._reserve,
            commit=self._commit,
            drop=lambda *noticed: self.dropped.append(noticed),
        )
        half: Any = SimpleNamespace(steps=self._steps)
        self.experts = ResidentExperts(half)
        self.server = ExpertServer(
            endpoint,
            self.experts,
            timeline=Timeline(100),
            clock=self.clock,
            choice=choice,
            generations=self.generations,
        )

    def send_tokens(
        self, priority: Priority, peer: str = "attention-0", *, generation: int = 0
    ) -> list[bool]:
        """Return a list that is True once the packet is released."""
        header = Header(
            PacketKind.A2E, 1, 0, LAYER[priority], 0, 0, priority, generation=generation
        )
        nothing = torch.zeros(1, dtype=torch.int64)
        tensors = [torch.zeros(1, 1), nothing, torch.zeros(1), nothing]
        released: list[bool] = []
        self.arrived.append(
            Packet(peer, header, tensors, self.clock(), lambda: released.append(True))
        )
        return released

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

    def _reserve(self, peer: str, parts: tuple[TensorSpec, ...]) -> Any:
        self.answered.append(peer)
        return SimpleNamespace(tensors=[torch.empty(part.shape) for part in parts])

    def _commit(self, reservation: Any, header: Header) -> None:
        """Release it."""


LS, BE = Priority.LS, Priority.BE


def test_best_effort_call_is_preempted_between_steps_and_resumed() -> None:
    rig = Rig(be_share=0.0)
    rig.send_tokens(BE)
    rig.step()
    rig.send_tokens(LS, "attention-1")
    rig.step(10)
    assert rig.log == [BE, LS, LS, LS, BE, BE]
    assert rig.answered == ["attention-1", "attention-0"]


def test_idle_time_earns_no_credit_after_waiting_be_rank_is_lost() -> None:
    rig = Rig(be_share=0.25)
    rig.send_tokens(BE, "attention-1")
    rig.send_tokens(LS)
    rig.step(5)
    assert rig.log == [LS, BE, LS, LS]
    rig.lose("attention-1")
    rig.step(4)
    rig.clock.advance(3600.0)
    rig.send_tokens(BE)
    rig.send_tokens(LS)
    rig.step()
    assert rig.log[4:] == [LS]


def test_token_groups_of_two_generations_are_not_merged() -> None:
    rig = Rig(be_share=0.0)
    rig.experts.place(1, rig.experts.nearest({}))
    for generation in (0, 1, 0, 1):
        rig.send_tokens(LS, generation=generation)
    rig.step(8)
    assert rig.log == [LS] * 6  # two calls of three steps, each of two token groups
    assert len(rig.answered) == 4


def test_tokens_for_unknown_generation_drop_the_link() -> None:
    rig = Rig(be_share=0.0)
    released = rig.send_tokens(LS, "attention-1", generation=3)
    rig.send_tokens(LS)
    rig.step(4)
    assert released == [True]
    ((peer, reason),) = rig.dropped
    assert peer == "attention-1"
    assert "generation 3" in reason
    assert rig.answered == ["attention-0"]


def test_work_of_freed_generation_is_released_without_answer() -> None:
    rig = Rig(be_share=0.0)
    rig.experts.place(1, rig.experts.nearest({}))
    running = rig.send_tokens(BE)
    rig.step()  # to its first yield
    waiting = rig.send_tokens(BE)
    other = rig.send_tokens(LS, generation=1)
    rig.generations.gone = [0]
    rig.step(5)
    assert (running, waiting, other) == ([True], [True], [True])
    assert len(rig.answered) == 1
    assert rig.log == [BE, LS, LS, LS]
