"""The `tandem` command on a Ray cluster that was there before it, and stays."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.support.ray_head import BIN, ENVIRONMENT, ROOT, RayHead, ray_head
from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from contracts.config import BUNDLED

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

DEADLINE_S = 60.0
SHELLS = ("ray::attention-", "ray::expert-", "ray::prefill-", "ray::planner-", "Groups", "Ingress")


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


@contextlib.contextmanager
def tandem(address: str, *arguments: str, cwd: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    """The command, which has ended afterwards."""
    process = subprocess.Popen(
        [str(BIN / "tandem"), *arguments],
        env={**ENVIRONMENT, "RAY_ADDRESS": address},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_none(head: RayHead) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while left := ranks_of(head):
        assert time.monotonic() < end_s, f"left running: {left}"


def wait_until_ready(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    line = server.stdout.readline()
    while not line.startswith("ready in "):
        assert line, server.communicate(timeout=DEADLINE_S)
        line = server.stdout.readline()


def ended(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGTERM)
    out, err = server.communicate(timeout=DEADLINE_S)
    assert server.returncode == 0, err
    assert out.endswith("stopping\n")
    assert "Traceback" not in err


def refused(server: subprocess.Popen[str]) -> str:
    """The one line of a server that does not start."""
    _, err = server.communicate(timeout=DEADLINE_S)
    assert server.returncode == 2, err
    own = [line for line in err.splitlines() if not line.startswith("(")]  # Ray's are of actors
    assert len(own) == 1, err
    assert own[0].startswith("tandem serve: ")
    return own[0]


def answers(port: int) -> bool:
    body = {"model": "bundled", "prompt": "The", "max_tokens": 1}
    url = f"http://127.0.0.1:{port}/v1/completions"
    return httpx.post(url, json=body, timeout=DEADLINE_S).status_code == 200


STUB = (
    *("--attention-ranks", "0", "--expert-ranks", "0", "--prefill-ranks", "1"),
    *("--set", "prefill.engine=tests.support.stub_rank:stub_rank"),
)


def test_servers_of_different_names_share_a_cluster_and_end_only_themselves(
    cluster: RayHead, tmp_path: Path
) -> None:
    """FINDINGS B5: the second one replaced the first without a word, and deleted it on exit.
    FINDINGS B8: modules in the folder that one stands in were imported by the server."""
    (tmp_path / "models.py").write_text("raise RuntimeError('of the folder one stands in')\n")
    hostile = tmp_path / "cluster"
    hostile.mkdir()
    (hostile / "__init__.py").write_text("raise RuntimeError('of the folder one stands in')\n")
    first, second = free_port(), free_port()
    pool = ("--set", "kv.pool_tokens=4096")
    with tandem(cluster.address, "serve", "--port", str(first), *pool, cwd=tmp_path) as one:
        wait_until_ready(one)
        assert len(ranks_of(cluster)) >= 4, "two ranks, Groups and Ingress"

        with tandem(cluster.address, "serve", "--port", str(second), *STUB) as asked:
            line = refused(asked)
        for part in ("serve.name=tandem", "RUNNING", "--name", "--port", "tandem stop"):
            assert part in line
        assert answers(first), "the first one is untouched"

        other = ("serve", "--name", "other", "--port", str(second), *STUB)
        with tandem(cluster.address, *other) as two:
            wait_until_ready(two)
            assert answers(first)
            assert answers(second)
            ended(two)
        assert not can_connect(second)
        assert answers(first)
        one.kill()  # its application is left
        one.wait(DEADLINE_S)
    assert answers(first)
    with tandem(cluster.address, "stop", cwd=tmp_path) as stop:
        out, err = stop.communicate(timeout=DEADLINE_S)
        assert (stop.returncode, out) == (0, "tandem: ended\n"), err
    wait_until_none(cluster)
    assert not can_connect(first)
    assert can_connect(int(cluster.address.rpartition(":")[2])), "the cluster stays"


@pytest.mark.slow
def test_what_an_ingress_alone_finds_out_is_one_line_and_leaves_nothing(
    cluster: RayHead, tmp_path: Path
) -> None:
    """FINDINGS B7: it was told after minutes, below a traceback. By default
    tests/unit/cluster/http/test_server_start.py has what is told."""
    model = shutil.copytree(resolve_model_folder(BUNDLED), tmp_path / "bundled")
    failing = ("serve", "--port", str(free_port()), *STUB, "--model", str(model))
    with tandem(cluster.address, *failing) as server:
        while not cluster.running("Groups"):
            assert server.poll() is None, server.communicate()
        (model / "tokenizer.json").unlink()  # after the check, before the ingress reads it
        assert "no tokenizer.json" in refused(server)
    wait_until_none(cluster)


@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_nobody_else_in(cluster: RayHead) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": "bundled", "prompt": "The", "max_tokens": 400, "ignore_eos": True}
    pool = ("--set", "kv.pool_tokens=4096")
    with tandem(cluster.address, "serve", "--port", str(port), *pool) as server:
        wait_until_ready(server)
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=DEADLINE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            end_s = time.monotonic() + DEADLINE_S
            while httpx.post(url, json={**body, "max_tokens": 1}).status_code == 200:
                assert time.monotonic() < end_s, "it lets others in"
            chunks = [line for line in lines if line]
        assert chunks[-1] == "data: [DONE]"
        assert not any('"error"' in chunk for chunk in chunks)
        told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]
        assert told[-1]["choices"][0]["finish_reason"] == "length", "to its last token"
        out, err = server.communicate(timeout=DEADLINE_S)
        assert (server.returncode, out.endswith("stopping\n")) == (0, True), err
    wait_until_none(cluster)


def test_what_only_the_cluster_can_refuse_is_one_line_and_leaves_nothing(
    cluster: RayHead,
) -> None:
    port = str(free_port())
    spread = ("--set", "groups.placement=spread")
    with tandem(cluster.address, "serve", "--port", port, *spread) as server:
        line = refused(server)
    for part in ("groups.placement=spread", "at least 2 nodes", "has 1"):
        assert part in line
    wait_until_none(cluster)
