"""A Ray cluster as an operator starts it, and its processes and nodes to be killed."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import create_server
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
    "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "XDG_STATE_HOME": f"{tempfile.gettempdir()}/tandem-state",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}
_END_TIMEOUT_S = 30.0
_ATTEMPTS = 3


class RayHead(NamedTuple):
    """address: of the cluster; dashboard: its URL, for jobs; "" without one."""

    address: str
    dashboard: str
    process: psutil.Process

    def running(self, *words: str) -> list[psutil.Process]:
        """The node's processes with all these words in their command line."""
        return _running(self.process, words)


class RayNode(NamedTuple):
    """A node beside the head, on this machine."""

    started: subprocess.Popen[str]

    def running(self, *words: str) -> list[psutil.Process]:
        """The node's processes with all these words in their command line."""
        return _running(psutil.Process(self.started.pid), words)

    def kill(self) -> None:
        """SIGKILL to all of its processes; does not wait for their end."""
        process = psutil.Process(self.started.pid)
        for one in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.Error):
                one.kill()


@contextmanager
def ray_node(
    head: RayHead, number: int, *, num_cpus: int = 4, resources: Mapping[str, float] | None = None
) -> Iterator[RayNode]:
    """Another node, at 127.0.0.NUMBER, until it is killed."""
    options = {
        "address": head.address,
        "node-ip-address": f"127.0.0.{number}",
        "num-cpus": num_cpus,
        "object-store-memory": 100_000_000,
        "resources": json.dumps(resources or {}),
    }
    node = RayNode(_start(options))
    try:
        yield node
    finally:
        if node.started.poll() is None:
            _end(node.started)


@contextmanager
def ray_head(
    *,
    num_cpus: int = 4,
    dashboard: bool = False,
    resources: Mapping[str, float] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RayHead]:
    """Inside, the cluster runs; its processes, and only those, are gone afterwards."""
    port, dashboard_port, *others = _free_ports(5)
    client_port, agent_port, metrics_port = others
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        options = {
            "node-ip-address": "127.0.0.1",
            "port": port,
            "ray-client-server-port": client_port,
            "dashboard-agent-listen-port": agent_port,
            "metrics-export-port": metrics_port,
            "include-dashboard": str(dashboard).lower(),
            "dashboard-port": dashboard_port,
            "include-log-monitor": "false",
            "num-cpus": num_cpus,
            "object-store-memory": 200_000_000,
            "temp-dir": temp,
            "resources": json.dumps(resources or {}),
        }
        head = _start(options, "--head", "--no-monitor", environment=environment)
        try:
            url = f"http://127.0.0.1:{dashboard_port}" if dashboard else ""
            yield RayHead(f"127.0.0.1:{port}", url, psutil.Process(head.pid))
        finally:
            _end(head)


def _free_ports(count: int) -> list[int]:
    """Different ports: all are bound before any is released."""
    with ExitStack() as bound:
        servers = [bound.enter_context(create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def _running(node: psutil.Process, words: Sequence[str]) -> list[psutil.Process]:
    found = []
    for process in node.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if all(word in line for word in words):
                found.append(process)
    return found


def _start(
    options: Mapping[str, object], *flags: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Once it runs. Tried again: on a busy machine Ray's own start-up deadlines pass."""
    for _ in range(_ATTEMPTS):
        started = _launch(options, *flags, environment=environment)
        output = _output_until_started(started)
        if not output:
            return started
        _end(started)
    raise RuntimeError(f"ray start failed, {_ATTEMPTS} times: {output[-2000:]}")


def _launch(
    options: Mapping[str, object], *flags: str, environment: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(str(BIN / "ray"), "start", "--block", *flags),
            *(f"--{key}={value}" for key, value in options.items()),
        ],
        env={**ENVIRONMENT, **(environment or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _output_until_started(process: subprocess.Popen[str]) -> str:
    """Empty once it runs; all of its output if it ended."""
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if "--block" in line:  # "... this command will now block forever"
            return ""
    return "".join(output) or "it said nothing"


def _end(started: subprocess.Popen[str]) -> None:
    """`ray stop` would end other people's clusters too."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(started.pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        started.kill()
        psutil.wait_procs(children, timeout=_END_TIMEOUT_S)
    started.wait(_END_TIMEOUT_S)
    if started.stdout is not None:
        started.stdout.close()


def check_complete(lines: Iterator[str]) -> None:
    """Check that the rest of an answer extends to its last token."""
    chunks = [line for line in lines if line]
    assert chunks[-1] == "data: [DONE]"
    assert not [chunk for chunk in chunks if '"error"' in chunk]
    events = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
