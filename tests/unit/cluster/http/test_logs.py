"""Logs contain request ids, and request text only with log.prompts."""

import io
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.http.app import App
from contracts.config import HttpConfig, LogConfig
from contracts.import_path import version
from contracts.logs import set_up_logging
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, serve_api
from tests.support.fake_rank import FakeRank

SECRET = "xyzzy-plugh"
PROMPT = f"my password is {SECRET}"
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/classify", {"input": [PROMPT], "labels": ["a", PROMPT]}),
    ("/v1/score", {"query": PROMPT, "items": [PROMPT], "label_token_ids": [1]}),
    ("/tokenize", {"prompt": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT * 200}),
    ("/v1/completions", {"prompt": [PROMPT, 1]}),
    ("/v1/completions", {SECRET: PROMPT}),
    (f"/v1/{SECRET}", {"prompt": PROMPT}),
]


@pytest.fixture
def everything(tmp_path: Path) -> Iterator[io.StringIO]:
    """Capture what all loggers of the process write."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    top, root = logging.getLogger("tandem"), logging.getLogger()
    before, level = list(top.handlers), top.level
    root.addHandler(handler)
    top.propagate = False
    yield written
    root.removeHandler(handler)
    top.propagate = True
    for added in [one for one in top.handlers if one not in before]:
        top.removeHandler(added)
        added.close()
    top.setLevel(level)


def logged(everything: io.StringIO, path: Path | None) -> str:
    assert path is not None
    return everything.getvalue() + path.read_text()


def send_all(api: Api) -> None:
    for number, (path, body) in enumerate(BODIES):
        headers = {"x-request-id": f"asked-{number}"}
        answer = api.http.post(path, json={"model": "tiny", **body}, headers=headers)
        assert answer.headers["x-request-id"] == f"asked-{number}"
    api.http.post("/v1/completions", content=PROMPT, headers={"content-type": "application/json"})


def set_up(tmp_path: Path, *, prompts: bool) -> Path | None:
    config = LogConfig(folder=str(tmp_path), level="debug", prompts=prompts)
    return set_up_logging("ingress", config)


def _bug(*_: object) -> None:
    raise ValueError(f"what a bug says of {PROMPT}")


@pytest.mark.parametrize("has_bug", [False, True])
def test_log_contains_no_prompt_text(
    folder: Path,
    tmp_path: Path,
    everything: io.StringIO,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_bug: bool,
) -> None:
    path = set_up(tmp_path, prompts=False)
    if has_bug:
        monkeypatch.setattr("cluster.http.generation._Run.answer", _bug)
        monkeypatch.setattr("cluster.http.generation._Run._usage", _bug)
    with serve_api(folder) as api:
        send_all(api)
        assert isinstance(api.app, App)
        api.loop.call(api.app.close)
    text = logged(everything, path) + capsys.readouterr().err
    assert SECRET not in text.replace(f"/v1/{SECRET}", "")
    assert "request_id=asked-0" in text
    assert ("request_failed" in text) == has_bug
    assert ("ValueError" in text) == has_bug


def test_excluded_path_is_logged_only_when_it_fails(
    folder: Path, tmp_path: Path, everything: io.StringIO
) -> None:
    path = set_up(tmp_path, prompts=False)
    with serve_api(folder, None, HttpConfig(access_log_exclude=["/health", "/load"])) as api:
        assert api.http.get("/health", headers={"x-request-id": "probe-1"}).status_code == 200
        assert api.http.get("/version", headers={"x-request-id": "other"}).status_code == 200
        api.app.app_state.drainer.is_draining = True
        assert api.http.get("/health", headers={"x-request-id": "probe-2"}).status_code == 503
        api.loop.call(api.app.close)
    text = logged(everything, path)
    assert "probe-1" not in text
    assert "request_id=other" in text
    assert "request_id=probe-2" in text


def test_log_prompts_logs_bodies_and_error_messages(
    folder: Path, tmp_path: Path, everything: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = set_up(tmp_path, prompts=True)
    monkeypatch.setattr("cluster.http.generation._Run.answer", _bug)
    with serve_api(folder, logs_prompts=True) as api:
        send_all(api)
    lines = logged(everything, path).splitlines()
    first = next(line for line in lines if "tandem.prompts request_body request_id=asked-0" in line)
    assert PROMPT in first
    assert any(
        "request_failed" in line and f"what a bug says of {PROMPT}" in line for line in lines
    )


def test_request_id_is_sent_with_each_sequence(folder: Path) -> None:
    names: list[str] = []

    def answer(submit: object) -> list[int]:
        names.append(submit.caller.name)  # type: ignore[attr-defined]
        return [60]

    with serve_api(folder, [FakeRank("attention-0", answer)]) as api:
        body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}
        api.http.post("/v1/completions", json=body, headers={"x-request-id": "mine/1"})
        odd = api.http.post("/v1/completions", json=body, headers={"x-request-id": 'no "such" id'})
    assert names[:2] == ["mine/1", "mine/1"]
    assert names[2] == names[3] == odd.headers["x-request-id"]
    assert len(names[2]) == 32


FRESH = re.compile(r"[0-9a-f]{32}")
PRIVATE = "nobody may read this"


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serve_api(folder, None, HttpConfig(api_keys=["secret-key"], root_path="/llm")) as api:
        api.http.headers["Authorization"] = "Bearer secret-key"
        yield api


def send_chat(api: Api, request_id: str | None) -> list[httpx.Response]:
    """Send requests of every outcome: valid, streamed, rejected, unknown route, method, key."""
    headers = {"X-Request-Id": request_id} if request_id is not None else {}
    good = {"model": MODEL, "prompt": PRIVATE}
    http = api.http
    return [
        http.post("/v1/completions", json=good, headers=headers),
        http.post("/v1/completions", json={**good, "stream": True}, headers=headers),
        http.post("/v1/completions", json={**good, "n": -1}, headers=headers),
        http.post("/v1/completions", content=b"{", headers=headers),
        http.get("/v1/completions", headers=headers),
        http.get("/nowhere", headers=headers),
        http.get("/v1/models", headers={**headers, "Authorization": "Bearer wrong-key"}),
        http.get("/metrics", headers=headers),
    ]


def test_every_response_has_its_request_id(api: Api) -> None:
    given = "req-1:a/b+c=d@e_f.g"
    answers = send_chat(api, given)
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400, 405, 404, 401, 200]
    assert {answer.headers["x-request-id"] for answer in answers} == {given}


@pytest.mark.parametrize("given", [None, "", "two words", "a" * 129, 'quo"te', "ä".encode()])
def test_invalid_request_id_is_replaced(api: Api, given: str | bytes | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    answers = [api.http.get("/health", headers=headers) for _ in range(2)]  # type: ignore[arg-type]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(FRESH.fullmatch(one) for one in ids)


def lines_of_log(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """Return the test's lines of the access log, which is written late, once there are `count`."""
    lines: list[str] = []
    deadline_s = time.monotonic() + 10.0
    while len(lines) < count and time.monotonic() < deadline_s:
        time.sleep(0.02)
        records = [record for record in caplog.records if record.name == "tandem.access"]
        written = "\n".join(record.getMessage() for record in records).splitlines()
        lines = [line for line in written if "request_id=mine" in line or "a%0Ab" in line]
    return lines


def test_log_has_one_line_per_request_without_text_or_key(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tandem.access"):
        send_chat(api, "mine")
        api.http.get("/v1/models/a%0Ab?prompt=" + PRIVATE.replace(" ", "+"))
        lines = lines_of_log(caplog, 9)
    assert len(lines) == 9
    pattern = r"method=POST path=/llm/v1/completions status=200 ms=\d+(\.\d)? request_id=mine"
    assert re.fullmatch(pattern, lines[0])
    assert "path=/llm/v1/models/a%0Ab status=404" in lines[-1]
    for line in lines:
        assert "\n" not in line
        for secret in (PRIVATE, "nobody", "secret-key", "wrong-key"):
            assert secret not in line


def test_version_is_public(api: Api) -> None:
    answer = api.http.get("/version", headers={"Authorization": ""})
    assert answer.json() == {"version": version()}
    assert re.fullmatch(r"\d+\.\d+.*", version())


def test_load_counts_running_and_waiting_per_pipeline(folder: Path) -> None:
    rank = FakeRank("attention-0", lambda submit: [60, 61])
    rank.hold_after = 0
    with serve_api(folder, [rank]) as api:
        idle = {"requests": 0, "waiting": {"ls": 0, "be": 0}}
        load = api.http.get("/load").json()
        assert load == {"server_load": 0, "pipelines": {"generation": idle, "prefill": idle}}
        waiting = api.start("/v1/completions", prompt="a", max_tokens=9, priority="be")
        rank.submits.get(timeout=TIMEOUT_S)
        load = api.http.get("/load").json()
        assert load["server_load"] == 1
        assert load["pipelines"]["generation"] == {"requests": 1, "waiting": {"ls": 0, "be": 1}}
        waiting.cancel()
        rank.cancels.get(timeout=TIMEOUT_S)


def test_pages_of_allowed_origins_may_send_model_requests(folder: Path) -> None:
    http = HttpConfig(api_keys=["secret-key"], allowed_origins=["https://chat.example.org"])
    with serve_api(folder, None, http) as api:
        preflight = {"access-control-request-method": "POST"}
        preflight["access-control-request-headers"] = "authorization, x-stainless-os"
        name = "access-control-allow-origin"
        for origin, path, status in (
            ("https://chat.example.org", "/v1/completions", 200),
            ("https://other.example.org", "/v1/completions", 400),
            ("https://chat.example.org", "/scale", 405),
        ):
            allowed = origin if status == 200 else None
            preflight["origin"] = origin
            answer = api.http.options(path, headers=preflight)
            assert (answer.status_code, answer.headers.get(name)) == (status, allowed)
            answer = api.http.post(path, json={}, headers={"origin": origin})
            assert (answer.status_code, answer.headers.get(name)) == (401, allowed)
        for wrong in ("chat.example.org", "https://chat.example.org/"):
            with pytest.raises(ValueError, match="allowed_origins"):
                HttpConfig(allowed_origins=[wrong])


def test_root_path_is_documented_behind_proxy(api: Api) -> None:
    document = api.http.get("/openapi.json").json()
    assert document["servers"] == [{"url": "/llm"}]
    assert api.http.get("/v1/models").status_code == 200
