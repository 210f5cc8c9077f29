"""A documented server and the requests, run as documented, from an empty folder.

The server starts a local Ray cluster of its own; test_existing_cluster.py runs the other server.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from contracts.config import BUNDLED
from tests.support.documented import Command, documented
from tests.support.ray_head import RayHead

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
BIN = Path(sys.executable).parent
PAGES = ("README.md", "docs/usage.md")
SMALL = "--set kv.pool_tokens=4096"  # other tests run at the same time


def _is_request(command: Command) -> bool:
    return command.text.startswith("curl ") or command.language == "python"


_ON_PAGES = [command for command in documented() if command.document in PAGES]
SERVERS = sorted({c.text for c in _ON_PAGES if re.match(r"tandem serve .*-ranks [1-9]", c.text)})
REQUESTS = list({c.text: c for c in _ON_PAGES if _is_request(c)}.values())
BULK = sorted({c.text for c in _ON_PAGES if c.text.startswith("tandem bulk --model")})


class Server(NamedTuple):
    port: int
    folder: Path


def environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }


def output_of(command: list[str], folder: Path) -> str:
    """Run the command in the folder; return what it prints."""
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def started(text: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command until Ctrl-C. It leaves no process."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {text}"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in children), children
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, output[-9:]) == (0, "stopping\n"), output
            _, alive = psutil.wait_procs(children, timeout=15.0)
            assert not alive
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run the server with attention and expert ranks, which answers the requests of both."""
    (text,) = (text for text in SERVERS if "--model DIR" in text)
    folder, port = tmp_path_factory.mktemp("user"), free_port()
    (folder / "DIR").symlink_to(resolve_model_folder(BUNDLED))
    with started(f"{text} --port {port} {SMALL}", folder) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("ready in ") for line in lines)
        yield Server(port, folder)


@pytest.mark.parametrize(
    "command", [pytest.param(one, id=f"{one.document}:{one.line}") for one in REQUESTS]
)
def test_documented_request_is_answered(server: Server, command: Command) -> None:
    text = command.text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    text = text.replace('"bundled"', '"DIR"')
    shell = [sys.executable, "-c"] if command.language == "python" else ["bash", "-c"]
    output = output_of([*shell, text], server.folder)
    assert output.strip()
    if command.text.startswith("curl "):
        answer = json.loads(output)
        assert "error" not in answer, answer


def test_documented_servers_and_requests_are_found() -> None:
    assert len(SERVERS) == 2, SERVERS
    assert len(REQUESTS) >= 5, REQUESTS


@pytest.mark.parametrize("text", BULK)
def test_documented_bulk_command_classifies_file(
    ray_cluster: RayHead, text: str, tmp_path: Path
) -> None:
    rows = [{"text": text} for text in ("It works well.", "It broke after two days.", "Fine.")]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "reviews.jsonl").write_text(lines, encoding="utf-8")
    place = f"--set groups.address={ray_cluster.address}"
    output_of(["bash", "-c", f"{text} {SMALL} {place}"], tmp_path)
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    answers = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [answer["label"] in ("negative", "positive") for answer in answers] == [True] * 3


@pytest.mark.slow
def test_demo_runs_and_leaves_no_process(tmp_path: Path) -> None:
    output = output_of(["bash", "-c", "tandem demo --trace demo.json"], tmp_path)
    assert "nothing is left running" in output
    assert json.loads((tmp_path / "demo.json").read_text())
