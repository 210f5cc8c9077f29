"""LoopWatchdog on a manual clock."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from actors.channels.loop_watchdog import MAX_CHECK_S, EventLoopWatchdog, LoopWatchdog
from tests.support.manual_clock import ManualClock

STUCK_S = 5.0
STACKS_S = 2.0
CHECK_PERIOD_S = 0.25


class Watched:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watch = LoopWatchdog("expert-3", STUCK_S, self.clock, STACKS_S)

    def check_for(self, seconds: float, *, moves: bool = False) -> str:
        """Check periodically; return the last problem."""
        for _ in range(round(seconds / CHECK_PERIOD_S)):
            self.clock.advance(CHECK_PERIOD_S)
            if moves:
                self.watch.record_progress()
            self.watch.check()
        return self.watch.problem


def test_loop_that_makes_progress_is_healthy() -> None:
    assert Watched().check_for(10 * STUCK_S, moves=True) == ""


def test_stalled_loop_is_reported_by_name_until_it_makes_progress() -> None:
    loop = Watched()
    loop.watch.record_progress()
    assert loop.check_for(STUCK_S) == ""
    assert loop.check_for(2 * CHECK_PERIOD_S).startswith(
        "expert-3 has been stuck in one step for more than"
    )
    assert "channel.step_timeout_s" in loop.watch.problem
    loop.watch.record_progress()
    assert loop.check_for(CHECK_PERIOD_S) == ""
    assert loop.check_for(STUCK_S - CHECK_PERIOD_S) == ""


def test_loop_that_has_not_started_is_not_stalled() -> None:
    assert Watched().check_for(10 * STUCK_S) == ""


def test_time_in_which_the_process_was_stopped_counts_little() -> None:
    loop = Watched()
    loop.watch.record_progress()
    loop.check_for(CHECK_PERIOD_S)
    loop.clock.advance(100 * STUCK_S)  # SIGSTOP; the loop's thread has not run again yet
    assert loop.watch.check() == ""
    assert loop.check_for(STUCK_S - MAX_CHECK_S) == ""
    assert loop.check_for(2 * CHECK_PERIOD_S) != ""


def test_stacks_of_a_stalled_loop_are_logged_once_per_stall(
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
        loop.watch.record_progress()
        loop.check_for(STACKS_S)
        assert not caplog.records, "not yet"
        loop.check_for(STACKS_S)
        assert loop.watch.problem == "", "its peers are told later"
        loop.check_for(CHECK_PERIOD_S, moves=True)
        loop.check_for(STACKS_S + 2 * CHECK_PERIOD_S)
    finally:
        held.set()
        thread.join()
    logged = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in logged] == ["event_loop_blocked", "event_loop_blocked"]
    assert "rank=expert-3" in logged[0]
    assert "thread expert-3-loop:" in logged[0]
    assert "held.wait(10.0)" in logged[0], "the line that it stands in"


def test_stalled_event_loop_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    logged = threading.Event()

    def on_record(record: logging.LogRecord) -> bool:
        logged.set()
        return True

    caplog.handler.addFilter(on_record)
    watch = EventLoopWatchdog("ingress", 0.3)

    async def stand_still() -> None:
        watch.start(asyncio.get_running_loop())
        assert logged.wait(10.0)

    asyncio.run(stand_still())
    watch.close()
    caplog.handler.removeFilter(on_record)
    assert "assert logged.wait(10.0)" in caplog.records[0].getMessage()
