"""Usable expert ranks and failover placements."""

from __future__ import annotations

import msgspec
import pytest

from actors.channels.base import PacketKind
from actors.rebalance.expert_generations import LAUNCH_ATTEMPT, PlacementMessage
from actors.rebalance.expert_membership import ExpertMembership
from contracts.placement import Placement
from planner.placement.failover import MAX_FAILOVER_RANKS, failover_placement, is_failover

NAMES = ("expert-0", "expert-1", "expert-2")
LAUNCH = Placement(num_experts=3, slots_per_rank=(1, 1, 1), expert_of_slot=((0, 1, 2),))
LATER = msgspec.structs.replace(LAUNCH, generation=1, expert_of_slot=((2, 1, 0),))


@pytest.fixture
def present() -> ExpertMembership:
    """Return a membership with all ranks ready."""
    made = ExpertMembership(LAUNCH)
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


def number(*lost: int, of: Placement = LAUNCH) -> int:
    found = failover_placement(of, lost)
    assert found is not None
    return found.generation


def test_rank_that_never_links_is_replaced_after_grace_period() -> None:
    membership = ExpertMembership(
        msgspec.structs.replace(
            LAUNCH, num_experts=2, slots_per_rank=(1, 1), expert_of_slot=((0, 1),)
        ),
    )
    membership.add_peer("expert-0")
    assert not report_ready(membership, "expert-0", 0, 0.0)
    (message,) = membership.poll(1.0)
    assert (message.peer, message.kind, is_failover(message.generation)) == (
        "expert-0",
        PacketKind.ACQUIRE,
        True,
    )


def test_stand_in_starts_when_all_are_ready_and_ends_on_return(
    present: ExpertMembership,
) -> None:
    requested = number(1)
    assert lose(present, "expert-1") == [("expert-0", requested), ("expert-2", requested)]
    report_ready(present, "expert-0", requested, 1.1)
    assert present.placement == LAUNCH
    report_ready(present, "expert-2", requested, 1.2)
    assert present.placement == failover_placement(LAUNCH, [1])
    present.add_peer("expert-1")
    assert not present.has_unused
    report_ready(present, "expert-1", 0, 2.0)
    assert present.placement == LAUNCH
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
    assert not present.add_abort_vote("expert-2", number(1), "no memory", 1.2)
    assert present.placement == LAUNCH
    assert present.abort_reason == "no memory"
    assert [message.generation for message in present.release_unused(set())] == [number(1)] * 2


def test_replacement_rank_acquires_current_generation(present: ExpertMembership) -> None:
    present.switch_to(LATER, NAMES, 1.0)
    requested = number(1, of=LATER)
    assert lose(present, "expert-1") == [("expert-0", requested), ("expert-2", requested)]
    present.add_peer("expert-1")
    assert report_ready(present, "expert-1", 0, 2.0) == [
        PlacementMessage("expert-1", PacketKind.ACQUIRE, 1, 3)
    ]
    assert present.requested(1) == LATER
    assert not present.can_serve("expert-1", 1)
    report_ready(present, "expert-1", 1, 3.0)
    assert not present.absent
    assert present.placement == LATER


def test_draining_rank_serves_until_stand_in_is_ready(
    present: ExpertMembership,
) -> None:
    requested = number(1)
    messages = present.start_draining("expert-1", 1.0)
    assert [(message.kind, message.peer, message.generation) for message in messages] == [
        (PacketKind.ACQUIRE, "expert-0", requested),
        (PacketKind.ACQUIRE, "expert-2", requested),
    ]
    assert not present.start_draining("expert-1", 1.0), "it says so once"
    assert present.placement == LAUNCH
    assert present.can_serve("expert-1", 0)
    report_ready(present, "expert-0", requested, 2.0)
    assert (present.placement, present.has_unused) == (LAUNCH, False)
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
    assert (present.placement, present.absent) == (LAUNCH, {})


def test_draining_rank_serves_to_its_end_without_stand_in(present: ExpertMembership) -> None:
    present.start_draining("expert-1", 1.0)
    present.add_abort_vote("expert-0", number(1), "no room", 1.0)
    report_ready(present, "expert-2", number(1), 2.0)
    assert present.placement == LAUNCH
    assert present.can_serve("expert-1", 0)
    assert {message.kind for message in present.release_unused(())} == {PacketKind.RELEASE}, (
        "of the stand-in"
    )


def resized(ranks: int, generation: int) -> Placement:
    return msgspec.structs.replace(
        LAUNCH,
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
        present.add_abort_vote("expert-0", base + (more << MAX_FAILOVER_RANKS), "no", 1.0)
    assert present._ready["expert-0"] == {0}
    assert not present._unwilling
    for generation in range(-50, 0):
        present.mark_ready("expert-0", generation, 1.0)
    assert len(present._ready["expert-0"]) == 2
    assert present.can_serve("expert-0", 0)
