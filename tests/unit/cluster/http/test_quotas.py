"""Quotas of API keys over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.http.authenticator import KeyQuota, RateLimitError
from contracts.api_keys import ApiKey
from contracts.config import HttpConfig
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


KEYS: list[str | ApiKey] = [
    "free",
    ApiKey("rare", requests_per_s=0.01),
    ApiKey("frugal", tokens_per_s=0.2),
    ApiKey("single", concurrency=1),
    ApiKey("patient", priority="be", fixed_priority=True),
]


@pytest.fixture(scope="module")
def rank() -> FakeRank:
    return FakeRank("attention-0", lambda submit: [60, 61])


@pytest.fixture(scope="module")
def api(folder: Path, rank: FakeRank) -> Iterator[Api]:
    with serve_api(folder, [rank], HttpConfig(api_keys=KEYS)) as api:
        yield api


def send(api: Api, key: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 2} | fields
    return api.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_key_above_request_rate_gets_retry_after_and_other_keys_are_admitted(api: Api) -> None:
    first, second = send(api, "rare"), send(api, "rare")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert second.status_code == 429
    error = second.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "requests_per_s: 0.01" in error["message"]
    assert "rare" not in error["message"]
    assert 90 <= int(second.headers["retry-after"]) <= 100
    assert send(api, "free").status_code == 200
    assert "x-ratelimit-limit-requests" not in send(api, "free").headers


def test_token_quota_overdraft_must_be_refilled(api: Api) -> None:
    first = send(api, "frugal")
    assert first.status_code == 200
    used = first.json()["usage"]["total_tokens"]
    assert used > 2  # more than ten seconds refill
    refused = send(api, "frugal")
    assert refused.status_code == 429
    assert "tokens_per_s: 0.2" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) <= -(-(used - 1) // 0.2)


def test_streamed_response_has_rate_limit_headers(api: Api) -> None:
    streamed = send(api, "single", stream=True)
    assert streamed.status_code == 200
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert send(api, "single").status_code == 200  # the stream has ended


def test_concurrency_limit_counts_waiting_and_disconnected_requests(folder: Path) -> None:
    rank = FakeRank("attention-0", lambda submit: [60, 61])
    rank.hold_after = 0
    with serve_api(folder, [rank], HttpConfig(api_keys=KEYS)) as api:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 9}
        headers = {"Authorization": "Bearer single"}
        request = api.http.build_request("POST", "/v1/completions", json=body, headers=headers)
        waiting = api.loop.start(api.send(request))
        rank.submits.get(timeout=TIMEOUT_S)
        refused = send(api, "single")
        assert refused.status_code == 429
        assert "concurrency: 1" in refused.json()["error"]["message"]
        waiting.cancel()
        rank.cancels.get(timeout=TIMEOUT_S)
        rank.hold_after = None
        assert send(api, "single").status_code == 200


def test_rejected_requests_release_concurrency(api: Api) -> None:
    for _ in range(3):
        assert send(api, "single", n=-1).status_code == 400
        assert send(api, "single", model="other").status_code == 404
    assert send(api, "single").status_code == 200


def test_key_with_fixed_priority_rejects_others(api: Api, rank: FakeRank) -> None:
    while not rank.submits.empty():
        rank.submits.get()
    for fields in ({}, {"priority": "be"}, {"priority": 3}, {"service_tier": "flex"}):
        assert send(api, "patient", **fields).status_code == 200
        assert rank.submits.get(timeout=TIMEOUT_S).priority.label == "be"
    for fields in ({"priority": "ls"}, {"priority": 0}, {"service_tier": "priority"}):
        refused = send(api, "patient", **fields)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert (error["code"], error["type"], error["param"]) == (
            "permission_denied",
            "permission_error",
            "priority",
        )


def test_quota_counts_only_admitted_requests() -> None:
    now_s = 0.0
    quota = KeyQuota(ApiKey("k", concurrency=2, requests_per_s=1.0), lambda: now_s)
    quota.acquire()
    quota.acquire()
    for _ in range(20):
        with pytest.raises(RateLimitError, match="concurrency"):
            quota.acquire()
    quota.release()
    for _ in range(8):  # a burst of ten
        quota.acquire()
        quota.release()
    with pytest.raises(RateLimitError, match="requests_per_s") as refused:
        quota.acquire()
    assert refused.value.retry_after_s == pytest.approx(1.0)
    now_s = 1.0
    quota.acquire()
    assert quota.open == 2


def test_priority_not_fixed_by_key_may_be_chosen_concurrently(api: Api) -> None:
    async def both() -> list[int]:
        async with httpx.AsyncClient(base_url=api.url, timeout=TIMEOUT_S) as client:
            answers = await asyncio.gather(
                *(
                    client.post(
                        "/v1/completions",
                        json={"model": MODEL, "prompt": "a", "max_tokens": 1, "priority": label},
                        headers={"Authorization": "Bearer free"},
                    )
                    for label in ("ls", "be")
                )
            )
        return [answer.status_code for answer in answers]

    assert asyncio.run(both()) == [200, 200]
