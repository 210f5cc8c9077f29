"""Lease packets of attention ranks, including invalid ones."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.rebalance.expert_generations import (
    ExpertGenerations,
    FreeExperts,
    PlacementMessage,
    TransitionReport,
)
from actors.rebalance.expert_loading import LoadResult, RateLimiter, StoppedError
from actors.rebalance.expert_rebalancer import ExpertRebalancer, MoveRecorder
from actors.rebalance.placement_client import PlacementClient
from actors.rebalance.placement_leases import MOST
from actors.rebalance.placement_messages import PlacementSender
from actors.rebalance.placement_transition import AttentionGenerations
from contracts.errors import PeerDeadError
from contracts.placement import Placement
from contracts.planner_messages import MoveOutcome, PlacementReport
from contracts.requests import Priority
from planner.placement.failover import MAX_FAILOVER_RANKS, failover_placement
from tests.support.manual_clock import ManualClock

LAUNCH = Placement(num_experts=2, slots_per_rank=(1, 1), expert_of_slot=((0, 1),))
NUMBER = (
    1 << MAX_FAILOVER_RANKS | 1 << 1
)  # of what stands in for the second, in the launch's placement
STAND_IN = failover_placement(LAUNCH, [1]) or LAUNCH


class Wire:
    """One end; `sent` has packets as their receivers see them."""

    def __init__(self, name: str) -> None:
        self.name, self.epoch = name, 1
        self.sent: list[Packet] = []
        self.dropped: list[tuple[str, str]] = []

    def peers(self) -> list[str]:
        return ["attention-0", "expert-0"]

    def reserve(self, peer: str, parts: tuple[TensorSpec, ...]) -> Any:
        tensors = [torch.empty(part.shape, dtype=part.torch_dtype) for part in parts]
        return SimpleNamespace(peer=peer, tensors=tensors)

    def commit(self, reservation: Any, header: Header) -> None:
        self.sent.append(Packet(self.name, header, reservation.tensors, 0.0, None))

    def drop(self, peer: str, reason: str) -> None:
        self.dropped.append((peer, reason))

    def wake(self) -> None: ...


class Rank:
    """An expert rank and its loads."""

    def __init__(self) -> None:
        self.wire = Wire("expert-0")
        endpoint: Any = self.wire
        self.there: set[int] = {0}
        self.running: list[Any] = []
        store: Any = SimpleNamespace(
            holds=lambda generation: generation in self.there,
            place=lambda generation, experts: self.there.add(generation),
            free=self.there.discard,
        )
        at_once: Any = SimpleNamespace(
            misfit=lambda placement: "", begin=lambda *noticed: self.running.append(noticed)
        )
        at_once.stop = lambda: None
        self.rebalancer = ExpertRebalancer[str](
            endpoint, LAUNCH, store, at_once, at_once, deadline_s=60.0, clock=time.monotonic
        )

    def reads(self) -> None:
        """Complete the load."""
        placement, done = self.running.pop()
        done(LoadResult(placement.generation, "experts"))
        self.rebalancer.poll()


@pytest.fixture
def rank() -> Rank:
    return Rank()


def packets(*messages: PlacementMessage, placement: Placement | None = None) -> list[Packet]:
    wire: Any = Wire("attention-0")
    for message in messages:
        PlacementSender(wire, time.monotonic).send(message, placement)
    return list(wire.sent)


def wants(attempt: int) -> Packet:
    message = PlacementMessage("expert-0", PacketKind.ACQUIRE, NUMBER, attempt)
    (packet,) = packets(message, placement=STAND_IN)
    return packet


def test_ready_carries_attempt_of_acquire(rank: Rank) -> None:
    rank.rebalancer.add_peer("attention-0")
    rank.rebalancer.handle(wants(3))
    rank.reads()
    assert [(one.header.kind, one.header.batch) for one in rank.wire.sent] == [
        (PacketKind.READY, 0),  # by itself
        (PacketKind.READY, 3),
    ]
    assert not rank.wire.dropped


@pytest.mark.parametrize("attempt", [0, -1])
def test_acquire_without_attempt_drops_the_link(rank: Rank, attempt: int) -> None:
    rank.rebalancer.handle(wants(attempt))
    ((peer, reason),) = rank.wire.dropped
    assert peer == "attention-0"
    assert f"sent ACQUIRE of generation {NUMBER} as attempt {attempt}: 1 or more" in reason
    assert not rank.running


def test_peer_with_too_many_unmatched_releases_is_disconnected(rank: Rank) -> None:
    generations = [(number << MAX_FAILOVER_RANKS) | 1 for number in range(1, MOST + 2)]
    for packet in packets(
        *(PlacementMessage("expert-0", PacketKind.RELEASE, one) for one in generations)
    ):
        rank.rebalancer.handle(packet)
    assert {peer for peer, _ in rank.wire.dropped} == {"attention-0"}
    assert f"releases them before it acquires them: {MOST} at most" in rank.wire.dropped[0][1]
    assert not rank.running


def test_unsolicited_ready_activates_no_failover(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire: Any = Wire("attention-0")
    following = PlacementClient(
        wire, LAUNCH, deadline_s=60.0, check=lambda placement: None, clock=time.monotonic
    )

    def receive_ready(expert: str, placement: Placement, attempt: int) -> None:
        sender: Any = Wire(expert)
        message = PlacementMessage("attention-0", PacketKind.READY, placement.generation, attempt)
        PlacementSender(sender, time.monotonic).send(message, placement)
        following.handle(sender.sent[0])

    for expert in ("expert-0", "expert-1"):
        following.add_peer(expert)
        receive_ready(expert, LAUNCH, 0)
    following.remove_peer(PeerLost("expert-1", PeerDeadError("gone", "expert-1"), 1))
    (wanted,) = [one for one in wire.sent if one.header.kind is PacketKind.ACQUIRE]
    receive_ready("expert-0", STAND_IN, 0)
    assert f"expert-0 sent READY of generation {NUMBER} as attempt 0" in caplog.text
    receive_ready("expert-0", STAND_IN, wanted.header.batch + 1)
    assert not following.uses_stand_in
    receive_ready("expert-0", STAND_IN, wanted.header.batch)
    assert following.uses_stand_in
    assert wanted.header.priority is Priority.LS


def test_rate_limiter_waits_and_ends_when_stopped() -> None:
    clock, stopped = ManualClock(), threading.Event()
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        clock.advance(seconds)
        return stopped.is_set()

    gate = threading.Event()
    gate.wait = wait  # type: ignore[method-assign, assignment]
    limiter = RateLimiter(1000.0, gate, clock)
    for _ in range(10):
        limiter.acquire(100)
    assert abs(clock() - 1.0) < 0.02
    clock.advance(60.0)  # what was not used is not made up for
    limiter.acquire(1000)
    assert waited[-1] > 0.9
    stopped.set()
    with pytest.raises(StoppedError):
        limiter.acquire(1)


def test_move_is_counted_and_reported_with_loaded_bytes(caplog: pytest.LogCaptureFixture) -> None:
    outcomes_sent: list[PlacementReport] = []
    outcomes = MoveRecorder("expert-0", outcomes_sent.append)
    result = LoadResult(3, [1], loaded_bytes=5, seconds=0.25)
    outcomes.add_result(result)
    with caplog.at_level(logging.INFO, "tandem.experts"):
        outcomes.record(TransitionReport(3, MoveOutcome.READY), result)
    assert (outcomes.loaded_bytes, outcomes.load_s) == (5, 0.25)
    assert outcomes.counts[MoveOutcome.READY] == 1
    [one] = outcomes_sent
    assert (one.rank, one.generation, one.loaded_bytes, one.seconds) == ("expert-0", 3, 5, 0.25)
    assert "placement_ready" in caplog.text
    assert outcomes.failures == {}


DEADLINE_S = 10.0


def on(ranks: int, generation: int = 0) -> Placement:
    return Placement(
        num_experts=1,
        generation=generation,
        slots_per_rank=(1,) * ranks,
        expert_of_slot=((0,) * ranks,),
    )


def linked(launch: Placement, ranks: int) -> AttentionGenerations:
    made = AttentionGenerations(launch, DEADLINE_S)
    for rank in range(ranks):
        made.add_peer(f"expert-{rank}")
    return made


def peer_kinds(messages: list[PlacementMessage]) -> list[tuple[str, PacketKind]]:
    return [(message.peer, message.kind) for message in messages]


def test_added_and_removed_ranks_take_part_in_transition() -> None:
    for before, after in ((2, 3), (3, 2)):
        machine = linked(on(before), 3)
        for rank in (0, 1):
            assert not machine.prepared(f"expert-{rank}", on(after, 1), 0, 0.0)
        assert machine.generation == 0
        committed = machine.prepared("expert-2", on(after, 1), 0, 0.0)
        assert machine.generation == 1
        assert peer_kinds(committed) == [
            (f"expert-{rank}", PacketKind.COMMITTED) for rank in range(3)
        ]


def test_loss_of_uninvolved_rank_keeps_transition() -> None:
    machine = linked(on(2), 3)
    machine.prepared("expert-0", on(2, 1), 0, 0.0)
    assert not machine.remove_peer("expert-2")
    machine.prepared("expert-1", on(2, 1), 0, 0.0)
    assert machine.generation == 1


def test_transition_needing_lost_rank_is_aborted_with_its_name() -> None:
    machine = linked(on(2), 3)
    machine.remove_peer("expert-2")
    (first, *_) = machine.prepared("expert-0", on(3, 1), 0, 0.0)
    assert (first.kind, first.reason) == (PacketKind.ABORTED, "expert-2 is lost")
    machine.add_peer("expert-2")
    for rank in range(3):
        machine.prepared(f"expert-{rank}", on(3, 2), 0, 0.0)
    assert machine.generation == 2


def test_rank_joining_after_abort_is_notified() -> None:
    machine = linked(on(2), 2)
    machine.add_abort_vote(1, "expert-0 has no memory", 0.0)
    machine.add_peer("expert-2")
    (message,) = machine.prepared("expert-2", on(3, 1), 0, 0.0)
    assert message == PlacementMessage(
        "expert-2", PacketKind.ABORTED, 1, 1, "expert-0 has no memory"
    )
    assert not machine.prepared("expert-2", on(3, 1), 0, 0.0)  # that one crossed the word


def test_longer_timeout_of_placement_is_honoured() -> None:
    machine = linked(on(2), 3)
    machine.prepared("expert-0", on(3, 1), 0, 0.0, within_s=60.0)
    assert not machine.poll(59.0)
    (message, *_) = machine.poll(60.0)
    assert message.reason == "no word of expert-1, expert-2 within 60 s (placement.move_timeout_s)"


def test_rank_behind_frees_unused_generation() -> None:
    for loads_first in (False, True):
        machine = ExpertGenerations(0, DEADLINE_S)
        machine.add_peer("attention-0")
        machine.proposed(on(3, 1), 0.0)
        if loads_first:
            machine.loaded(1)
        actions = [
            action
            for priority in Priority
            for action in machine.committed("attention-0", 2, priority)
        ]
        assert FreeExperts(1) in actions
        ends = [action.outcome for action in actions if isinstance(action, TransitionReport)]
        assert ends == [MoveOutcome.FAILED]
        assert (machine.under_way, machine.current) == (None, 0)
