"""`GET /trace` and `tandem trace` with servers that answer, fail, or do not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.cli.main import main
from cluster.http import admin
from cluster.http.request_context import TraceSource
from contracts.config import HttpConfig
from contracts.errors import NotReadyError
from contracts.traces import ClockOffset, RankTraceInfo, TraceInfo, TraceResponse
from tests.support.api_harness import Api, no_offset, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_byte_level

Capture = pytest.CaptureFixture[str]
CLOCK = ClockOffset(offset_ms=12.5, uncertainty_ms=0.25, is_shared=False)
EVENT = {"ph": "X", "name": "attention L0 m0", "pid": 2, "tid": 1, "ts": 1.0, "dur": 2.0}
PROMPT = "my password is xyzzy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


def _trace_source(trace: Callable[[float], Awaitable[TraceResponse]]) -> TraceSource:
    return TraceSource(trace, no_offset)


def _answer(**missing: str) -> TraceResponse:
    ranks = {"attention-0": RankTraceInfo(clock=CLOCK, spans=1, is_cut=True)}
    events = msgspec.Raw(msgspec.json.encode([EVENT]))
    return TraceResponse(note=TraceInfo(seconds=1.0, ranks=ranks, missing=missing), events=events)


def _rank() -> FakeRank:
    return FakeRank("attention-0", lambda submit: [60, 61])


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
    with serve_api(folder, [_rank()], tracing=_trace_source(trace)) as api:
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
        with serve_api(folder, [_rank()], tracing=_trace_source(fetch)) as api:
            arguments = ["trace", "--url", api.url, "--seconds", "0.01", "--output", str(path)]
            assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not path.exists()


def test_its_key_is_the_one_of_metrics(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    async def trace(seconds: float) -> TraceResponse:
        return _answer()

    http = HttpConfig(api_keys=["client"], metrics_key="watcher")
    given = ["--seconds", "0.1", "--output", str(tmp_path / "out.json")]
    with serve_api(folder, [_rank()], http, tracing=_trace_source(trace)) as api:
        assert main(["trace", "--url", api.url, "--api-key", "client", *given]) == 2
        assert "401: give the key of its http.metrics_key" in capsys.readouterr().err
        assert main(["trace", "--url", api.url, "--api-key", "watcher", *given]) == 0


@pytest.mark.parametrize("seconds", ["-1", "61", "nan", "inf", "x", "1e999", "%00", "9" * 500])
def test_invalid_seconds_are_refused(folder: Path, seconds: str) -> None:
    with serve_api(folder, [_rank()]) as api:
        answer = api.http.get(f"/trace?seconds={seconds}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "seconds"
    assert len(answer.text) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost"], "begin it with http"),
        (["--seconds", "0"], "--seconds 0.0: give more than 0, 60 at most"),
        (["--seconds", "nan"], "--seconds nan: give more than 0"),
        (["--output", "nowhere/trace.json"], "folder nowhere does not exist"),
        (["--url", "http://127.0.0.1:9"], "no answer: "),
    ],
)
def test_untraceable_server_is_one_line(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    assert main(["trace", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_foreign_server_is_reported(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    async def trace(seconds: float) -> Any:
        return _answer()

    with serve_api(folder, [_rank()], tracing=_trace_source(trace)) as api:
        arguments = ["--url", f"{api.url}/v1/models?x=", "--output", str(tmp_path / "out.json")]
        assert main(["trace", *arguments]) == 2
    assert "--url" in capsys.readouterr().err
