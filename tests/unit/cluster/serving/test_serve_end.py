"""When a server that can serve no more ends, and with which reason (FINDINGS B15)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.serving import serve_end
from cluster.serving.serve_end import drain, wait_for_end, wait_idle
from contracts.worker import RankStatus


class FakeGroups:
    """answers: what each question is answered with, or raises; the last one for ever."""

    def __init__(self, *answers: str | tuple[str, int] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[object] = []
        self.problem = self.drain = self

    def remote(self, *tokens: object) -> FakeGroups:
        self.asked += tokens
        return self

    def result(self, timeout_s: float) -> str | tuple[str, int]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_end, "LOOK_PERIOD_S", 0.001)
    monkeypatch.setattr(serve_end, "DRAIN_PERIOD_S", 0.001)


def test_a_server_that_can_serve_no_more_ends_with_the_reason() -> None:
    """FINDINGS B15: it stayed at 503 for ever."""
    groups = FakeGroups("", "", TimeoutError(), "", "expert-0: its actor died")
    assert wait_for_end(groups, b"token", threading.Event(), 60.0) == "expert-0: its actor died"
    assert set(groups.asked) == {b"token"}


def test_a_launcher_that_is_not_heard_any_more_is_the_end_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FINDINGS B15."""
    monkeypatch.setattr(serve_end, "ANSWER_S", 0.01)
    groups = FakeGroups("", RuntimeError("the actor died"))
    reason = wait_for_end(groups, b"token", threading.Event(), 0.01)
    assert "Groups" in reason


def test_a_user_who_ends_the_server_is_given_no_reason() -> None:
    stop = threading.Event()
    stop.set()
    assert wait_for_end(FakeGroups("never asked"), b"token", stop, 1.0) == ""


def test_a_drain_lasts_as_long_as_the_ingress_needs() -> None:
    ingress = FakeGroups(("a", 2), TimeoutError(), ("a", 1), ("a", 0))
    drain(ingress, 60.0, threading.Event())
    assert ingress.answers == [("a", 0)]


def test_each_of_several_ingress_replicas_is_drained() -> None:
    """Whichever Serve asks: until each has said that nothing is under way any more."""
    failure = RuntimeError("it died")
    ingress = FakeGroups(("a", 0), ("a", 0), ("b", 3), failure, ("a", 0), ("b", 1), ("b", 0))
    drain(ingress, 60.0, threading.Event(), replicas=2)
    assert ingress.answers == [("b", 0)]


def test_a_drain_ends_at_its_limit_whatever_is_under_way() -> None:
    drain(FakeGroups(("a", 1)), 0.01, threading.Event())


def test_a_second_signal_or_an_ingress_that_is_gone_ends_it_at_once() -> None:
    hurry = threading.Event()
    drain(FakeGroups(RuntimeError("the actor died")), 60.0, hurry)
    hurry.set()
    drain(FakeGroups(TimeoutError()), 60.0, hurry)


def test_an_ingress_that_says_nothing_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_end, "ANSWER_S", 0.01)
    drain(FakeGroups(TimeoutError()), 0.01, threading.Event())


def test_ranks_are_idle_when_two_looks_in_a_row_find_no_sequence() -> None:
    """Between two of them an ingress may send another sequence of a request that it has."""
    looks = [(1, 2), (0, 0), (0, 1), (0, 0), (0, 0), (9, 9)]

    async def status() -> list[RankStatus]:
        running, waiting = looks.pop(0)
        ranks = RankStatus(name="attention-0", healthy=True, running=running, waiting=waiting)
        return [ranks, RankStatus(name="expert-0", healthy=True)]

    assert asyncio.run(wait_idle(status, 60.0)) == 0
    assert looks == [(9, 9)]


def test_who_does_not_end_in_time_is_counted() -> None:
    async def status() -> list[RankStatus]:
        return [RankStatus(name="attention-0", healthy=True, running=2, waiting=1)]

    assert asyncio.run(wait_idle(status, 0.01)) == 3
