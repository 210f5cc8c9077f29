"""API keys that change while the server runs."""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from actors.telemetry.telemetry import Telemetry
from cluster.http.authenticator import ApiKeyReloader, Authenticator, KeyQuota, RateLimitError
from contracts.api_keys import MAX_KEYS_FILE_BYTES, ApiKey, read_keys
from contracts.config import HttpConfig, TandemConfig
from contracts.errors import ConfigError, UnauthorizedError
from contracts.loading import load_config
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, serve_api
from tests.support.fake_rank import FakeRank

SECRET = "sk-very-secret"


def request_with_key(key: str) -> Request:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    return Request({"type": "http", "headers": headers})


def is_let_in(authenticator: Authenticator, key: str) -> bool:
    try:
        return authenticator.check(request_with_key(key)).api_key.key == key
    except UnauthorizedError:
        return False


class Followed:
    """A reloader with its callers and counters."""

    def __init__(self, path: Path, metrics_key: str | None = None) -> None:
        http = HttpConfig(keys_file=str(path), metrics_key=metrics_key)
        self.authenticator = Authenticator(http)
        self.telemetry = Telemetry()
        self.reloader = ApiKeyReloader(http, self.authenticator, self.telemetry)
        asyncio.run(self.reloader.load())

    def poll(self, times: int = 2) -> None:
        for _ in range(times):
            asyncio.run(self.reloader.poll())

    def count(self, outcome: str) -> float:
        wanted = f'tandem_api_key_reloads_total{{outcome="{outcome}"}} '
        lines = self.telemetry.exposition().splitlines()
        return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


def mounted(folder: Path, generation: str, text: str) -> Path:
    """Create a file as Kubernetes mounts it: keys.yaml -> ..data/keys.yaml, with ..data a link."""
    (folder / generation).mkdir()
    (folder / generation / "keys.yaml").write_text(text)
    (folder / "..new").symlink_to(generation)
    (folder / "..new").rename(folder / "..data")
    path = folder / "keys.yaml"
    if not path.is_symlink():
        path.symlink_to("..data/keys.yaml")
    return path


def test_swapped_secret_takes_effect_at_second_poll(tmp_path: Path) -> None:
    followed = Followed(mounted(tmp_path, "..one", "api_keys: [old, stays]"))
    assert is_let_in(followed.authenticator, "old")
    mounted(tmp_path, "..two", "api_keys: [stays, {key: new, priority: be}]")
    followed.poll(1)
    assert is_let_in(followed.authenticator, "old"), "the file may be written during a poll"
    followed.poll(1)
    assert [is_let_in(followed.authenticator, key) for key in ("old", "stays", "new")] == [0, 1, 1]
    assert followed.authenticator.clients["new"].api_key.priority == "be"
    assert followed.count("loaded") == 1
    followed.poll(3)
    assert followed.count("loaded") == 1, "unchanged content is not loaded again"


def test_invalid_file_keeps_old_keys_and_is_logged_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [old]")
    followed = Followed(path)
    with caplog.at_level(logging.INFO, "tandem"):
        path.write_text(f"api_keys: [{SECRET}")
        followed.poll(4)
        path.unlink()
        followed.poll(3)
    assert is_let_in(followed.authenticator, "old")
    assert not is_let_in(followed.authenticator, SECRET)
    messages = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in messages] == ["api_keys_rejected", "api_keys_rejected"]
    assert SECRET not in "".join(messages)
    assert "the old keys stay" in messages[0]
    assert followed.count("rejected") == 2
    path.write_text("api_keys: [old]")
    followed.poll()
    assert followed.reloader.problem == ""
    assert followed.count("loaded") == 1


def test_unchanged_key_keeps_quota_state(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [{key: a, concurrency: 1}, {key: b, concurrency: 1}]")
    followed = Followed(path)
    before = {key: followed.authenticator.clients[key].quota for key in "ab"}
    path.write_text("api_keys: [{key: a, concurrency: 1}, {key: b, concurrency: 2}]")
    followed.poll()
    assert followed.authenticator.clients["a"].quota is before["a"]
    assert followed.authenticator.clients["b"].quota is not before["b"]


def test_metrics_key_of_file_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [a]")
    followed = Followed(path, metrics_key="configured")
    followed.authenticator.check_metrics(request_with_key("configured"))
    path.write_text("{api_keys: [a], metrics_key: filed}")
    followed.poll()
    followed.authenticator.check_metrics(request_with_key("filed"))
    with pytest.raises(UnauthorizedError):
        followed.authenticator.check_metrics(request_with_key("configured"))


def test_requests_are_rejected_before_file_is_read() -> None:
    authenticator = Authenticator(HttpConfig(keys_file="keys.yaml"))
    with pytest.raises(UnauthorizedError):
        authenticator.check(request_with_key(""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expected `object`, got `null`"),
        ("api_keys: []", "api_keys is empty"),
        (f"api_keys: {{{SECRET}: ls}}", "Expected `array`, got `object`"),
        (f"api_keys: [{{{SECRET}: be}}]", "an unknown field at api_keys[0]; known: key, priority"),
        (f"{SECRET}: 1", "an unknown field at the whole; known: api_keys, metrics_key"),
        (f"api_keys: ['{SECRET}", "not valid YAML at line 1"),
        (f"api_keys: [{SECRET}, {SECRET}]", "api_keys[1] is the same as api_keys[0]"),
        (f"api_keys: ['{SECRET} x']", "api_keys[0]: character 15 of 16"),
        (f"api_keys: [{{key: {SECRET}, priority: {SECRET}}}]", "Invalid enum value"),
        (f"api_keys: [!!python/object:{SECRET} x]", "not valid YAML at line 1"),
        ("[" * 5000, "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_invalid_file_error_does_not_quote_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert expected in caught.value.message
    assert SECRET not in caught.value.message
    assert "\n" not in caught.value.message


def test_special_or_large_keys_file_is_rejected(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"#" * (MAX_KEYS_FILE_BYTES + 1))
    expected_errors = {pipe: "is not a file", tmp_path: "Is a directory", large: "has more than"}
    for path, expected in expected_errors.items():
        with pytest.raises(ConfigError, match=expected):
            read_keys(path)


def test_keys_in_configuration_and_file_are_rejected() -> None:
    with pytest.raises(ConfigError, match="api_keys and keys_file=k: give one of them"):
        load_config(overrides=["http.api_keys=[a]", "http.keys_file=k"])
    assert load_config(overrides=["http.keys_file=k"]).http.has_keys
    assert not TandemConfig().http.has_keys
    assert HttpConfig(api_keys=["a"]).clients == [ApiKey("a")]


KEYS: list[str | ApiKey] = [
    "free",
    ApiKey("rare", requests_per_s=0.01),
    ApiKey("frugal", tokens_per_s=0.2),
    ApiKey("single", concurrency=1),
    ApiKey("patient", priority="be", fixed_priority=True),
]


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serve_api(folder, None, HttpConfig(api_keys=KEYS)) as api:
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


def test_concurrency_limit_counts_waiting_and_disconnected_requests(folder: Path) -> None:
    rank = FakeRank()
    rank.hold_after = 0
    with serve_api(folder, [rank], HttpConfig(api_keys=KEYS)) as api:
        headers = {"Authorization": "Bearer single"}
        waiting = api.start("/v1/completions", headers, prompt="a", max_tokens=9)
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


def test_key_with_fixed_priority_rejects_others(api: Api) -> None:
    api.received()
    for fields in ({}, {"priority": "be"}, {"priority": 3}, {"service_tier": "flex"}):
        assert send(api, "patient", **fields).status_code == 200
        assert [submit.priority.label for submit in api.received()] == ["be"]
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
