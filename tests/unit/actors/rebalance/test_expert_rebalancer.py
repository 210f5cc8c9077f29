"""Lease packets of attention ranks, including invalid ones."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.rebalance.expert_generations import PlacementMessage
from actors.rebalance.expert_loading import LoadResult
from actors.rebalance.expert_rebalancer import ExpertRebalancer
from actors.rebalance.placement_client import PlacementClient
from actors.rebalance.placement_leases import MOST
from actors.rebalance.placement_messages import PlacementSender
from contracts.errors import PeerDeadError
from contracts.placement import Placement
from contracts.requests import Priority
from planner.placement.failover import MAX_FAILOVER_RANKS, failover_placement

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
