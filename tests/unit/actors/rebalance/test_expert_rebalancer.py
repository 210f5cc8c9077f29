"""Lease packets of attention ranks, including invalid ones."""

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.rebalance.expert_loading import LoadResult, RateLimiter, StoppedError
from actors.rebalance.expert_rebalancer import MOST, ExpertRebalancer, MoveRecorder
from actors.rebalance.placement_client import ExpertMembership, PlacementClient
from actors.rebalance.placement_generations import (
    LAUNCH_ATTEMPT,
    AttentionGenerations,
    PlacementMessage,
    TransitionReport,
)
from actors.rebalance.placement_messages import PlacementSender
from contracts.errors import PeerDeadError
from contracts.placement import Placement
from contracts.planner_messages import MoveOutcome, PlacementReport
from contracts.requests import Priority
from planner.placement.resize import MAX_FAILOVER_RANKS, failover_placement, is_failover
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
    """An expert rank. loader: of its leases."""

    def __init__(self) -> None:
        self.wire, self.loader = Wire("expert-0"), Mock()
        self.loader.misfit.return_value = ""
        endpoint: Any = self.wire
        self.rebalancer = ExpertRebalancer(
            endpoint, LAUNCH, Mock(), Mock(), self.loader, deadline_s=60.0, clock=time.monotonic
        )


@pytest.fixture
def rank() -> Rank:
    return Rank()


def packets(*messages: PlacementMessage) -> list[Packet]:
    wire: Any = Wire("attention-0")
    for message in messages:
        PlacementSender(wire, time.monotonic).send(message)
    return list(wire.sent)


def wants(attempt: int) -> Packet:
    kind = PacketKind.ACQUIRE
    (packet,) = packets(PlacementMessage("expert-0", kind, NUMBER, attempt, placement=STAND_IN))
    return packet


@pytest.mark.parametrize("attempt", [0, -1])
def test_acquire_without_attempt_drops_the_link(rank: Rank, attempt: int) -> None:
    rank.rebalancer.handle(wants(attempt))
    ((peer, reason),) = rank.wire.dropped
    assert peer == "attention-0"
    assert f"sent ACQUIRE of generation {NUMBER} as attempt {attempt}: 1 or more" in reason
    assert not rank.loader.begin.called


def test_peer_with_too_many_unmatched_releases_is_disconnected(rank: Rank) -> None:
    generations = [(number << MAX_FAILOVER_RANKS) | 1 for number in range(1, MOST + 2)]
    for packet in packets(
        *(PlacementMessage("expert-0", PacketKind.RELEASE, one) for one in generations)
    ):
        rank.rebalancer.handle(packet)
    assert {peer for peer, _ in rank.wire.dropped} == {"attention-0"}
    assert f"releases them before it acquires them: {MOST} at most" in rank.wire.dropped[0][1]
    assert not rank.loader.begin.called


def test_unsolicited_ready_activates_no_failover(caplog: pytest.LogCaptureFixture) -> None:
    wire: Any = Wire("attention-0")
    following = PlacementClient(
        wire, LAUNCH, deadline_s=60.0, check=lambda placement: None, clock=time.monotonic
    )

    def receive_ready(expert: str, placement: Placement, attempt: int) -> None:
        sender: Any = Wire(expert)
        kind, generation = PacketKind.READY, placement.generation
        message = PlacementMessage("attention-0", kind, generation, attempt, placement=placement)
        PlacementSender(sender, time.monotonic).send(message)
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


NAMES = ("expert-0", "expert-1", "expert-2")
THREE_RANKS = Placement(num_experts=3, slots_per_rank=(1, 1, 1), expert_of_slot=((0, 1, 2),))
LATER = msgspec.structs.replace(THREE_RANKS, generation=1, expert_of_slot=((2, 1, 0),))


@pytest.fixture
def present() -> ExpertMembership:
    """Return a membership with all ranks ready."""
    made = ExpertMembership(THREE_RANKS)
    for name in NAMES:
        made.add_peer(name)
    for name in NAMES:
        assert not report_ready(made, name, 0, 0.0)
    return made


def lose(membership: ExpertMembership, name: str, now_s: float = 1.0) -> list[tuple[str, int]]:
    messages = membership.remove_peer(name, f"{name} closed its connection", 1, now_s)
    assert {message.kind for message in messages} <= {PacketKind.ACQUIRE}
    return [(message.peer, message.generation) for message in messages]


def report_ready(
    membership: ExpertMembership, expert: str, generation: int, now_s: float
) -> list[PlacementMessage]:
    """Report READY, with the attempt of the last ACQUIRE."""
    attempt = membership._requests[expert].get(generation, LAUNCH_ATTEMPT)
    return membership.mark_ready(expert, generation, now_s, attempt)


def number(*lost: int, of: Placement = THREE_RANKS) -> int:
    found = failover_placement(of, lost)
    assert found is not None
    return found.generation


def test_rank_that_never_links_is_replaced_after_grace_period() -> None:
    membership = ExpertMembership(
        msgspec.structs.replace(
            THREE_RANKS, num_experts=2, slots_per_rank=(1, 1), expert_of_slot=((0, 1),)
        )
    )
    membership.add_peer("expert-0")
    assert not report_ready(membership, "expert-0", 0, 0.0)
    (message,) = membership.poll(1.0)
    assert (message.peer, message.kind, is_failover(message.generation)) == (
        "expert-0",
        PacketKind.ACQUIRE,
        True,
    )


def test_stand_in_starts_when_all_are_ready_and_ends_on_return(present: ExpertMembership) -> None:
    requested = number(1)
    assert lose(present, "expert-1") == [("expert-0", requested), ("expert-2", requested)]
    report_ready(present, "expert-0", requested, 1.1)
    assert present.placement == THREE_RANKS
    report_ready(present, "expert-2", requested, 1.2)
    assert present.placement == failover_placement(THREE_RANKS, [1])
    present.add_peer("expert-1")
    assert not present.has_unused
    report_ready(present, "expert-1", 0, 2.0)
    assert present.placement == THREE_RANKS
    assert not present.absent
    assert present.has_unused
    assert not present.release_unused({requested})  # something under way needs it
    assert [(t.peer, t.kind) for t in present.release_unused(set())] == [
        ("expert-0", PacketKind.RELEASE),
        ("expert-2", PacketKind.RELEASE),
    ]
    assert not present.release_unused(set())


def test_no_stand_in_when_one_rank_has_no_room(present: ExpertMembership) -> None:
    lose(present, "expert-1")
    report_ready(present, "expert-0", number(1), 1.1)
    assert not present.add_abort_vote("expert-2", number(1), 1.2)
    assert present.placement == THREE_RANKS
    assert [message.generation for message in present.release_unused(set())] == [number(1)] * 2


def test_replacement_rank_acquires_current_generation(present: ExpertMembership) -> None:
    present.switch_to(LATER, NAMES, 1.0)
    requested = number(1, of=LATER)
    assert lose(present, "expert-1") == [("expert-0", requested), ("expert-2", requested)]
    present.add_peer("expert-1")
    assert report_ready(present, "expert-1", 0, 2.0) == [
        PlacementMessage("expert-1", PacketKind.ACQUIRE, 1, 3, placement=LATER)
    ]
    assert not present.can_serve("expert-1", 1)
    report_ready(present, "expert-1", 1, 3.0)
    assert not present.absent
    assert present.placement == LATER


def test_draining_rank_serves_until_stand_in_is_ready(present: ExpertMembership) -> None:
    requested = number(1)
    messages = present.start_draining("expert-1", 1.0)
    assert [(message.kind, message.peer, message.generation) for message in messages] == [
        (PacketKind.ACQUIRE, "expert-0", requested),
        (PacketKind.ACQUIRE, "expert-2", requested),
    ]
    assert not present.start_draining("expert-1", 1.0), "it says so once"
    assert present.placement == THREE_RANKS
    assert present.can_serve("expert-1", 0)
    report_ready(present, "expert-0", requested, 2.0)
    assert (present.placement, present.has_unused) == (THREE_RANKS, False)
    report_ready(present, "expert-2", requested, 2.0)
    assert present.placement.generation == requested
    assert present.has_unused
    assert not present.release_unused({0, requested}), "something is under way to it"
    assert present.release_unused({requested}) == [
        PlacementMessage("expert-1", PacketKind.DRAINING, 0)
    ]
    assert not present.has_unused
    assert not present.release_unused(()), "once"
    assert not lose(present, "expert-1"), "nobody else is asked when it has gone"
    assert present.placement.generation == requested
    present.add_peer("expert-1")
    report_ready(present, "expert-1", 0, 3.0)
    assert (present.placement, present.absent) == (THREE_RANKS, {})


def resized(ranks: int, generation: int) -> Placement:
    return msgspec.structs.replace(
        THREE_RANKS,
        generation=generation,
        slots_per_rank=(3,) * ranks,
        expert_of_slot=((0, 1, 2) * ranks,),
    )


def test_loss_of_unused_rank_is_ignored(present: ExpertMembership) -> None:
    present.switch_to(resized(2, 1), NAMES, 1.0)
    assert not lose(present, "expert-2")
    assert not present.absent
    assert present.placement == present.base
    assert lose(present, "expert-1") == [("expert-0", number(1, of=present.base))]


def test_unrequested_ready_is_ignored(present: ExpertMembership) -> None:
    base = number(1)
    for more in range(50):
        present.mark_ready("expert-0", base + (more << MAX_FAILOVER_RANKS), 1.0)
        present.mark_ready("expert-0", base + (more << MAX_FAILOVER_RANKS), 1.0, more)
        present.add_abort_vote("expert-0", base + (more << MAX_FAILOVER_RANKS), 1.0)
    assert present._ready["expert-0"] == {0}
    assert not present._unwilling
    for generation in range(-50, 0):
        present.mark_ready("expert-0", generation, 1.0)
    assert len(present._ready["expert-0"]) == 2
    assert present.can_serve("expert-0", 0)
