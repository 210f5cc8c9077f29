"""Logs contain request ids, and request text only with log.prompts."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.http.app import App
from contracts.config import LogConfig
from contracts.logs import set_up_logging
from tests.support.api_harness import Api, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_byte_level

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


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
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [60, 61, 62])]) as api:
        send_all(api)
        assert isinstance(api.app, App)
        api.loop.call(api.app.close)
    text = logged(everything, path) + capsys.readouterr().err
    assert SECRET not in text.replace(f"/v1/{SECRET}", "")
    assert "request_id=asked-0" in text
    assert ("request_failed" in text) == has_bug
    assert ("ValueError" in text) == has_bug


def test_failed_stream_is_logged_by_id_without_text(
    folder: Path, tmp_path: Path, everything: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = set_up(tmp_path, prompts=False)
    monkeypatch.setattr("cluster.http.generation._Run._usage", _bug)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    body["stream_options"] = {"include_usage": True}
    rank = FakeRank("attention-0", lambda submit: [60, 61, 62])
    with (
        serve_api(folder, [rank]) as api,
        contextlib.suppress(httpx.HTTPError),
    ):  # closed by the server
        api.http.post("/v1/completions", json=body, headers={"x-request-id": "broken"})
    text = logged(everything, path)
    assert SECRET not in text
    assert "answer_failed request_id=broken error=ValueError" in text


def test_log_prompts_logs_bodies_and_error_messages(
    folder: Path, tmp_path: Path, everything: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = set_up(tmp_path, prompts=True)
    monkeypatch.setattr("cluster.http.generation._Run.answer", _bug)
    rank = FakeRank("attention-0", lambda submit: [60])
    with serve_api(folder, [rank], logs_prompts=True) as api:
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
