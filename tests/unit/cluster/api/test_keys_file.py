"""Keys that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from starlette.requests import Request

from actors.telemetry.telemetry import Telemetry
from cluster.api.callers import Callers
from cluster.api.keys_follower import KeysFollower
from contracts.api_keys import ApiKey
from contracts.config import HttpConfig, TandemConfig
from contracts.errors import ConfigError, UnauthorizedError
from contracts.keys_file import MAX_KEYS_FILE_BYTES, read_keys
from contracts.loading import load_config

SECRET = "sk-very-secret"


def asking(key: str) -> Request:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    return Request({"type": "http", "headers": headers})


def is_let_in(callers: Callers, key: str) -> bool:
    try:
        return callers.check(asking(key)) == key
    except UnauthorizedError:
        return False


class Followed:
    """Callers that follow a file, with what was counted."""

    def __init__(self, path: Path, metrics_key: str | None = None) -> None:
        http = HttpConfig(keys_file=str(path), metrics_key=metrics_key)
        self.callers = Callers([], needs_keys=True)
        self.telemetry = Telemetry()
        self.follower = KeysFollower(http, self.callers, self.telemetry)
        asyncio.run(self.follower.begin())

    def look(self, times: int = 2) -> None:
        for _ in range(times):
            asyncio.run(self.follower.look())

    def count(self, outcome: str) -> float:
        wanted = f'tandem_keys_read_total{{outcome="{outcome}"}} '
        lines = self.telemetry.exposition().splitlines()
        return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


def mounted(folder: Path, generation: str, text: str) -> Path:
    """A file as Kubernetes mounts it: keys.yaml -> ..data/keys.yaml, ..data -> a folder, and that
    link is the one that is swapped."""
    (folder / generation).mkdir()
    (folder / generation / "keys.yaml").write_text(text)
    (folder / "..new").symlink_to(generation)
    (folder / "..new").rename(folder / "..data")
    path = folder / "keys.yaml"
    if not path.is_symlink():
        path.symlink_to("..data/keys.yaml")
    return path


def test_a_secret_that_is_swapped_under_its_mount_counts_at_the_second_look(
    tmp_path: Path,
) -> None:
    followed = Followed(mounted(tmp_path, "..one", "api_keys: [old, stays]"))
    assert is_let_in(followed.callers, "old")
    mounted(tmp_path, "..two", "api_keys: [stays, {key: new, priority: be}]")
    followed.look(1)
    assert is_let_in(followed.callers, "old"), "it may be written in the middle of a look"
    followed.look(1)
    assert [is_let_in(followed.callers, key) for key in ("old", "stays", "new")] == [0, 1, 1]
    assert followed.callers.priority("new").label == "be"
    assert followed.count("taken") == 1
    followed.look(3)
    assert followed.count("taken") == 1, "what has not changed is not taken again"


def test_a_broken_file_keeps_the_old_keys_and_is_told_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [old]")
    followed = Followed(path)
    with caplog.at_level(logging.INFO, "tandem"):
        path.write_text(f"api_keys: [{SECRET}")
        followed.look(4)
        path.unlink()
        followed.look(3)
    assert is_let_in(followed.callers, "old")
    assert not is_let_in(followed.callers, SECRET)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in said] == ["keys_refused", "keys_refused"]
    assert SECRET not in "".join(said)
    assert "the old keys stay" in said[0]
    assert followed.count("refused") == 2
    path.write_text("api_keys: [old]")
    followed.look()
    assert followed.follower.problem == ""
    assert followed.count("taken") == 1


def test_a_key_that_stays_as_it_was_keeps_what_it_has_used(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [{key: a, concurrency: 1}, {key: b, concurrency: 1}]")
    followed = Followed(path)
    before = {key: followed.callers.allowance(key) for key in "ab"}
    path.write_text("api_keys: [{key: a, concurrency: 1}, {key: b, concurrency: 2}]")
    followed.look()
    assert followed.callers.allowance("a") is before["a"]
    assert followed.callers.allowance("b") is not before["b"]


def test_the_files_metrics_key_goes_before_the_configured_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [a]")
    followed = Followed(path, metrics_key="configured")
    followed.callers.check_metrics(asking("configured"))
    path.write_text("{api_keys: [a], metrics_key: filed}")
    followed.look()
    followed.callers.check_metrics(asking("filed"))
    with pytest.raises(UnauthorizedError):
        followed.callers.check_metrics(asking("configured"))


def test_nobody_is_let_in_before_the_file_has_been_read() -> None:
    callers = Callers([], needs_keys=True)
    with pytest.raises(UnauthorizedError):
        callers.check(asking(""))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expected `object`, got `null`"),
        ("api_keys: []", "api_keys is empty"),
        (f"api_keys: {{{SECRET}: ls}}", "Expected `array`, got `object`"),
        (f"api_keys: [{{{SECRET}: be}}]", "an unknown field at api_keys[0]; known: key, priority"),
        (f"{SECRET}: 1", "an unknown field at the whole; known: api_keys, metrics_key"),
        (f"api_keys: ['{SECRET}", "no YAML at line 1"),
        (f"api_keys: [{SECRET}, {SECRET}]", "api_keys[1] is the same as api_keys[0]"),
        (f"api_keys: ['{SECRET} x']", "api_keys[0]: character 15 of 16"),
        (f"api_keys: [{{key: {SECRET}, priority: {SECRET}}}]", "Invalid enum value"),
        (f"api_keys: [!!python/object:{SECRET} x]", "no YAML at line 1"),
        ("[" * 5000, "no YAML"),
        ("\x00", "no YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_without_a_word_of_it(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert told in caught.value.message
    assert SECRET not in caught.value.message
    assert "\n" not in caught.value.message


def test_what_is_no_file_or_too_large_is_not_waited_for(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"#" * (MAX_KEYS_FILE_BYTES + 1))
    told_of = {pipe: "is no file", tmp_path: "Is a directory", large: "has more than"}
    for path, told in told_of.items():
        with pytest.raises(ConfigError, match=told):
            read_keys(path)


def test_keys_stand_in_the_configuration_or_in_the_file() -> None:
    with pytest.raises(ConfigError, match="api_keys and keys_file=k: give one of them"):
        load_config(overrides=["http.api_keys=[a]", "http.keys_file=k"])
    assert load_config(overrides=["http.keys_file=k"]).http.has_keys
    assert not TandemConfig().http.has_keys
    assert HttpConfig(api_keys=["a"]).clients == [ApiKey("a")]
