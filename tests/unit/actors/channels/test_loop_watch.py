"""When a loop counts as stuck, on a clock of our own."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from actors.channels.loop_watch import LONGEST_LOOK_S, EventLoopWatch, LoopWatch
from contracts.clock import ManualClock

STUCK_S = 5.0
STACKS_S = 2.0
LOOK_S = 0.25


class Watched:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watch = LoopWatch("expert-3", STUCK_S, self.clock, STACKS_S)

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


def test_the_stacks_of_a_loop_in_one_step_are_logged_once_until_it_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, holding = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        held.wait(10.0)

    thread = threading.Thread(target=hold, name="expert-3-loop")
    thread.start()
    holding.wait(10.0)
    loop = Watched()
    try:
        loop.watch.moved()
        loop.look_for(STACKS_S)
        assert not caplog.records, "not yet"
        loop.look_for(STACKS_S)
        assert loop.watch.problem == "", "its peers are told later"
        loop.look_for(LOOK_S, moves=True)
        loop.look_for(STACKS_S + 2 * LOOK_S)
    finally:
        held.set()
        thread.join()
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in told] == ["loop_held", "loop_held"]
    assert "rank=expert-3" in told[0]
    assert "thread expert-3-loop:" in told[0]
    assert "held.wait(10.0)" in told[0], "the line that it stands in"


def test_an_event_loop_that_stands_still_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    def tell(record: logging.LogRecord) -> bool:
        told.set()
        return True

    caplog.handler.addFilter(tell)
    watch = EventLoopWatch("ingress", 0.3)

    async def stand_still() -> None:
        watch.start(asyncio.get_running_loop())
        assert told.wait(10.0)

    asyncio.run(stand_still())
    watch.close()
    caplog.handler.removeFilter(tell)
    assert "assert told.wait(10.0)" in caplog.records[0].getMessage()
