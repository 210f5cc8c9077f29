"""Generations on an attention rank, where they are on more expert ranks than before or on fewer."""

from __future__ import annotations

from actors.channels.base import Kind
from actors.experts.generations import ExpertGenerations, Free, Report, Tell
from actors.experts.switching import AttentionGenerations
from contracts.placement import Placement
from contracts.planning import Outcome
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
        made.joined(f"expert-{rank}")
    return made


def said(tells: list[Tell]) -> list[tuple[str, Kind]]:
    return [(tell.peer, tell.kind) for tell in tells]


def test_who_comes_and_who_goes_belong_to_the_change() -> None:
    for before, after in ((2, 3), (3, 2)):
        machine = linked(on(before), 3)
        for rank in (0, 1):
            assert not machine.placed(f"expert-{rank}", on(after, 1), 0, 0.0)
        assert machine.generation == 0
        retired = machine.placed("expert-2", on(after, 1), 0, 0.0)
        assert machine.generation == 1
        assert said(retired) == [(f"expert-{rank}", Kind.RETIRED) for rank in range(3)]


def test_one_that_has_no_part_may_go_in_the_middle_of_a_move_of_the_others() -> None:
    machine = linked(on(2), 3)
    machine.placed("expert-0", on(2, 1), 0, 0.0)
    assert not machine.lost("expert-2")
    machine.placed("expert-1", on(2, 1), 0, 0.0)
    assert machine.generation == 1


def test_a_change_that_needs_one_that_is_lost_is_refused_by_name_until_another_comes() -> None:
    machine = linked(on(2), 3)
    machine.lost("expert-2")
    (first, *_) = machine.placed("expert-0", on(3, 1), 0, 0.0)
    assert (first.kind, first.reason) == (Kind.REFUSED, "expert-2 is lost")
    machine.joined("expert-2")
    for rank in range(3):
        machine.placed(f"expert-{rank}", on(3, 2), 0, 0.0)
    assert machine.generation == 2


def test_one_whose_link_comes_after_a_refusal_is_told_of_it() -> None:
    """Else it would wait for a word for ever."""
    machine = linked(on(2), 2)
    machine.withdrawn(1, "expert-0 has no memory", 0.0)
    machine.joined("expert-2")
    (tell,) = machine.placed("expert-2", on(3, 1), 0, 0.0)
    assert tell == Tell("expert-2", Kind.REFUSED, 1, 1, "expert-0 has no memory")
    assert not machine.placed("expert-2", on(3, 1), 0, 0.0)  # that one crossed the word


def test_what_says_that_it_takes_longer_is_given_its_time() -> None:
    machine = linked(on(2), 3)
    machine.placed("expert-0", on(3, 1), 0, 0.0, within_s=60.0)
    assert not machine.look(59.0)
    (tell, *_) = machine.look(60.0)
    assert tell.reason == "no word of expert-1, expert-2 within 60 s (placement.deadline_s)"


def test_a_rank_that_was_left_behind_lets_go_of_what_nobody_will_use() -> None:
    """All have gone over to a later one, which it has no part in."""
    for loads_first in (False, True):
        machine = ExpertGenerations(0, DEADLINE_S)
        machine.joined("attention-0")
        machine.proposed(on(3, 1), 0.0)
        if loads_first:
            machine.loaded(1)
        actions = [
            action
            for priority in Priority
            for action in machine.retired("attention-0", 2, priority)
        ]
        assert Free(1) in actions
        ends = [action.outcome for action in actions if isinstance(action, Report)]
        assert ends == [Outcome.FAILED]
        assert (machine.under_way, machine.current) == (None, 0)
