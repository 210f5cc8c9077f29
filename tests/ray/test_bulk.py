"""The bulk job on a running cluster, with its processes killed under it."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.bulk_kills import LABELS, TEMPLATE, kill, start_server
from benchmarks.bulk_rows import RowsDone, check, write_rows
from benchmarks.ray_head import ENVIRONMENT, ROOT, RayHead, ray_head
from cluster.bulk.driver import IN_FLIGHT_ROWS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROWS = 4000
DEADLINE_S = 150.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """With two prefill workers that need no model."""
    options = argparse.Namespace(workers=2, stub=True, dtype="float32")
    with ray_head() as head:
        server = start_server(head, options, tmp_path_factory.mktemp("server"))
        try:
            yield head
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(DEADLINE_S)
            finally:
                server.kill()


def bulk(head: RayHead, *arguments: object, source: Path) -> subprocess.Popen[str]:
    common = ["--address", head.address, "--input", source, "--labels", LABELS]
    common += ["--template", TEMPLATE, "--id-field", "id"]
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.bulk", *map(str, (*common, *arguments))],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)


def wait_rows(done: RowsDone, rows: int, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while done.count() < rows:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_rows_are_answered_once_each_whoever_is_killed(cluster: RayHead, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    write_rows(source, ROWS, seed=0, data=None)
    done = RowsDone(output)
    rng = random.Random(0)
    with ended(bulk(cluster, "--output", output, "--resume", source=source)) as first:
        wait_rows(done, 500, first)
        assert kill(cluster, "router", rng)
        wait_rows(done, 1200, first)
        assert kill(cluster, "worker", rng)
        wait_rows(done, 2000, first)
        first.kill()
    before = done.count()
    assert before < ROWS
    with ended(bulk(cluster, "--output", output, "--resume", "--json", source=source)) as second:
        said, errors = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, errors
    summary = json.loads(said)
    assert summary == check(output, ROWS)
    assert summary["rows_in"] == summary["rows_ok"] == ROWS
    assert summary["rows_sent_again"] <= 2 * IN_FLIGHT_ROWS
    _wait_no_routers(cluster)


def _wait_no_routers(head: RayHead) -> None:
    """A job leaves no process behind."""
    end_s = time.monotonic() + DEADLINE_S
    while left := head.running("ray::BulkRouter"):
        assert time.monotonic() < end_s, left
        psutil.wait_procs(left, timeout=0.2)
