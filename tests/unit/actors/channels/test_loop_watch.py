"""When a loop counts as stuck, on a clock of our own."""

from __future__ import annotations

from actors.channels.loop_watch import LONGEST_LOOK_S, LoopWatch
from contracts.clock import ManualClock

STUCK_S = 5.0
LOOK_S = 0.25


class Watched:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watch = LoopWatch("expert-3", STUCK_S, self.clock)

    def look_for(self, seconds: float, *, moves: bool = False) -> str:
        """Looks as a heartbeat does, for so long; what was found last."""
        for _ in range(round(seconds / LOOK_S)):
            self.clock.advance(LOOK_S)
            if moves:
                self.watch.moved()
            self.watch.look()
        return self.watch.problem


def test_a_loop_that_turns_is_well_however_long() -> None:
    assert Watched().look_for(10 * STUCK_S, moves=True) == ""


def test_a_loop_in_one_step_for_too_long_is_told_by_name_and_well_again_when_it_moves() -> None:
    loop = Watched()
    loop.watch.moved()
    assert loop.look_for(STUCK_S) == ""
    assert loop.look_for(2 * LOOK_S).startswith("expert-3 has been stuck in one step for more than")
    assert "channel.stuck_s" in loop.watch.problem
    loop.watch.moved()
    assert loop.look_for(LOOK_S) == ""
    assert loop.look_for(STUCK_S - LOOK_S) == ""


def test_a_loop_that_has_not_begun_is_not_stuck() -> None:
    assert Watched().look_for(10 * STUCK_S) == ""


def test_time_in_which_the_process_itself_stood_still_counts_little() -> None:
    loop = Watched()
    loop.watch.moved()
    loop.look_for(LOOK_S)
    loop.clock.advance(100 * STUCK_S)  # SIGSTOP; the loop's thread has not run again yet
    assert loop.watch.look() == ""
    assert loop.look_for(STUCK_S - LONGEST_LOOK_S) == ""
    assert loop.look_for(2 * LOOK_S) != ""
