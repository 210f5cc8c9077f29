"""`/scale` and `tandem scale` with servers that answer, fail, or do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.cli.main import main
from cluster.observe import scale_client as client
from contracts.config import HttpConfig
from contracts.errors import NotReadyError, OverloadError
from contracts.scaling import ScaleState, ScaleTarget
from tests.support.api_harness import serve_api
from tests.support.fake_rank import FakeRank

Capture = pytest.CaptureFixture[str]
DONE = ScaleState(
    state="done", number=1, ranks={"attention_ranks": 3}, steps=["one", "two"], seconds=2.5
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_POLL_S", 0.001)
    monkeypatch.setattr(client, "_MAX_SILENCE_S", 0.05)
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)


def _rank() -> FakeRank:
    return FakeRank("attention-0", lambda submit: [60])


class Launcher:
    """Launcher with a list of answers; the last one repeats. requested: the targets received."""

    def __init__(self, *answers: ScaleState | Exception) -> None:
        self._answers: Iterator[ScaleState | Exception] = iter(answers)
        self._last = answers[-1]
        self.received: list[ScaleTarget] = []

    async def __call__(self, requested: ScaleTarget | None) -> ScaleState:
        if requested is not None:
            self.received.append(requested)
        answer = next(self._answers, self._last)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _running(*steps: str) -> ScaleState:
    return msgspec.structs.replace(DONE, state="running", steps=list(steps))


def test_steps_are_printed_as_they_arrive_then_rank_counts(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MAX_SILENCE_S", 30.0)
    received = Launcher(_running("one"), _running("one"), NotReadyError("a moment"), DONE)
    with serve_api(folder, [_rank()], scale=received) as api:
        assert main(["scale", "--url", api.url, "--attention-ranks", "3"]) == 0
    assert received.received == [ScaleTarget(attention_ranks=3)]
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["one", "two", "attention_ranks=3, after 2.5 s"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([OverloadError("another scale is under way (attention_ranks=3)", 5.0)], "429: another"),
        ([NotReadyError("attention_ranks=9: 7 more need 7 CPU")], "503: attention_ranks=9"),
        (
            [_running(), msgspec.structs.replace(DONE, state="failed", reason="no memory")],
            "no memory; current ranks: attention_ranks=3",
        ),
        ([_running(), ScaleState()], "the launcher was restarted"),
        ([_running(), NotReadyError("nobody")], "503: nobody"),
    ],
)
def test_failed_scale_is_one_line(
    folder: Path, capsys: Capture, answers: list[Any], message: str
) -> None:
    with serve_api(folder, [_rank()], scale=Launcher(*answers)) as api:
        assert main(["scale", "--url", api.url, "--attention-ranks", "3"]) == 2
    (line,) = [  # others are of the ingress in this process
        line for line in capsys.readouterr().err.splitlines() if line.startswith("tandem scale: ")
    ]
    assert message in line


def test_slow_scale_continues_after_time_limit(folder: Path, capsys: Capture) -> None:
    with serve_api(folder, [_rank()], scale=Launcher(_running())) as api:
        given = ["--attention-ranks", "3", "--within", "0.01"]
        assert main(["scale", "--url", api.url, *given]) == 2
    assert "not done within 0.01 s (--within): it continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --attention-ranks, --expert-ranks, --prefill-workers"),
        (["--attention-ranks", "0"], "--attention-ranks 0: give 1 to 1024"),
        (["--prefill-workers", "-1"], "--prefill-workers -1: give 1 to 1024"),
        (["--expert-ranks", "1025"], "--expert-ranks 1025: give 1 to 1024"),
        (["--expert-ranks", "1", "--within", "nan"], "--within nan: give more than 0 seconds"),
        (["--expert-ranks", "1", "--url", "here"], "begin it with http:// or https://"),
        (["--expert-ranks", "1", "--url", "http://127.0.0.1:1"], "no answer"),
    ],
)
def test_invalid_scale_request_is_one_line(
    capsys: Capture, arguments: list[str], message: str
) -> None:
    assert main(["scale", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("http", "key", "status"),
    [
        (HttpConfig(), None, 200),
        (HttpConfig(operator_key="op"), "op", 200),
        (HttpConfig(api_keys=["client"]), "client", 401),
        (HttpConfig(api_keys=["client"], metrics_key="watcher"), "watcher", 401),
        (HttpConfig(api_keys=["client"], operator_key="op"), "client", 401),
        (HttpConfig(host="0.0.0.0", allow_public=True), None, 401),
        (HttpConfig(host="0.0.0.0", allow_public=True, operator_key="op"), "op", 200),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_scale_requires_operator_key(
    folder: Path, http: HttpConfig, key: str | None, status: int, method: str
) -> None:
    received = Launcher(DONE)
    headers = {"content-type": "application/json"}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    with serve_api(folder, [_rank()], http, scale=received) as api:
        body = None if method == "GET" else '{"attention_ranks": 3}'
        answer = api.http.request(method, "/scale", content=body, headers=headers)
    assert answer.status_code == status
    assert len(received.received) == int(status == 200 and method == "POST")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{}", 400),
        ('{"attention_ranks": 0}', 400),
        ('{"attention_ranks": 99999999999999999999999999}', 400),
        ('{"attention_rank": 3}', 400),
        ('{"attention_ranks": true}', 400),
        ('{"attention_ranks": 3' + " " * 5000 + "}", 413),
    ],
)
def test_invalid_body_changes_nothing(folder: Path, body: str, status: int) -> None:
    received = Launcher(DONE)
    with serve_api(folder, [_rank()], scale=received) as api:
        answer = api.http.post("/scale", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert len(answer.text) < 500
    assert not received.received


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_cross_site_request_is_blocked(folder: Path, kind: str | None) -> None:
    """A browser sends a preflight request for JSON, and no handler allows it."""
    received = Launcher(DONE)
    with serve_api(folder, [_rank()], scale=received) as api:
        headers = {} if kind is None else {"content-type": kind}
        answer = api.http.post("/scale", content=b'{"attention_ranks": 3}', headers=headers)
        assert answer.status_code == 415
        assert api.http.options("/scale").status_code == 405
    assert not received.received


def test_missing_launcher_is_reported(folder: Path) -> None:
    with serve_api(folder, [_rank()]) as api:
        answer = api.http.post("/scale", json={"attention_ranks": 3})
    assert answer.status_code == 503
