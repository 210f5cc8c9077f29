"""Request ids, access log, and routes about the server."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.http.admin import version
from cluster.http.request_log import WRITTEN_AFTER_S
from contracts.config import HttpConfig
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.front_harness import get, read_answer

FRESH = re.compile(r"[0-9a-f]{32}")
SECRET = "nobody may read this"


@pytest.fixture(scope="module")
def rank() -> FakeRank:
    return FakeRank("attention-0", lambda submit: [60, 61])


@pytest.fixture(scope="module")
def api(folder: Path, rank: FakeRank) -> Iterator[Api]:
    with serve_api(folder, [rank], HttpConfig(api_keys=["secret-key"], root_path="/llm")) as api:
        api.http.headers["Authorization"] = "Bearer secret-key"
        yield api


def send_chat(api: Api, request_id: str | None) -> list[httpx.Response]:
    """Send requests of every outcome: valid, streamed, rejected, unknown route, method, key."""
    headers = {"X-Request-Id": request_id} if request_id is not None else {}
    good = {"model": MODEL, "prompt": SECRET}
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


def test_internal_error_has_request_id(folder: Path) -> None:
    def breaks(submit: object) -> list[int]:
        return [60]

    with serve_api(folder, [FakeRank("attention-0", breaks)]) as api:
        api.backend.problems = lambda: 1 / 0  # type: ignore[assignment, return-value]
        answer = api.http.get("/health", headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")


def lines_of_log(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """Return the lines of the access log once there are `count`."""
    lines: list[str] = []
    deadline_s = time.monotonic() + 10.0
    while len(lines) < count and time.monotonic() < deadline_s:
        time.sleep(0.02)
        records = [record for record in caplog.records if record.name == "tandem.access"]
        lines = "\n".join(record.getMessage() for record in records).splitlines()
    return lines


def test_log_has_one_line_per_request_without_text_or_key(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tandem.access"):
        send_chat(api, "mine")
        api.http.get("/v1/models/a%0Ab?prompt=" + SECRET.replace(" ", "+"))
        lines = lines_of_log(caplog, 9)
    assert len(lines) == 9
    pattern = r"method=POST path=/llm/v1/completions status=200 ms=\d+(\.\d)? request_id=mine"
    assert re.fullmatch(pattern, lines[0])
    assert "path=/llm/v1/models/a%0Ab status=404" in lines[-1]
    for line in lines:
        assert "\n" not in line
        for secret in (SECRET, "nobody", "secret-key", "wrong-key"):
            assert secret not in line


def test_access_log_can_be_disabled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = FakeRank("attention-0", lambda submit: [60])
    with (
        caplog.at_level(logging.INFO, logger="tandem.access"),
        serve_api(folder, [rank], HttpConfig(access_log=False)) as api,
    ):
        assert api.http.get("/health").status_code == 200
        time.sleep(2 * WRITTEN_AFTER_S)
    assert not [record for record in caplog.records if record.name == "tandem.access"]


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
        body = {"model": MODEL, "prompt": "a", "max_tokens": 9, "priority": "be"}
        request = api.http.build_request("POST", "/v1/completions", json=body)
        waiting = api.loop.start(api.send(request))
        rank.submits.get(timeout=TIMEOUT_S)
        load = api.http.get("/load").json()
        assert load["server_load"] == 1
        assert load["pipelines"]["generation"] == {"requests": 1, "waiting": {"ls": 0, "be": 1}}
        waiting.cancel()
        rank.cancels.get(timeout=TIMEOUT_S)


def test_root_path_is_documented_behind_proxy(api: Api) -> None:
    document = api.http.get("/openapi.json").json()
    assert document["servers"] == [{"url": "/llm"}]
    assert api.http.get("/v1/models").status_code == 200


def test_server_errors_are_documented(api: Api) -> None:
    document = api.http.get("/openapi.json").json()
    for path, method in (("/v1/completions", "post"), ("/health", "get")):
        assert {"408", "414", "431", "503"} <= set(document["paths"][path][method]["responses"])
    port = int(api.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as line:
        line.sendall(get("/health", "X-Much: " + "a" * (64 << 10)))
        assert read_answer(line).error["code"] in str(document["components"]["responses"])
