"""The `tandem` command on a Ray cluster that was there before it, and stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.ray

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in taken]


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, psutil.Process]]:
    """(address, the process of `ray start --block`)."""
    port, client, agent, metrics = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        head = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "ray"),
                "start",
                "--head",
                "--block",
                "--node-ip-address=127.0.0.1",
                f"--port={port}",
                f"--ray-client-server-port={client}",
                f"--dashboard-agent-listen-port={agent}",
                f"--metrics-export-port={metrics}",
                "--include-dashboard=false",
                "--num-cpus=4",
                "--object-store-memory=100000000",
                f"--temp-dir={temp}",
            ],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        process = psutil.Process(head.pid)
        try:
            assert head.stdout is not None
            for line in head.stdout:
                if "--block" in line:  # "... this command will now block forever"
                    break
            assert head.poll() is None, "ray start failed"
            yield f"127.0.0.1:{port}", process
        finally:
            started = process.children(recursive=True)
            for child in started:  # `ray stop` would end other people's clusters too
                child.kill()
            head.kill()
            head.wait(DEADLINE_S)
            psutil.wait_procs(started, timeout=10.0)
            head.stdout.close()  # type: ignore[union-attr]


def ranks_of(head: psutil.Process) -> list[str]:
    """Command lines of the actors of ours that run on the cluster."""
    return [
        line
        for line in _command_lines(head)
        if "WorkerShell" in line or "Groups" in line or "Ingress" in line
    ]


def _command_lines(head: psutil.Process) -> list[str]:
    lines = []
    for process in head.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


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


def wait_until_none(head: psutil.Process) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while left := ranks_of(head):
        assert time.monotonic() < end_s, f"left running: {left}"


def test_serve_joins_a_cluster_by_its_address_and_leaves_it_as_it_was(
    cluster: tuple[str, psutil.Process],
) -> None:
    address, head = cluster
    (port,) = free_ports(1)
    with tandem(address, "--port", str(port), "--set", "kv.pool_tokens=4096") as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready in ")
        url = f"http://127.0.0.1:{port}"
        body = {"model": "bundled", "prompt": "The", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
        assert len(ranks_of(head)) >= 4, "two ranks, Groups and Ingress"
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=DEADLINE_S)
        assert server.returncode == 0, err
        assert out.endswith("stopping\n")
        assert "Traceback" not in err
    wait_until_none(head)
    assert not can_connect(port)
    assert can_connect(int(address.rpartition(":")[2])), "the cluster stays"


def test_what_only_the_cluster_can_refuse_is_one_line_and_leaves_nothing(
    cluster: tuple[str, psutil.Process],
) -> None:
    address, head = cluster
    (port,) = free_ports(1)
    with tandem(address, "--port", str(port), "--set", "groups.placement=spread") as server:
        out, err = server.communicate(timeout=DEADLINE_S)
        assert server.returncode == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("tandem serve: ")
    for part in ("groups.placement=spread", "at least 2 nodes", "has 1"):
        assert part in err
    wait_until_none(head)
