"""The expert rank's loop with a fake endpoint and experts that take one second per step."""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.moe.expert_server import ExpertServer, PlacementHandler
from actors.moe.rank_experts import MAX_PREFETCHED, CachedExperts, ResidentExperts
from actors.offload.file_tier import FileTier, open_expert_file
from actors.telemetry.telemetry import Timeline
from contracts.clock import monotonic_s
from contracts.errors import PeerDeadError
from contracts.requests import Priority
from kernels.steps import Steps, run_to_end
from models.experts.expert_cache import ExpertCache
from models.experts.expert_format import ComputeFormat, ComputeSlots
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import clamped_gate
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint, check_checkpoint
from planner.scheduling.task_order import Preemption, QueueHead, oldest_of_highest_class
from tests.support.manual_clock import ManualClock
from tests.support.tiny_models import Checkpoints

LS, BE = Priority
LAYER = {LS: 1, BE: 2}  # so that the log tells one from the other


class Freed(PlacementHandler):
    """gone: generations that the next poll returns."""

    def __init__(self) -> None:
        self.gone: list[int] = []

    def poll(self) -> list[int]:
        gone, self.gone = self.gone, []
        return gone


class LoopRig:
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
            clock=self.clock,
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


def test_best_effort_call_is_preempted_between_steps_and_resumed() -> None:
    rig = LoopRig(be_share=0.0)
    rig.send_tokens(BE)
    rig.step()
    rig.send_tokens(LS, "attention-1")
    rig.step(10)
    assert rig.log == [BE, LS, LS, LS, BE, BE]
    assert rig.answered == ["attention-1", "attention-0"]


def test_idle_time_earns_no_credit_after_waiting_be_rank_is_lost() -> None:
    rig = LoopRig(be_share=0.25)
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
    rig = LoopRig(be_share=0.0)
    rig.experts.place(1, rig.experts.nearest({}))
    for generation in (0, 1, 0, 1):
        rig.send_tokens(LS, generation=generation)
    rig.step(8)
    assert rig.log == [LS] * 6  # two calls of three steps, each of two token groups
    assert len(rig.answered) == 4


def test_tokens_for_unknown_generation_drop_the_link() -> None:
    rig = LoopRig(be_share=0.0)
    released = rig.send_tokens(LS, "attention-1", generation=3)
    rig.send_tokens(LS)
    rig.step(4)
    assert released == [True]
    ((peer, reason),) = rig.dropped
    assert peer == "attention-1"
    assert "generation 3" in reason
    assert rig.answered == ["attention-0"]


def test_work_of_freed_generation_is_released_without_answer() -> None:
    rig = LoopRig(be_share=0.0)
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


PEERS = ("attention-0", "attention-1")
DEADLINE_S = 20.0


class Rig:
    """A server with a rank's experts in random order, and its answers."""

    def __init__(self, folder: Path, store: Path, slots: int, serve: Any = None) -> None:
        self.spec: ModelSpec = check_checkpoint(folder)
        half = list(range(self.spec.num_experts))[::-2]
        self.own = {layer: tuple(half) for layer in self.spec.moe_layers}
        layout = ExpertLayout(self.spec, torch.float32, torch.device("cpu"))
        file = open_expert_file(folder, ComputeFormat(layout), store=store, deadline_s=DEADLINE_S)
        self.tier = FileTier(file)
        self.cache = ExpertCache(
            self.tier, ComputeSlots(layout, slots), "lru", deadline_s=DEADLINE_S
        )
        self.experts = CachedExperts(self.cache, self.own, clamped_gate(self.spec))
        self.resident = ExpertHalf.load(
            Checkpoint(folder), self.spec, self.own, dtype=torch.float32
        )
        self.arrived: list[Any] = []
        self.answers: dict[tuple[str, int], torch.Tensor] = {}
        self.expected: dict[tuple[str, int], torch.Tensor] = {}
        self._reserved: dict[int, Any] = {}
        endpoint: Any = SimpleNamespace(
            name="expert-0",
            clock=monotonic_s,
            poll=self._poll,
            reserve=self._reserve,
            commit=self._commit,
        )
        choice: Preemption[QueueHead] = Preemption(
            oldest_of_highest_class, be_share=0.1, choose=serve
        )
        self.server = ExpertServer(endpoint, self.experts, timeline=Timeline(10), choice=choice)
        self._numbers = 0

    def send_tokens(
        self, peer: str, layer: int, tokens: int, priority: Priority, seed: int
    ) -> None:
        """Send rows for some of the rank's experts."""
        generator = torch.Generator().manual_seed(seed)
        local = len(self.own[layer])
        x_UD = torch.randn(tokens, self.spec.hidden_size, generator=generator)
        scores_Te = torch.rand(tokens, local, generator=generator)
        chosen_T2 = scores_Te.topk(min(2, local)).indices
        experts_N, order_N = chosen_T2.flatten().sort(stable=True)
        rows_N = (order_N // chosen_T2.shape[1]).to(torch.int32)
        weights_N = torch.rand(len(rows_N), generator=generator)
        counts_e = torch.bincount(experts_N, minlength=local).to(torch.int32)
        tensors = [x_UD, rows_N, weights_N, counts_e]
        self._numbers += 1
        header = Header(PacketKind.A2E, 1, self._numbers, layer, 0, 0, priority)
        self.expected[peer, self._numbers] = run_to_end(self.resident.steps(layer, *tensors))
        self.arrived.append(Packet(peer, header, tensors, monotonic_s(), None))

    def hint(self, peer: str, layer: int, indices: Sequence[int], batch: int = 0) -> None:
        header = Header(PacketKind.HINT, 1, batch, layer, 0, 0)
        tensors = [torch.tensor(indices, dtype=torch.int32), torch.full((len(indices),), 0.9)]
        self.arrived.append(Packet(peer, header, tensors, monotonic_s(), None))

    def lose(self, peer: str) -> None:
        self.arrived.append(PeerLost(peer, PeerDeadError(peer)))
        for number in [n for sender, n in self.expected if sender == peer]:
            del self.expected[peer, number]

    def finish(self) -> None:
        end_s = monotonic_s() + DEADLINE_S
        self.server.step(0.0)
        while not self.expected.keys() <= self.answers.keys():
            assert monotonic_s() < end_s, self.expected.keys() - self.answers.keys()
            self.server.step(0.1)

    def check(self) -> None:
        """Check all answers, and that no request is left."""
        for key, expected in self.expected.items():
            assert torch.equal(self.answers[key], expected), key
        self.cache.check()
        assert not self.cache._requests
        assert not self.experts._requests

    def _poll(self, timeout_s: float) -> list[Any]:
        arrived, self.arrived = self.arrived, []
        if not arrived and timeout_s > 0:
            self.cache.wait(timeout_s)  # an endpoint watches the cache's descriptor
        return arrived

    def _reserve(self, peer: str, parts: tuple[TensorSpec, ...]) -> Any:
        return SimpleNamespace(peer=peer, tensors=[torch.empty(part.shape) for part in parts])

    def _commit(self, reservation: Any, header: Header) -> None:
        key = reservation.peer, header.batch
        assert key not in self.answers, "answered twice"
        self.answers[key] = reservation.tensors[0]


@pytest.fixture
def opened(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(slots: int, family: str = "qwen3_moe", **fields: Any) -> Rig:
        rigs.append(Rig(tiny_checkpoint(family), tmp_path, slots, **fields))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.experts.close()


@settings(deadline=None, max_examples=40)
@given(slots=st.integers(2, 12), seed=st.integers(0, 10_000), loss=st.booleans())
def test_answers_equal_resident_experts_under_any_hints_and_losses(
    tiny_checkpoint: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
    slots: int,
    seed: int,
    loss: bool,
) -> None:
    """Hints are right, wrong, late, repeated, or of unknown experts and layers."""
    chance = random.Random(seed)
    rig = Rig(tiny_checkpoint("qwen3_moe"), tmp_path_factory.getbasetemp(), slots)
    layers = rig.spec.moe_layers
    try:
        with torch.inference_mode():
            for number in range(chance.randint(1, 12)):
                peer, layer = chance.choice(PEERS), chance.choice(layers)
                if chance.random() < 0.5:
                    hinted = [chance.randint(-3, 9) for _ in range(chance.randint(0, 4))]
                    rig.hint(peer, chance.choice([layer, 99]), hinted, chance.randint(0, 3))
                rig.send_tokens(peer, layer, chance.randint(1, 40), chance.choice([LS, BE]), number)
                for _ in range(chance.randint(0, 3)):
                    rig.server.step(0.0)
            if loss:
                rig.lose(PEERS[0])
            rig.finish()
        rig.check()
    finally:
        rig.experts.close()


def test_calls_without_missing_experts_run_first_in_their_class(opened: Callable[..., Rig]) -> None:
    rig = opened(slots=100)
    first, second = rig.spec.moe_layers[:2]
    with torch.inference_mode():
        rig.send_tokens(PEERS[0], second, 8, LS, 1)
        rig.finish()
        reader = rig.tier._process
        reader.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, reader.pid, os.WSTOPPED)  # all its threads
        rig.send_tokens(PEERS[0], first, 8, LS, 2)
        rig.send_tokens(PEERS[0], second, 8, LS, 1)
        end_s = monotonic_s() + DEADLINE_S
        while (PEERS[0], 3) not in rig.answers:
            assert monotonic_s() < end_s
            rig.server.step(0.0)
        assert (PEERS[0], 2) not in rig.answers
        reader.send_signal(signal.SIGCONT)
        rig.finish()
    rig.check()


def test_hint_names_experts_by_local_index(opened: Callable[..., Rig]) -> None:
    rig = opened(slots=4)
    layer = rig.spec.moe_layers[1]
    rig.hint(PEERS[0], layer, [0])
    end_s = monotonic_s() + DEADLINE_S
    while not rig.cache.holds(layer, rig.own[layer][0]):
        assert monotonic_s() < end_s
        rig.server.step(0.01)
    assert rig.own[layer][0] != 0


def test_hints_of_old_micro_batches_are_dropped(opened: Callable[..., Rig]) -> None:
    rig = opened(slots=4)
    layer = rig.spec.moe_layers[0]
    for batch in range(5 * MAX_PREFETCHED):
        rig.hint(PEERS[batch % 2], layer, [0, 1], batch)
        rig.server.step(0.0)
    assert len(rig.cache._hints) <= MAX_PREFETCHED
    rig.lose(PEERS[0])
    rig.lose(PEERS[1])
    rig.server.step(0.0)
    assert not rig.cache._hints


def test_policy_that_abandons_started_calls_loses_none(opened: Callable[..., Rig]) -> None:
    rig = opened(slots=3, serve=lambda heads: max(heads, key=lambda head: head.oldest_arrival_s))
    layers = rig.spec.moe_layers
    with torch.inference_mode():
        for number in range(12):
            rig.send_tokens(PEERS[number % 2], layers[number % len(layers)], 60, LS, number)
            rig.server.step(0.0)
        rig.finish()
    rig.check()
