"""When a server that can serve no more ends, and with which reason (FINDINGS B15)."""

from __future__ import annotations

import threading

import pytest

from cluster.serving import serve_end
from cluster.serving.serve_end import wait_for_end


class FakeGroups:
    """answers: what each question is answered with, or raises; the last one for ever."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []
        self.problem = self

    def remote(self, token: bytes) -> FakeGroups:
        self.asked.append(token)
        return self

    def result(self, timeout_s: float) -> str:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_end, "LOOK_PERIOD_S", 0.001)


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
