"""`tandem doctor --url`: each finding by its cause."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from actors.telemetry.exporter import Exporter
from actors.telemetry.telemetry import Telemetry
from cluster.cli.main import main
from cluster.fleet import targets_file
from cluster.fleet.targets_file import targets_path
from cluster.http.response_types import PipelineLoad, Status
from cluster.http.server import free_port
from cluster.tools.doctor import server_checks
from cluster.tools.doctor.findings import Finding, check_keys
from cluster.tools.doctor.server_checks import (
    MetricSamples,
    ServerSnapshot,
    check_exporters,
    findings_of,
)
from contracts import metrics
from contracts.import_path import version
from contracts.loading import load_config
from contracts.ranks import RankStatus
from tests.support.api_harness import serve_api
from tests.support.tiny_tokenizer import write_byte_level

Capture = pytest.CaptureFixture[str]


def rank(name: str, uptime_s: float = 60.0, **changes: Any) -> RankStatus:
    sections = {"stage_s": {"attention": 10.0}}
    fields: dict[str, Any] = {"name": name, "healthy": True, "epoch": 1, "uptime_s": uptime_s}
    return RankStatus(**(fields | {"sections": sections} | changes))


def status(*ranks: RankStatus, waiting: int = 0, **changes: Any) -> Status:
    load = PipelineLoad(requests=0, waiting={"ls": waiting, "be": 0})
    fields: dict[str, Any] = {"model": "tiny", "version": version(), "problems": []}
    fields |= {"pipelines": {"generation": load}, "ranks": list(ranks)}
    return Status(**(fields | changes))


def seen(before: Status, now: Status, **changes: Any) -> ServerSnapshot:
    scraped: MetricSamples = {
        ("tandem_rank_busy_fraction", (("rank", one.name),)): 0 for one in now.ranks
    }
    found = ServerSnapshot(before, now, scraped)
    more = changes.pop("more", {})
    return found._replace(**changes)._replace(
        scraped=None if "scraped" in changes else scraped | more
    )


def well(**changes: Any) -> ServerSnapshot:
    before = status(rank("attention-0"), rank("expert-0"))
    now = status(rank("attention-0", 62.0), rank("expert-0", 62.0))
    return seen(before, now, **changes)


def of(check: str, found: ServerSnapshot) -> Finding:
    (finding,) = (one for one in findings_of(found) if one.check == check)
    return finding


def level_of(check: str, found: ServerSnapshot) -> str:
    finding = of(check, found)
    assert (finding.level == "ok") == (finding.advice == ""), finding
    return finding.level


def test_healthy_server_has_only_ok_findings() -> None:
    assert {one.level for one in findings_of(well())} == {"ok"}
    assert len(findings_of(well())) == 7


def changed(**changes: Any) -> ServerSnapshot:
    """Return `well` with another state of attention-0."""
    before = status(rank("attention-0"), rank("expert-0"))
    now = rank("attention-0", **({"uptime_s": 62.0} | changes))
    return seen(before, status(now, rank("expert-0", 62.0)))


def test_lost_rank_is_an_error_and_restarted_rank_a_warning() -> None:
    lost = changed(healthy=False, reason="no heartbeat")
    assert level_of("ranks", lost) == "error"
    assert "attention-0: no heartbeat" in of("ranks", lost).found
    assert level_of("ranks", changed(uptime_s=1.0)) == "warning"


def test_saturated_rank_is_a_warning_while_requests_wait() -> None:
    before = status(rank("attention-0"))
    at_work = rank("attention-0", 62.0, sections={"stage_s": {"attention": 12.0}})
    assert level_of("load", seen(before, status(at_work))) == "ok"
    waited_for = seen(before, status(at_work, waiting=4))
    assert level_of("load", waited_for) == "warning"
    assert "attention-0 100%" in of("load", waited_for).found


def test_lost_or_inaccurate_planner_is_a_warning() -> None:
    assert level_of("planner", changed(notes={"planner": "lost"})) == "warning"
    for predicted_s, level in ((0.011, "ok"), (0.02, "warning"), (0.004, "warning")):
        more = {("tandem_plan_predicted_seconds", ()): predicted_s}
        more[("tandem_plan_measured_seconds", ())] = 0.01
        assert level_of("planner", well(more=more)) == level


def test_missing_series_and_refused_keys_are_reported() -> None:
    assert level_of("metrics", well(scraped=None, not_scraped="/metrics answered 500")) == "error"
    silent = status(rank("attention-0", 62.0), rank("expert-9", 62.0))
    found = well()
    assert level_of("metrics", found._replace(status=silent)) == "warning"
    refused = {("tandem_api_key_reloads_total", (("outcome", "rejected"),)): 1.0}
    assert level_of("keys", well(more=refused)) == "warning"


def test_live_server_is_checked_with_its_keys_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(server_checks, "SAMPLE_INTERVAL_S", 0.0)
    keys = tmp_path / "keys.yaml"
    keys.write_text("api_keys: [sk-secret]")
    keys.chmod(0o644)

    async def fetch_status() -> list[RankStatus]:
        return [rank("attention-0")]

    with serve_api(write_byte_level(tmp_path), fetch_status=fetch_status) as api:
        settings = [f"http.keys_file={keys}", f"metrics.targets={tmp_path}"]
        arguments = ["doctor", "--url", api.url, "--set", settings[0], "--set", settings[1]]
        assert main([*arguments, "--json"]) == 0
        found = {one["check"]: one["level"] for one in json.loads(capsys.readouterr().out)[:-1]}
        assert main(arguments) == 0
    out = capsys.readouterr().out
    assert found == dict.fromkeys(found, "ok") | {"metrics": "warning"}
    assert "mode 0644" in out
    assert "sk-secret" not in out


def test_unreachable_server_is_one_finding_and_exit_status_2(capsys: Capture) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["check"], finding["level"]) == ("reached", "error")


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
    monkeypatch.setattr(targets_file, "DEFAULT_FOLDER", str(tmp_path))
    assert targets_path(load_config(None, [])) is None
    path = listed(tmp_path)
    assert targets_path(load_config(None, [])) == path
    assert targets_path(load_config(None, ["serve.name=other"])) is None
    folder = f"metrics.targets={tmp_path / 'ours'}"
    assert targets_path(load_config(None, [folder])) is None
    assert check_exporters(None, ["attention-0"], KEY).level == "ok"


def test_metrics_key_from_file_warns_about_other_machines(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"api_keys: [sk-secret]\nmetrics_key: {KEY}\n")
    keys.chmod(0o600)
    file = f"http.keys_file={keys}"
    finding = check_keys(load_config(None, [file]))
    reasons = "exporters on machines without this file are open"
    assert (finding.level, reasons in finding.found) == ("ok", True)
    for settings in ([f"http.metrics_key={KEY}"], ["metrics.exporters=false"]):
        assert reasons not in check_keys(load_config(None, [file, *settings])).found
