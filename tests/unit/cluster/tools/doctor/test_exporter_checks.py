"""`tandem doctor --url` scrapes every exporter on Prometheus' list."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from actors.telemetry.exporter import Exporter
from actors.telemetry.telemetry import Telemetry
from cluster.fleet import targets_file
from cluster.fleet.targets_file import targets_path
from cluster.http.server import free_port
from cluster.tools.doctor import server_checks
from cluster.tools.doctor.findings import check_keys
from cluster.tools.doctor.server_checks import check_exporters
from contracts import metrics
from contracts.loading import load_config

KEY = "of-metrics"


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of an exporter with a key."""
    telemetry = Telemetry()
    telemetry.set(metrics.RANK_BUSY, "attention", "attention-0", to=0.5)
    exporter = Exporter(telemetry, key=KEY, name="attention-0")
    yield exporter.open("127.0.0.1")
    exporter.close()


def listed(folder: Path, **addresses: str) -> Path:
    """Write a list of targets by rank."""
    entries = []
    for rank, address in addresses.items():
        parts = urlsplit(f"//{address}")
        labels = {"__metrics_path__": parts.path, "rank": rank.replace("_", "-")}
        entries.append({"targets": [parts.netloc], "labels": labels})
    path = folder / "tandem_service_discovery.json"
    path.write_text(json.dumps(entries))
    return path


def test_listed_exporters_that_answer_are_ok(tmp_path: Path, address: str) -> None:
    path = listed(tmp_path, attention_0=address)
    finding = check_exporters(path, ["attention-0"], KEY)
    assert (finding.level, finding.advice) == ("ok", "")
    assert "1 processes" in finding.found


def test_silent_or_unlisted_exporter_is_named(tmp_path: Path, address: str) -> None:
    unused = f"127.0.0.1:{free_port()}/metrics/of-another"
    path = listed(tmp_path, attention_0=address, expert_0=unused, planner_0=f"{address}-not")
    finding = check_exporters(path, ["attention-0", "expert-0", "prefill-0"], KEY)
    assert finding.level == "warning"
    reasons = finding.found.split("; ")
    assert "expert-0: " in reasons[0]
    assert reasons[1:] == ["planner-0: answers 404", "prefill-0: not on the list"]


def test_wrong_key_advises_api_key(tmp_path: Path, address: str) -> None:
    finding = check_exporters(listed(tmp_path, attention_0=address), [], "another")
    assert finding.found.endswith("attention-0: answers 401")
    assert "--api-key" in finding.advice
    assert KEY not in finding.found


@pytest.mark.parametrize("text", ["", "[", '{"targets": []}', '[{"targets": 1, "labels": {}}]'])
def test_invalid_targets_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x_service_discovery.json"
    path.write_text(text)
    assert check_exporters(path, [], None).level == "error"


def test_targets_file_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = listed(tmp_path, attention_0="127.0.0.1:1/metrics/x")
    if os.geteuid() == 0:
        os.chown(path, 1001, -1)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    finding = check_exporters(path, [], KEY)
    assert finding.level == "error"
    assert f"user {owner}" in finding.found


def test_foreign_or_endless_exporter_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    path = listed(tmp_path, attention_0=address)
    monkeypatch.setattr(server_checks, "MAX_EXPOSITION_BYTES", 1)
    assert "no end" in check_exporters(path, [], KEY).found
    monkeypatch.undo()
    monkeypatch.setattr(server_checks, "_SERIES", b"of_ours_")
    assert "does not answer as Tandem" in check_exporters(path, [], KEY).found


def test_targets_file_is_found_by_application_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets_file, "LOCAL_TARGETS", str(tmp_path / "ours"))
    monkeypatch.setattr(targets_file, "RAY_SESSION", str(tmp_path))
    assert targets_path(load_config(None, [])) is None
    path = listed(tmp_path)
    assert targets_path(load_config(None, [])) == path, "of an existing Ray cluster"
    assert targets_path(load_config(None, ["serve.name=other"])) is None
    folder = f"metrics.targets={tmp_path / 'ours'}"
    assert targets_path(load_config(None, [folder])) is None
    assert check_exporters(None, ["attention-0"], KEY).level == "ok"


def test_metrics_key_from_file_warns_about_other_machines(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"api_keys: [sk-secret]\nmetrics_key: {KEY}\n")
    keys.chmod(0o600)
    file = f"http.keys_file={keys}"
    finding = check_keys(load_config(None, [file]))
    reasons = "exporters on machines without this file are open"
    assert (finding.level, reasons in finding.found) == ("ok", True)
    for settings in ([f"http.metrics_key={KEY}"], ["metrics.exporters=false"]):
        assert reasons not in check_keys(load_config(None, [file, *settings])).found
