"""`/scale`, `/status`, `/trace` and their commands: answers, failures, silence."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.cli.main import main
from cluster.http import admin
from cluster.http.server import free_port
from cluster.observe import operator_client as client
from cluster.observe.operator_client import fetch_status, watch
from cluster.observe.server_client import Server
from contracts.config import HttpConfig
from contracts.errors import ConfigError, NotReadyError, OverloadError
from contracts.ranks import RankStatus
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import ClockOffset, RankTraceInfo, TraceInfo, TraceResponse
from tests.support.api_harness import MODEL, Api, serve_api
from tests.support.one_line_errors import error_line

Capture = pytest.CaptureFixture[str]
DONE = ScaleState(
    state="done", number=1, ranks={"attention_ranks": 3}, steps=["one", "two"], seconds=2.5
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_POLL_S", 0.001)
    monkeypatch.setattr(client, "_MAX_SILENCE_S", 0.05)
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)


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
    with serve_api(folder, scale=received) as api:
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
    with serve_api(folder, scale=Launcher(*answers)) as api:
        assert main(["scale", "--url", api.url, "--attention-ranks", "3"]) == 2
    (line,) = [  # others are of the ingress in this process
        line for line in capsys.readouterr().err.splitlines() if line.startswith("tandem scale: ")
    ]
    assert message in line


def test_slow_scale_continues_after_time_limit(folder: Path, capsys: Capture) -> None:
    with serve_api(folder, scale=Launcher(_running())) as api:
        given = ["--attention-ranks", "3", "--within", "0.01"]
        assert main(["scale", "--url", api.url, *given]) == 2
    assert "not done within 0.01 s (--within): it continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("scale", [], "give one of --attention-ranks, --expert-ranks, --prefill-workers"),
        ("scale", ["--attention-ranks", "0"], "--attention-ranks 0: give 1 to 1024"),
        ("scale", ["--prefill-workers", "-1"], "--prefill-workers -1: give 1 to 1024"),
        ("scale", ["--expert-ranks", "1025"], "--expert-ranks 1025: give 1 to 1024"),
        ("scale", ["--expert-ranks", "1", "--within", "nan"], "give more than 0 seconds"),
        ("scale", ["--expert-ranks", "1", "--url", "here"], "begin it with http:// or https://"),
        ("scale", ["--expert-ranks", "1"], "no answer"),
        ("status", ["--url", "localhost"], "begin it with http"),
        ("status", ["--watch", "0"], "--watch 0.0: give 0.1 or more"),
        ("status", ["--watch", "nan"], "--watch nan: give 0.1 or more"),
        ("status", ["--watch", "--json"], "give one of them"),
        ("status", [], "no answer: "),
        ("trace", ["--url", "localhost"], "begin it with http"),
        ("trace", ["--seconds", "0"], "--seconds 0.0: give more than 0, 60 at most"),
        ("trace", ["--seconds", "nan"], "--seconds nan: give more than 0"),
        ("trace", ["--output", "nowhere/trace.json"], "folder nowhere does not exist"),
        ("trace", [], "no answer: "),
    ],
)
def test_invalid_command_is_one_line(
    capsys: Capture, command: str, arguments: list[str], message: str
) -> None:
    url = [] if "--url" in arguments else ["--url", f"http://127.0.0.1:{free_port()}"]
    assert message in error_line(capsys, command, *url, *arguments)


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
    with serve_api(folder, None, http, scale=received) as api:
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
    with serve_api(folder, scale=received) as api:
        answer = api.http.post("/scale", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert len(answer.text) < 500
    assert not received.received


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_cross_site_request_is_blocked(folder: Path, kind: str | None) -> None:
    """A browser sends a preflight request for JSON, and no handler allows it."""
    received = Launcher(DONE)
    with serve_api(folder, scale=received) as api:
        headers = {} if kind is None else {"content-type": kind}
        answer = api.http.post("/scale", content=b'{"attention_ranks": 3}', headers=headers)
        assert answer.status_code == 415
        assert api.http.options("/scale").status_code == 405
    assert not received.received


def test_missing_launcher_is_reported(folder: Path) -> None:
    with serve_api(folder) as api:
        answer = api.http.post("/scale", json={"attention_ranks": 3})
    assert answer.status_code == 503


def _rank(busy_s: float, uptime_s: float, **changes: Any) -> RankStatus:
    sections = {
        "stage_s": {"attention": busy_s, "wait": 5.0, "held": 3.0, "a2e": 9.0},
        "totals": {"exposed_s": busy_s / 2},
        "kv_blocks": {"free": 1000.0, "used": 200.0, "cached": 34.0},
        "plans": {"asas ma=4": 7.0, "naive": 2.0},
    }
    fields: dict[str, Any] = {"name": "attention-0", "healthy": True, "uptime_s": uptime_s}
    return RankStatus(**(fields | {"sections": sections} | changes))


def _answers(*ranks: RankStatus) -> Callable[[], Any]:
    async def fetch_status() -> list[RankStatus]:
        return list(ranks)

    return fetch_status


def test_table_shows_state_of_each_rank(folder: Path, capsys: Capture) -> None:
    ranks = [_rank(30.0, 60.0, running=3, waiting=2), _rank(0.0, 3720.0, name="expert-0")]
    with serve_api(folder, fetch_status=_answers(*ranks)) as api:
        assert main(["status", "--url", api.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{MODEL} on {api.url}")
    assert lines[0].endswith(": ready")
    attention, expert = (line.split() for line in lines[4:6])
    assert attention[:8] == ["attention-0", "0", "1", "min", "3", "2", "50%", "25%"]
    assert attention[8:] == ["234", "of", "1,234"]
    assert "attention-0 plans: asas ma=4, 7 of 9 batches" in lines
    assert expert[:8] == ["expert-0", "0", "1", "h", "02", "min", "0", "0"]


def test_lost_rank_is_reported_with_its_reason(folder: Path, capsys: Capture) -> None:
    lost = RankStatus(name="expert-0", healthy=False, reason="no answer for 3.1 s")
    with serve_api(folder, fetch_status=_answers(lost)) as api:
        assert main(["status", "--url", api.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"][0]["reason"] == "no answer for 3.1 s"
        assert main(["status", "--url", api.url]) == 0
    assert "expert-0 is lost: no answer for 3.1 s\n" in capsys.readouterr().out


def test_unreachable_ranks_are_a_problem_and_the_rest_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(admin, "SCRAPE_TIMEOUT_S", 0.05)

    async def never() -> list[RankStatus]:
        await asyncio.Event().wait()
        return []

    async def gone() -> list[RankStatus]:
        raise NotReadyError("the launcher of the ranks does not answer")

    for fetch, message in (
        (never, "have not reported their state within"),
        (gone, "does not answer"),
    ):
        with serve_api(folder, fetch_status=fetch) as api:
            assert main(["status", "--url", api.url]) == 2
        out = capsys.readouterr().out
        assert "not ready" in out
        assert message in out


def test_watch_shows_changes_and_survives_server_outage(folder: Path, capsys: Capture) -> None:
    ranks = [_rank(30.0, 60.0)]
    rounds = 0

    class EnoughError(Exception):
        """Ends a watch."""

    def sleep(seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        ranks[0] = _rank(30.0, 60.0 + rounds)
        if rounds == 3:
            raise EnoughError

    async def fetch_status() -> list[RankStatus]:
        if rounds == 2:
            raise NotReadyError("away for a while")
        return ranks

    with serve_api(folder, fetch_status=fetch_status) as api, pytest.raises(EnoughError):
        watch(Server(api.url), 1.0, sleep)
    assert "away for a while" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status"], ["trace", "--seconds", "0.1"]])
def test_key_is_the_one_of_metrics(
    folder: Path, tmp_path: Path, capsys: Capture, command: list[str]
) -> None:
    async def trace(seconds: float) -> TraceResponse:
        return _answer()

    if command[0] == "trace":
        command = [*command, "--output", str(tmp_path / "out.json")]
    http = HttpConfig(api_keys=["client"], metrics_key="watcher")
    with serve_api(folder, None, http, fetch_status=_answers(), trace=trace) as api:
        assert main([*command, "--url", api.url, "--api-key", "client"]) == 2
        assert "401: give the key of its http.metrics_key" in capsys.readouterr().err
        assert main([*command, "--url", api.url, "--api-key", "watcher"]) == 0


def test_foreign_server_is_reported_and_endless_answer_is_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_api(folder, fetch_status=_answers(_rank(1.0, 2.0))) as api:
        with pytest.raises(ConfigError, match="answered 404, and not as Tandem does"):
            fetch_status(Server(f"{api.url}/nowhere"))
        monkeypatch.setattr(client, "_MAX_BYTES", 100)
        with pytest.raises(ConfigError, match="no end after"):
            fetch_status(Server(api.url))


CLOCK = ClockOffset(offset_ms=12.5, uncertainty_ms=0.25, is_shared=False)
EVENT = {"ph": "X", "name": "attention L0 m0", "pid": 2, "tid": 1, "ts": 1.0, "dur": 2.0}
PROMPT = "my password is xyzzy"


def _answer(**missing: str) -> TraceResponse:
    ranks = {"attention-0": RankTraceInfo(clock=CLOCK, spans=1, is_cut=True)}
    events = msgspec.Raw(msgspec.json.encode([EVENT]))
    return TraceResponse(note=TraceInfo(seconds=1.0, ranks=ranks, missing=missing), events=events)


def test_trace_has_ranks_and_requests_without_content(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    api: Api

    async def trace(seconds: float) -> TraceResponse:
        assert seconds == 1.5
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
        headers = {"x-request-id": "traced-1"}
        await asyncio.to_thread(api.http.post, "/v1/completions", json=body, headers=headers)
        return _answer(**{"expert-0": "no answer (TimeoutError)"})

    path = tmp_path / "out.json"
    with serve_api(folder, trace=trace) as api:
        arguments = ["trace", "--url", api.url, "--seconds", "1.5", "--output", str(path)]
        assert main(arguments) == 0
    whole = json.loads(path.read_text())
    assert EVENT in whole["traceEvents"]
    begin_events = [event for event in whole["traceEvents"] if event["ph"] == "b"]
    assert [event["args"]["request_id"] for event in begin_events] == ["traced-1"] * 2
    assert [event["name"] for event in begin_events] == ["generation traced-1", "to first token"]
    metadata = whole["otherData"]["tandem"]
    assert metadata["missing"] == {"expert-0": "no answer (TimeoutError)"}
    assert set(metadata["ranks"]) == {"ingress", "attention-0"}
    assert "xyzzy" not in path.read_text()
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()][-1] == [
        "attention-0",
        "1+",
        "12.500",
        "0.250",
    ]
    assert "expert-0 is missing: no answer (TimeoutError)\n" in err
    assert "raise trace.spans" in err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.json"]


def test_concurrent_or_failed_trace_is_one_line_without_file(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(seconds: float) -> TraceResponse:
        return TraceResponse(refused_s=2.2)

    async def fail(seconds: float) -> TraceResponse:
        raise NotReadyError("the launcher of the ranks does not answer")

    async def never(seconds: float) -> TraceResponse:
        await asyncio.Event().wait()
        return _answer()

    monkeypatch.setattr(admin, "EXTRA_S", 0.05)
    path = tmp_path / "out.json"
    for fetch, message in (
        (refuse, "429: another trace is under way: try again in 3 s"),
        (fail, "503: the launcher of the ranks does not answer"),
        (never, "503: the ranks' traces did not arrive within 0.06 s"),
    ):
        with serve_api(folder, trace=fetch) as api:
            arguments = ["trace", "--url", api.url, "--seconds", "0.01", "--output", str(path)]
            assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not path.exists()


@pytest.mark.parametrize("seconds", ["-1", "61", "nan", "inf", "x", "1e999", "%00", "9" * 500])
def test_invalid_seconds_are_refused(folder: Path, seconds: str) -> None:
    with serve_api(folder) as api:
        answer = api.http.get(f"/trace?seconds={seconds}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "seconds"
    assert len(answer.text) < 300
