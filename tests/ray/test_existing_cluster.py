"""The `tandem` command on a Ray cluster that was there before it, and stays."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from benchmarks.ray_head import ENVIRONMENT, ROOT, RayHead, ray_head
from cluster.front import free_port

pytestmark = pytest.mark.ray

DEADLINE_S = 60.0
SHELLS = ("WorkerShell", "Groups", "Ingress")


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHead]:
    with ray_head() as head:
        yield head


def ranks_of(head: RayHead) -> set[psutil.Process]:
    """The actors of ours that run on the cluster."""
    return {one for shell in SHELLS for one in head.running(shell)}


def tandem(address: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cluster",
            "serve",
            "--set",
            f"groups.address={address}",
            *arguments,
        ],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_none(head: RayHead) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while left := ranks_of(head):
        assert time.monotonic() < end_s, f"left running: {left}"


def test_serve_joins_a_cluster_by_its_address_and_leaves_it_as_it_was(
    cluster: RayHead,
) -> None:
    port = free_port()
    with tandem(cluster.address, "--port", str(port), "--set", "kv.pool_tokens=4096") as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready in ")
        url = f"http://127.0.0.1:{port}"
        body = {"model": "bundled", "prompt": "The", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
        assert len(ranks_of(cluster)) >= 4, "two ranks, Groups and Ingress"
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=DEADLINE_S)
        assert server.returncode == 0, err
        assert out.endswith("stopping\n")
        assert "Traceback" not in err
    wait_until_none(cluster)
    assert not can_connect(port)
    assert can_connect(int(cluster.address.rpartition(":")[2])), "the cluster stays"


def test_what_only_the_cluster_can_refuse_is_one_line_and_leaves_nothing(
    cluster: RayHead,
) -> None:
    port = free_port()
    with tandem(cluster.address, "--port", str(port), "--set", "groups.placement=spread") as server:
        out, err = server.communicate(timeout=DEADLINE_S)
        assert server.returncode == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("tandem serve: ")
    for part in ("groups.placement=spread", "at least 2 nodes", "has 1"):
        assert part in err
    wait_until_none(cluster)
