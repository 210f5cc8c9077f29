"""API keys that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from starlette.requests import Request

from actors.telemetry.telemetry import Telemetry
from cluster.http.authenticator import ApiKeyReloader, Authenticator
from contracts.api_keys import ApiKey
from contracts.config import HttpConfig, TandemConfig
from contracts.errors import ConfigError, UnauthorizedError
from contracts.keys_file import MAX_KEYS_FILE_BYTES, read_keys
from contracts.loading import load_config

SECRET = "sk-very-secret"


def request_with_key(key: str) -> Request:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    return Request({"type": "http", "headers": headers})


def is_let_in(authenticator: Authenticator, key: str) -> bool:
    try:
        return authenticator.check(request_with_key(key)) == key
    except UnauthorizedError:
        return False


class Followed:
    """A reloader with its callers and counters."""

    def __init__(self, path: Path, metrics_key: str | None = None) -> None:
        http = HttpConfig(keys_file=str(path), metrics_key=metrics_key)
        self.authenticator = Authenticator([], needs_keys=True)
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
    assert followed.authenticator.priority("new").label == "be"
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
    before = {key: followed.authenticator.quota(key) for key in "ab"}
    path.write_text("api_keys: [{key: a, concurrency: 1}, {key: b, concurrency: 2}]")
    followed.poll()
    assert followed.authenticator.quota("a") is before["a"]
    assert followed.authenticator.quota("b") is not before["b"]


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
    authenticator = Authenticator([], needs_keys=True)
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
