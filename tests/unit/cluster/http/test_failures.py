"""Failing ranks, disconnecting clients and full queues yield named errors, never a hang."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from cluster.http.app import App
from contracts.api_keys import ApiKey
from contracts.config import HttpConfig
from contracts.logs import LineFormatter
from contracts.messages import Submit
from contracts.requests import Priority
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, refused, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.front_harness import post

Serve = Callable[..., AbstractContextManager[Api]]
REPLY = [60, 61, 62, 63, 64]


@pytest.fixture
def rank() -> FakeRank:
    return FakeRank("attention-0", lambda submit: REPLY)


@pytest.fixture
def api(folder: Path, rank: FakeRank) -> Iterator[Api]:
    with serve_api(folder, [rank]) as api:
        yield api


def test_disconnect_from_stream_cancels_sequence_on_rank(api: Api, rank: FakeRank) -> None:
    rank.hold_after = 2
    body = {"model": MODEL, "prompt": "Hello", "stream": True, "max_tokens": 5}
    with api.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    rank.submits.get(timeout=5)
    assert rank.cancels.get(timeout=5) == 1


def test_disconnect_cancels_all_passes_of_classification(api: Api, rank: FakeRank) -> None:
    rank.hold_scores = True
    body = {"input": ["a", "b"], "labels": ["yes indeed", "no"]}
    leave_once_submitted(api, "/v1/classify", 4, body)
    assert sorted(rank.cancels.get(timeout=5) for _ in range(4)) == [1, 2, 3, 4]


def test_disconnect_cancels_request_with_pipelined_requests(api: Api, rank: FakeRank) -> None:
    rank.hold_after = 0
    body = msgspec.json.encode({"model": MODEL, "prompt": "Hello"})
    with api.connect() as line:
        line.sendall(2 * post("/v1/completions", body))
        rank.submits.get(timeout=5)
    assert rank.cancels.get(timeout=5) == 1


def test_disconnect_is_detected_on_any_asgi_server(api: Api, rank: FakeRank) -> None:
    """Without the hooks of our own server, as behind Serve's proxy."""
    rank.hold_after = 0
    left = asyncio.Event()
    body = msgspec.json.encode({"model": MODEL, "prompt": "Hello"})
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if not messages:
            await left.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(message: object) -> None:
        pass

    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    answering = api.loop.start(api.app(scope, receive, send))
    rank.submits.get(timeout=5)
    api.loop.call(left.set)
    assert rank.cancels.get(timeout=5) == 1
    answering.result(TIMEOUT_S)


def test_internal_error_gets_500_and_is_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.backend.generate = lambda *_, **__: 1 / 0  # type: ignore[assignment]
    answer = api.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "Hello"},
        headers={"X-Request-Id": "of-the-bug"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] == "of-the-bug"
    assert "ZeroDivisionError" not in answer.text
    (record,) = [one for one in caplog.records if "request_failed" in one.getMessage()]
    assert "of-the-bug" in record.getMessage()
    assert "ZeroDivisionError" in record.getMessage()
    assert "test_failures.py" in LineFormatter(has_traces=True).format(record)
    assert api.app.app_state.memory_budget.held_bytes == 0


def leave_once_submitted(api: Api, path: str, submits: int, body: Mapping[str, Any]) -> None:
    """Send a request and disconnect once the rank has received all of it."""
    sending = api.start(path, **body)
    for _ in range(submits):
        api.rank.submits.get(timeout=5)
    sending.cancel()


def test_ranks_lost_during_stream_yield_error_event(api: Api, rank: FakeRank) -> None:
    rank.hold_after = 1
    stream = api.openai.completions.create(model=MODEL, prompt="Hello", max_tokens=5, stream=True)
    assert next(stream).choices[0].text
    rank.on_submit = rank.drop_connections
    rank.drop_connections_from_thread()
    with pytest.raises(openai.APIError, match="attention-0"):
        list(stream)


def test_failed_sequence_keeps_code_status_and_message(api: Api, rank: FakeRank) -> None:
    rank.fail_with = ("attention-0: out of KV blocks", "kv_exhausted", 503)
    response = api.post("/v1/completions", prompt="Hello")
    assert refused(response, 503, None)["code"] == "kv_exhausted"
    streamed = api.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], stream=True
    )
    assert streamed.status_code == 503  # nothing was sent yet: an HTTP status


def test_unhealthy_rank_gets_503_with_reason(folder: Path, rank: FakeRank) -> None:
    with serve_api(folder, [rank], no_rank_timeout_s=0.2) as api:
        rank.healthy = False
        api.wait_for(lambda: bool(api.backend.problems()))
        assert "told so" in api.http.get("/health").json()["error"]["message"]
        response = api.post("/v1/completions", prompt="Hello")
        assert refused(response, 503, None)["code"] == "not_ready"


def test_small_requests_are_admitted_beside_waiting_large_one(folder: Path, rank: FakeRank) -> None:
    rank.hold_after = 0
    with serve_api(folder, [rank], max_waiting=8) as api:
        large = api.start("/v1/completions", prompt=["a"] * 40, max_tokens=2)
        held = [rank.submits.get(timeout=5) for _ in range(6)]
        sent = [api.start("/v1/completions", prompt="Hello", max_tokens=2) for _ in range(2)]
        received = [rank.submits.get(timeout=5) for _ in sent]
        texts = [
            [api.tokenizer.decode(each.token_ids) for each in some] for some in (held, received)
        ]
        assert texts == [["a"] * 6, ["Hello"] * 2]
        full = api.post("/v1/completions", prompt="Hello")  # the reserved share is used up
        assert refused(full, 429, None)["code"] == "overloaded"
        assert int(full.headers["Retry-After"]) >= 1
        for request in (large, *sent):
            request.cancel()


@pytest.mark.parametrize("hold_after", [0, 2])
def test_request_over_timeout_gets_504(folder: Path, rank: FakeRank, hold_after: int) -> None:
    rank.hold_after = hold_after
    with serve_api(folder, [rank], HttpConfig(request_timeout_s=0.5)) as api:
        response = api.post("/v1/completions", prompt="Hello", max_tokens=5)
        assert refused(response, 504, None)["code"] == "timeout"
        assert rank.cancels.get(timeout=5) == 1


def test_key_is_required_where_keys_are_configured(folder: Path, rank: FakeRank) -> None:
    with serve_api(folder, [rank], HttpConfig(api_keys=["k1", "k2"])) as api:
        with pytest.raises(openai.AuthenticationError):
            api.openai.completions.create(model=MODEL, prompt="Hello")
        with pytest.raises(openai.AuthenticationError):
            api.openai.models.list()
        known = api.openai.with_options(api_key="k2")
        assert known.completions.create(model=MODEL, prompt="Hello").choices
        assert api.http.get("/health").status_code == 200


LS, BE = Priority.LS, Priority.BE


def test_key_sets_priority_and_tenant_and_request_may_override(
    folder: Path, rank: FakeRank
) -> None:
    keys: list[str | ApiKey] = [
        "plain",
        ApiKey("batch", priority="be", tenant="reports"),
        ApiKey("batch-2", priority="be", tenant="reports"),
    ]

    with serve_api(folder, [rank], HttpConfig(api_keys=keys)) as api:

        def submitted(key: str, path: str = "/v1/completions", **fields: Any) -> Submit:
            body = (
                {"model": MODEL, "prompt": "Hello"} if path.endswith("ions") else {"model": MODEL}
            )
            headers = {"Authorization": f"Bearer {key}"}
            assert api.http.post(path, json=body | fields, headers=headers).status_code == 200
            return rank.submits.get(timeout=5)

        plain, batch, other = submitted("plain"), submitted("batch"), submitted("batch-2")
        assert [each.priority for each in (plain, batch, other)] == [LS, BE, BE]
        assert batch.caller.tenant == other.caller.tenant != plain.caller.tenant
        assert batch.caller.salt != other.caller.salt, "prefixes are not shared"
        assert submitted("batch", priority="ls").priority is LS
        assert submitted("batch", service_tier="priority").priority is LS
        assert submitted("batch", service_tier="default").priority is BE
        assert submitted("plain", service_tier="flex").priority is BE
        assert submitted("plain", service_tier="flex", priority=0).priority is LS
        score: dict[str, Any] = {"query": [5], "items": [[6]], "label_token_ids": [7]}
        assert submitted("batch", "/v1/score", **score).priority is BE
        assert submitted("plain", "/v1/score", **score, service_tier="flex").priority is BE
        texts: dict[str, Any] = {"input": "x", "labels": ["yes", "no"]}
        assert submitted("batch", "/v1/classify", **texts).priority is BE
        assert 0 <= submitted("plain").waited_s < 5


def test_outcomes_and_tokens_are_counted(api: Api, rank: FakeRank) -> None:
    api.post("/v1/completions", prompt="Hello", priority="be")
    api.post("/v1/completions", prompt="", priority="be")
    api.post("/v1/classify", input="x", labels=["yes", "no"])
    stream = api.post("/v1/completions", prompt="Hello", stream=True)
    assert stream.text.endswith("data: [DONE]\n\n")
    text = api.http.get("/metrics").text
    for line in (
        'tandem_requests_total{class="be",outcome="ok",pipeline="generation"} 1.0',
        'tandem_requests_total{class="ls",outcome="ok",pipeline="generation"} 1.0',
        'tandem_requests_total{class="be",outcome="refused",pipeline="generation"} 1.0',
        'tandem_requests_total{class="ls",outcome="ok",pipeline="prefill"} 1.0',
        'tandem_generated_tokens_total{class="be"} 5.0',
        'tandem_time_to_first_token_seconds_count{class="be",pipeline="generation"} 1.0',
        'tandem_e2e_request_latency_seconds_count{class="ls",pipeline="prefill"} 1.0',
        'tandem_time_per_output_token_seconds_count{class="ls"} 1.0',
        'tandem_requests_waiting{class="ls",pipeline="generation"} 0.0',
    ):
        assert line in text


def test_draining_server_rejects_new_requests_and_completes_open_ones(
    api: Api, rank: FakeRank
) -> None:
    rank.hold_after = 2
    body = {"model": MODEL, "prompt": "Hello", "stream": True, "max_tokens": 5}
    with api.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: it closes with the last reference
        next(lines)
        assert isinstance(api.app, App)
        assert api.loop.run(api.app.drain(0.1)) == 1, "still under way"
        with httpx.Client(base_url=api.url, timeout=TIMEOUT_S) as other:
            assert other.get("/health").status_code == 503
            response = other.post("/v1/completions", json={**body, "stream": False})
            assert refused(response, 503, None, "stopping")["code"] == "not_ready"
            assert other.get("/load", timeout=TIMEOUT_S).json()["server_load"] == 1
        waiting = api.loop.start(api.app.drain(TIMEOUT_S))
    assert waiting.result(TIMEOUT_S) == 0, "drained after the last request"
