"""Scrape targets of a cluster in the file that Prometheus reads."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cluster.fleet.metrics_endpoint import LEASE_S, RETRY_S, ScrapeTargets, TargetsFile
from cluster.fleet.replies import ScrapeTarget
from contracts.config import TandemConfig
from tests.support.manual_clock import ManualClock


def target(rank: str, port: int = 1, host: str = "127.0.0.1") -> ScrapeTarget:
    address = f"{host}:{port}/metrics/{rank}"
    return ScrapeTarget(address=address, group=rank.partition("-")[0], rank=rank, node="10.0.0.5")


def entries(file: TargetsFile) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.path.read_text())
    return found


def test_entry_has_address_and_labels(tmp_path: Path) -> None:
    file = TargetsFile(tmp_path, "chat")
    file.write([target("expert-1", 7), target("ingress-a", 8, "0.0.0.0"), target("x", 9, "[::1]")])
    assert file.path == tmp_path / "chat_service_discovery.json"
    first, second, third = entries(file)
    assert first == {
        "targets": ["127.0.0.1:7"],
        "labels": {
            "__metrics_path__": "/metrics/expert-1",
            "cluster": "chat",
            "group": "expert",
            "rank": "expert-1",
            "node": "10.0.0.5",
        },
    }
    assert second["targets"] == ["10.0.0.5:8"]
    assert third["targets"] == ["[::1]:9"]
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_second_cluster_of_the_same_name_gets_its_own_file_and_name(tmp_path: Path) -> None:
    one, other = TargetsFile(tmp_path, "tandem"), TargetsFile(tmp_path, "tandem")
    one.write([target("expert-0")])
    other.write([target("expert-0", 2)])
    assert (one.cluster, other.cluster) == ("tandem", "tandem-2")
    names = [e["labels"]["cluster"] for e in (*entries(one), *entries(other))]
    assert names == [one.cluster, other.cluster]
    one.close()
    assert entries(other)[0]["targets"] == ["127.0.0.1:2"]
    third = TargetsFile(tmp_path, "tandem")
    third.write([])
    assert third.cluster == "tandem"
    other.close()
    third.close()


def test_files_of_a_killed_launcher_are_removed_by_the_next_one(tmp_path: Path) -> None:
    for name in ("gone_service_discovery.json", "gone.lock"):
        (tmp_path / name).write_text("[]")
    rays = tmp_path / "prom_metrics_service_discovery.json"
    rays.write_text("[]")
    file = TargetsFile(tmp_path, "tandem")
    file.write([])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {rays.name, "tandem.lock", "tandem_service_discovery.json"}
    file.close()
    assert list(tmp_path.iterdir()) == [rays]


def test_removed_files_are_written_again_and_those_of_others_stay(tmp_path: Path) -> None:
    one, other = TargetsFile(tmp_path, "tandem"), TargetsFile(tmp_path, "tandem")
    one.write([target("expert-0")])
    for path in tmp_path.iterdir():
        path.unlink()
    one.write([target("expert-0")])
    assert entries(one)[0]["labels"]["rank"] == "expert-0"
    for path in tmp_path.iterdir():
        path.unlink()
    other.write([target("expert-1")])
    one.close()
    assert entries(other)[0]["labels"]["rank"] == "expert-1"
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_logged_once_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, folder = ManualClock(), tmp_path / "targets"
    folder.write_text("in the way")
    file = TargetsFile(folder, "tandem", clock)
    with caplog.at_level(logging.WARNING, "tandem.metrics"):
        for _ in range(3):
            file.write([target("expert-0")])
            clock.advance(RETRY_S)
    assert [r.getMessage().split()[0] for r in caplog.records] == ["scrape_targets_write_failed"]
    folder.unlink()
    file.write([target("expert-0")])
    assert len(entries(file)) == 1
    file.close()


def test_foreign_symlink_is_not_followed(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "targets"
    precious.write_text("mine")
    folder.mkdir()
    (folder / "tandem_service_discovery.new").symlink_to(precious)
    (folder / "tandem.lock").symlink_to(precious)
    file = TargetsFile(folder, "tandem")
    file.write([target("expert-0")])
    file.close()
    assert precious.read_text() == "mine"


def test_leased_target_is_listed_until_its_lease_expires(tmp_path: Path) -> None:
    clock = ManualClock()
    file = TargetsFile(tmp_path, "tandem", clock)
    scrape_targets = ScrapeTargets(TandemConfig(), file, clock)
    scrape_targets.lease(target("ingress-a"))
    scrape_targets.update([])
    assert len(entries(file)) == 1
    clock.advance(LEASE_S - 1)
    scrape_targets.lease(target("ingress-a"))
    clock.advance(LEASE_S - 1)
    scrape_targets.update([])
    assert len(entries(file)) == 1
    clock.advance(2)
    scrape_targets.update([])
    assert entries(file) == []
    scrape_targets.close()
