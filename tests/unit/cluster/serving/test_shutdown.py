"""End and drain of a server, and requests to its launcher."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from cluster.serving import shutdown
from cluster.serving.serve_app import Launcher
from cluster.serving.shutdown import drain, wait_for_shutdown, wait_idle
from contracts.clock import monotonic_s
from contracts.errors import NotReadyError
from contracts.ranks import RankStatus
from contracts.scaling import ScaleState, ScaleTarget


class FakeGroups:
    """Gives or raises `answers` in turn; the last one repeats."""

    def __init__(self, *answers: str | tuple[str, int] | Exception) -> None:
        self.answers = list(answers)
        self.tokens_seen: list[object] = []
        self.problem = self.drain = self

    def remote(self, *tokens: object) -> FakeGroups:
        self.tokens_seen += tokens
        return self

    def result(self, timeout_s: float) -> str | tuple[str, int]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "POLL_PERIOD_S", 0.001)
    monkeypatch.setattr(shutdown, "DRAIN_PERIOD_S", 0.001)


def test_a_server_that_can_serve_no_more_ends_with_the_reason() -> None:
    groups = FakeGroups("", "", TimeoutError(), "", "expert-0: its actor died")
    assert (
        wait_for_shutdown(groups, b"token", threading.Event(), 60.0) == "expert-0: its actor died"
    )
    assert set(groups.tokens_seen) == {b"token"}


def test_unresponsive_launcher_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "REPLY_TIMEOUT_S", 0.01)
    groups = FakeGroups("", RuntimeError("the actor died"))
    reason = wait_for_shutdown(groups, b"token", threading.Event(), 0.01)
    assert "Groups" in reason


def test_user_shutdown_has_no_reason() -> None:
    stop = threading.Event()
    stop.set()
    assert wait_for_shutdown(FakeGroups("never asked"), b"token", stop, 1.0) == ""


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


@pytest.mark.parametrize("reply", [("a", 1), TimeoutError()])
def test_drain_ends_at_its_limit(
    reply: tuple[str, int] | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "REPLY_TIMEOUT_S", 0.01)
    drain(FakeGroups(reply), 0.01, threading.Event())


def test_a_second_signal_or_an_ingress_that_is_gone_ends_it_at_once() -> None:
    skip_drain = threading.Event()
    drain(FakeGroups(RuntimeError("the actor died")), 60.0, skip_drain)
    skip_drain.set()
    drain(FakeGroups(TimeoutError()), 60.0, skip_drain)


def test_ranks_are_idle_after_two_empty_polls() -> None:
    """Between two of them an ingress may send another sequence of a request that it has."""
    polls = [(1, 2), (0, 0), (0, 1), (0, 0), (0, 0), (9, 9)]

    async def status() -> list[RankStatus]:
        running, waiting = polls.pop(0)
        ranks = RankStatus(name="attention-0", healthy=True, running=running, waiting=waiting)
        return [ranks, RankStatus(name="expert-0", healthy=True)]

    assert asyncio.run(wait_idle(status, 60.0)) == 0
    assert polls == [(9, 9)]


def test_unfinished_sequences_are_counted() -> None:
    async def status() -> list[RankStatus]:
        return [RankStatus(name="attention-0", healthy=True, running=2, waiting=1)]

    assert asyncio.run(wait_idle(status, 0.01)) == 3


async def _silent(*_: Any) -> Any:
    raise RayError("the actor died")


def handle(**methods: Any) -> Any:
    """Return a deployment handle whose other methods get no reply."""
    names = ("metrics", "status", "trace", "scale", "clock")
    calls = {name: SimpleNamespace(remote=methods.get(name, _silent)) for name in names}
    return SimpleNamespace(**calls)


@pytest.mark.parametrize(
    ("calls", "event"),
    [
        (lambda launcher: launcher.status(), "rank_status_failed"),
        (lambda launcher: launcher.trace(1.0), "trace_failed"),
        (lambda launcher: launcher.offset(), "trace_failed"),
        (lambda launcher: launcher.scale(None), "scale_request_failed"),
    ],
)
def test_status_without_launcher_is_not_ready(
    calls: Any, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "tandem.ingress"),
        pytest.raises(NotReadyError, match="the launcher of the ranks does not answer"),
    ):
        asyncio.run(calls(Launcher(handle())))
    assert event in caplog.text
    assert "the actor died" in caplog.text


def test_launcher_receives_requests_and_clock_is_compared() -> None:
    calls: list[ScaleTarget | None] = []

    async def scale(requested: ScaleTarget | None) -> ScaleState:
        calls.append(requested)
        return ScaleState()

    async def clock() -> tuple[float, str]:
        return monotonic_s() - 3600, "another boot"

    launcher = Launcher(handle(scale=scale, clock=clock))
    requested = ScaleTarget(expert_ranks=2)
    assert asyncio.run(launcher.scale(requested)) == ScaleState()
    asyncio.run(launcher.scale(None))
    assert calls == [requested, None]
    ahead = asyncio.run(launcher.offset())
    assert ahead.applied_s == pytest.approx(3600, abs=1.0)
    assert not ahead.is_shared
