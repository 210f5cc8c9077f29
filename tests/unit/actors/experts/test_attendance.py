"""Which expert ranks can be asked for what, and who stands in for those that are lost."""

from __future__ import annotations

import msgspec
import pytest

from actors.channels.base import Kind
from actors.experts.attendance import Attendance
from actors.experts.generations import LAUNCH_ATTEMPT, Tell
from contracts.placement import Placement
from planner.placement.stand_in import MAX_RANKS, is_stand_in, stand_in

NAMES = ("expert-0", "expert-1", "expert-2")
LAUNCH = Placement(num_experts=3, slots_per_rank=(1, 1, 1), expert_of_slot=((0, 1, 2),))
LATER = msgspec.structs.replace(LAUNCH, generation=1, expert_of_slot=((2, 1, 0),))


@pytest.fixture
def present() -> Attendance:
    """All are there."""
    made = Attendance(LAUNCH)
    for name in NAMES:
        made.joined(name)
    for name in NAMES:
        assert not said(made, name, 0, 0.0)
    return made


def lose(attendance: Attendance, name: str, now_s: float = 1.0) -> list[tuple[str, int]]:
    tells = attendance.lost(name, f"{name} closed its connection", 1, now_s)
    assert {tell.kind for tell in tells} <= {Kind.WANTED}
    return [(tell.peer, tell.generation) for tell in tells]


def said(attendance: Attendance, expert: str, generation: int, now_s: float) -> list[Tell]:
    """HELD, as an answer to what it was asked for last, if it was."""
    attempt = attendance._asked[expert].get(generation, LAUNCH_ATTEMPT)
    return attendance.held(expert, generation, now_s, attempt)


def number(*lost: int, of: Placement = LAUNCH) -> int:
    found = stand_in(of, lost)
    assert found is not None
    return found.generation


def test_nobody_is_asked_before_he_has_said_what_he_has() -> None:
    attendance = Attendance(LAUNCH)
    assert not any(attendance.can(name, 0) for name in NAMES)
    for name in NAMES:
        attendance.joined(name)
        assert not attendance.can(name, 0)
        said(attendance, name, 0, 0.0)
        assert attendance.can(name, 0)
    assert not attendance.absent


def test_ranks_that_start_later_than_others_are_not_taken_for_lost() -> None:
    attendance = Attendance(LAUNCH)
    for name in NAMES:
        attendance.joined(name)
    said(attendance, "expert-0", 0, 0.0)
    assert not attendance.look(1000.0)


def test_one_that_was_never_linked_is_stood_in_for_after_a_while() -> None:
    attendance = Attendance(
        msgspec.structs.replace(
            LAUNCH, num_experts=2, slots_per_rank=(1, 1), expert_of_slot=((0, 1),)
        ),
    )
    attendance.joined("expert-0")
    assert not said(attendance, "expert-0", 0, 0.0)
    (tell,) = attendance.look(1.0)
    assert (tell.peer, tell.kind, is_stand_in(tell.generation)) == ("expert-0", Kind.WANTED, True)


def test_others_stand_in_once_all_of_them_have_said_so_and_are_left_when_it_is_back(
    present: Attendance,
) -> None:
    wanted = number(1)
    assert lose(present, "expert-1") == [("expert-0", wanted), ("expert-2", wanted)]
    said(present, "expert-0", wanted, 1.1)
    assert present.placement == LAUNCH
    said(present, "expert-2", wanted, 1.2)
    assert present.placement == stand_in(LAUNCH, [1])
    present.joined("expert-1")
    assert not present.is_over
    said(present, "expert-1", 0, 2.0)
    assert present.placement == LAUNCH
    assert not present.absent
    assert present.is_over
    assert not present.leave({wanted})  # something under way needs it
    assert [(t.peer, t.kind) for t in present.leave(set())] == [
        ("expert-0", Kind.LEFT),
        ("expert-2", Kind.LEFT),
    ]
    assert not present.leave(set())


def test_a_second_loss_wants_another_stand_in_of_whoever_is_left(present: Attendance) -> None:
    lose(present, "expert-1")
    assert lose(present, "expert-2") == [("expert-0", number(1, 2))]
    said(present, "expert-0", number(1), 1.5)
    assert present.placement == LAUNCH
    said(present, "expert-0", number(1, 2), 1.6)
    assert present.placement == stand_in(LAUNCH, [1, 2])
    assert [tell.generation for tell in present.leave(set())] == [number(1)]


def test_when_one_has_no_room_nobody_stands_in(present: Attendance) -> None:
    lose(present, "expert-1")
    said(present, "expert-0", number(1), 1.1)
    assert not present.withdrawn("expert-2", number(1), "no memory", 1.2)
    assert present.placement == LAUNCH
    assert present.refused == "no memory"
    assert [tell.generation for tell in present.leave(set())] == [number(1)] * 2


def test_whoever_takes_a_place_is_asked_for_the_present_generation(present: Attendance) -> None:
    present.went_over(LATER, NAMES, 1.0)
    wanted = number(1, of=LATER)
    assert lose(present, "expert-1") == [("expert-0", wanted), ("expert-2", wanted)]
    present.joined("expert-1")
    assert said(present, "expert-1", 0, 2.0) == [Tell("expert-1", Kind.WANTED, 1, 3)]
    assert present.wanted(1) == LATER
    assert not present.can("expert-1", 1)
    said(present, "expert-1", 1, 3.0)
    assert not present.absent
    assert present.placement == LATER


def test_nothing_before_the_present_generation_is_asked_for(present: Attendance) -> None:
    lose(present, "expert-1")
    present.went_over(LATER, ("expert-0", "expert-2"), 2.0)
    assert present.placement == LATER
    assert present.can("expert-0", 1)
    assert not present.can("expert-1", 1)


def test_one_that_leaves_is_asked_until_others_have_its_experts_and_then_let_go(
    present: Attendance,
) -> None:
    wanted = number(1)
    tells = present.leaving("expert-1", 1.0)
    assert [(tell.kind, tell.peer, tell.generation) for tell in tells] == [
        (Kind.WANTED, "expert-0", wanted),
        (Kind.WANTED, "expert-2", wanted),
    ]
    assert not present.leaving("expert-1", 1.0), "it says so once"
    assert present.placement == LAUNCH
    assert present.can("expert-1", 0)
    said(present, "expert-0", wanted, 2.0)
    assert (present.placement, present.is_over) == (LAUNCH, False)
    said(present, "expert-2", wanted, 2.0)
    assert present.placement.generation == wanted
    assert present.is_over
    assert not present.leave({0, wanted}), "something is under way to it"
    assert present.leave({wanted}) == [Tell("expert-1", Kind.LEAVING, 0)]
    assert not present.is_over
    assert not present.leave(()), "once"
    assert not lose(present, "expert-1"), "nobody else is asked when it has gone"
    assert present.placement.generation == wanted
    present.joined("expert-1")
    said(present, "expert-1", 0, 3.0)
    assert (present.placement, present.absent) == (LAUNCH, {})


def test_where_nobody_has_room_one_that_leaves_is_asked_to_its_end(present: Attendance) -> None:
    present.leaving("expert-1", 1.0)
    present.withdrawn("expert-0", number(1), "no room", 1.0)
    said(present, "expert-2", number(1), 2.0)
    assert present.placement == LAUNCH
    assert present.can("expert-1", 0)
    assert {tell.kind for tell in present.leave(())} == {Kind.LEFT}, "of the stand-in"


def test_one_that_no_generation_is_on_any_more_may_go_at_once() -> None:
    attendance = Attendance(LAUNCH)
    for name in (*NAMES, "expert-3"):
        attendance.joined(name)
        said(attendance, name, 0, 0.0)
    assert not attendance.leaving("expert-3", 1.0)
    assert attendance.is_over
    assert attendance.leave({0}) == [Tell("expert-3", Kind.LEAVING, 0)]
    assert not attendance.absent


def resized(ranks: int, generation: int) -> Placement:
    return msgspec.structs.replace(
        LAUNCH,
        generation=generation,
        slots_per_rank=(3,) * ranks,
        expert_of_slot=((0, 1, 2) * ranks,),
    )


def test_one_that_is_not_used_any_more_is_no_loss(present: Attendance) -> None:
    present.went_over(resized(2, 1), NAMES, 1.0)
    assert not lose(present, "expert-2")
    assert not present.absent
    assert present.placement == present.base
    assert lose(present, "expert-1") == [("expert-0", number(1, of=present.base))]


def test_one_that_comes_for_the_next_generation_is_counted_from_then_on(
    present: Attendance,
) -> None:
    present.joined("expert-3")
    assert not said(present, "expert-3", 0, 1.0)
    assert not present.absent
    present.went_over(resized(4, 1), (*NAMES, "expert-3"), 2.0)
    assert not present.absent
    assert present.can("expert-3", 1)
    assert len(lose(present, "expert-3")) == 3


def test_whoever_was_lost_before_fewer_ranks_were_used_is_missed_no_more(
    present: Attendance,
) -> None:
    lose(present, "expert-2")
    said(present, "expert-0", number(2), 1.1)
    said(present, "expert-1", number(2), 1.2)
    present.went_over(resized(2, 1), NAMES[:2], 2.0)
    assert not present.absent
    assert present.placement == present.base
    assert {tell.generation for tell in present.leave(set())} == {number(2)}


def test_a_late_answer_to_what_was_left_is_none_to_what_is_wanted_again(
    present: Attendance,
) -> None:
    """expert-1 is lost, comes back and is lost again before expert-0 has read anything."""
    wanted = number(1)
    first = present.lost("expert-1", "gone", 1, 1.0)
    present.joined("expert-1")
    present.held("expert-1", 0, 2.0)
    assert {tell.kind for tell in present.leave(())} == {Kind.LEFT}
    again = present.lost("expert-1", "gone", 2, 3.0)
    assert [tell[:3] for tell in again] == [tell[:3] for tell in first]
    for tell in first:
        present.held(tell.peer, wanted, 4.0, tell.attempt)
        assert not present.can(tell.peer, wanted)
    assert present.placement == LAUNCH
    for tell in again:
        present.held(tell.peer, wanted, 5.0, tell.attempt)
    assert present.placement.generation == wanted


def test_what_nobody_asked_for_is_not_kept(present: Attendance) -> None:
    """An expert rank that says HELD of stand-ins, WITHDRAWN, or one old generation after the
    other, without end."""
    base = number(1)
    for more in range(50):
        present.held("expert-0", base + (more << MAX_RANKS), 1.0)
        present.held("expert-0", base + (more << MAX_RANKS), 1.0, more)
        present.withdrawn("expert-0", base + (more << MAX_RANKS), "no", 1.0)
    assert present._held["expert-0"] == {0}
    assert not present._unwilling
    for generation in range(-50, 0):
        present.held("expert-0", generation, 1.0)
    assert len(present._held["expert-0"]) == 2
    assert present.can("expert-0", 0)
