"""Transitions to more or fewer expert ranks, on an attention rank."""

from __future__ import annotations

from actors.channels.base import PacketKind
from actors.rebalance.expert_generations import (
    ExpertGenerations,
    FreeExperts,
    PlacementMessage,
    TransitionReport,
)
from actors.rebalance.placement_transition import AttentionGenerations
from contracts.placement import Placement
from contracts.planner_messages import MoveOutcome
from contracts.requests import Priority

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
