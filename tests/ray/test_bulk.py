"""The bulk job on a cluster of two nodes while processes and a node are killed."""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from benchmarks.cases.bulk_kills import LABELS, ON_EACH, ROOM, TEMPLATE, serving
from benchmarks.support.bulk_rows import RowsDone, check, write_rows
from cluster.tools.bulk.job import IN_FLIGHT_ROWS
from tests.support.ray_head import ENVIRONMENT, ROOT, RayHead, RayNode, ray_head, ray_node
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROWS = 12_000  # of which 10,000 are left when the second driver starts
DEADLINE_S = 150.0
QUICK = {  # Ray's default is 15 s until it notices lost processes
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster(NamedTuple):
    """url: of the server. nodes: stopped after the server."""

    head: RayHead
    other: RayNode
    url: str
    nodes: contextlib.ExitStack

    def running(self, words: str) -> list[psutil.Process]:
        return [*self.head.running(words), *self.other.running(words)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start two nodes with a prefill worker each that needs no model."""
    options = argparse.Namespace(workers=2, stub=True, dtype="float32")
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(ray_head(resources=ROOM, environment=QUICK))
        other = stack.enter_context(ray_node(head, 2, resources=ROOM))
        with serving(head, options, tmp_path_factory.mktemp("server"), *ON_EACH) as server:
            server.wait_healthy()
            yield Cluster(head, other, server.url, stack)
        assert server.returncode == 0, "it did not end by itself"


def bulk(head: RayHead, *arguments: object, source: Path) -> subprocess.Popen[str]:
    common = ["--address", head.address, "--input", source, "--labels", LABELS]
    common += ["--template", TEMPLATE, "--id-field", "id"]
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", "bulk", *map(str, (*common, *arguments))],
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


def _wait_no_routers(cluster: Cluster) -> None:
    """Wait until the job has no process left."""
    wait_until(lambda: not cluster.running("ray::BulkRouter"), "routers are left", DEADLINE_S)


def wait_line(process: subprocess.Popen[str], words: str) -> str:
    """Return the next line of standard error that contains `words`."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"it ended without: {words}")


def wait_healthy(url: str) -> None:
    def is_healthy() -> bool:
        return httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200

    wait_until(is_healthy, "it is not healthy", DEADLINE_S)


def listens_at(process: psutil.Process) -> set[str]:
    return {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_rows_are_answered_once_while_processes_and_a_node_die(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Kill the router, a worker, the driver and, under its successor, a node."""
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    write_rows(source, ROWS, seed=0, data=None)
    done = RowsDone(output)
    rng = random.Random(0)
    with ended(bulk(cluster.head, "--output", output, "--resume", source=source)) as first:
        wait_rows(done, 500, first)
        rng.choice(cluster.running("ray::BulkRouter")).kill()
        wait_rows(done, 1200, first)
        rng.choice(cluster.running("ray::prefill-")).kill()
        wait_rows(done, 2000, first)
        first.kill()
    before = done.count()
    wait_healthy(cluster.url)
    with ended(
        bulk(cluster.head, "--output", output, "--resume", "--json", source=source)
    ) as second:
        wait_rows(done, before + 1, second)
        lost_routers = 2 + len(cluster.other.running("ray::BulkRouter"))
        cluster.other.kill()
        assert done.count() < ROWS
        assert "127.0.0.2" in wait_line(second, "continues without: prefill-")
        assert httpx.get(f"{cluster.url}/health", timeout=DEADLINE_S).status_code == 503
        third = cluster.nodes.enter_context(ray_node(cluster.head, 3, resources=ROOM))
        output_text, errors = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, errors
    summary = json.loads(output_text)
    assert summary == check(output, ROWS)
    assert summary["rows_in"] == summary["rows_ok"] == ROWS
    assert summary["rows_sent_again"] <= lost_routers * IN_FLIGHT_ROWS
    _wait_no_routers(cluster)
    wait_healthy(cluster.url)
    (worker,) = third.running("ray::prefill-")
    assert "127.0.0.3" in listens_at(worker)
