"""Key of an exporter with http.keys_file."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from actors.telemetry.exporter import Exporter
from actors.telemetry.scrape_key import SETTLE_S, ScrapeKey
from actors.telemetry.telemetry import Telemetry
from contracts.config import HttpConfig


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["api_keys: [sk-secret]", *lines]))
    return path


def followed(path: Path, time: Time, configured: str | None = None) -> ScrapeKey:
    return ScrapeKey(HttpConfig(keys_file=str(path), metrics_key=configured), time)


@pytest.mark.parametrize(("configured", "needed"), [(None, None), ("configured", "configured")])
def test_configured_key_applies_without_a_key_in_the_file(
    tmp_path: Path, configured: str | None, needed: str | None
) -> None:
    assert ScrapeKey(HttpConfig(metrics_key=configured))() == needed
    assert followed(written(tmp_path / "keys"), Time(), configured)() == needed
    assert followed(tmp_path / "on another machine", Time(), configured)() == needed


def test_key_of_the_file_takes_precedence_and_changes_after_settling(tmp_path: Path) -> None:
    time, path = Time(), written(tmp_path / "keys", "metrics_key: first")
    key = followed(path, time, "configured")
    assert key() == "first"
    written(path, "metrics_key: second")
    assert key() == "first"
    time.now_s += SETTLE_S
    assert key() == "second"


def test_incomplete_file_keeps_the_key(tmp_path: Path) -> None:
    time, path = Time(), written(tmp_path / "keys", "metrics_key: first")
    key = followed(path, time)
    written(path)
    assert key() == "first"
    time.now_s += SETTLE_S / 2
    written(path, "metrics_key: second-one")
    time.now_s += SETTLE_S / 2
    assert key() == "first"
    time.now_s += SETTLE_S
    assert key() == "second-one"


@pytest.mark.parametrize("damage", ["gone", "no keys"])
def test_invalid_file_keeps_the_key(tmp_path: Path, damage: str) -> None:
    time, path = Time(), written(tmp_path / "keys", "metrics_key: first")
    key = followed(path, time)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text("api_keys: []")
    for _ in range(3):
        time.now_s += SETTLE_S
        assert key() == "first"


def test_exporter_requires_the_key_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", "metrics_key: watcher")
    key = ScrapeKey(HttpConfig(keys_file=str(path)))
    exporter = Exporter(Telemetry(), key=key, name="attention-0")
    address = f"http://{exporter.open('127.0.0.1')}"
    try:
        for given, status in ((None, 401), ("sk-secret", 401), ("watcher", 200)):
            headers = {} if given is None else {"Authorization": f"Bearer {given}"}
            assert httpx.get(address, headers=headers, timeout=20.0).status_code == status
    finally:
        exporter.close()
