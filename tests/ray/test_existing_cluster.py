"""The `tandem` command on an existing Ray cluster, which remains."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from contracts.config import BUNDLED
from tests.support.documented import documented
from tests.support.ray_head import BIN, ENVIRONMENT, ROOT, RayHead, check_complete, ray_head
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

DEADLINE_S = 60.0
DOCUMENTED = "tandem serve --attention-ranks 0"
SHELLS = ("ray::attention-", "ray::expert-", "ray::prefill-", "ray::planner-", "Groups", "Ingress")


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def ranks_of(head: RayHead) -> set[psutil.Process]:
    """Return the processes of Tandem on the cluster."""
    return {one for shell in SHELLS for one in head.running(shell)}


@contextlib.contextmanager
def tandem(
    address: str, *arguments: str, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run the command; it has ended afterwards."""
    process = subprocess.Popen(
        [str(BIN / "tandem"), *arguments],
        env={**ENVIRONMENT, "RAY_ADDRESS": address, **(environment or {})},
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
    wait_until(lambda: not ranks_of(head), "some are left running", DEADLINE_S)


def wait_until_launched(head: RayHead, server: subprocess.Popen[str]) -> None:
    def is_launched() -> bool:
        assert server.poll() is None, server.communicate()
        return bool(head.running("Groups"))

    wait_until(is_launched, "no launcher", DEADLINE_S)


def wait_until_ready(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    line = server.stdout.readline()
    while not line.startswith("ready in "):
        assert line, server.communicate(timeout=DEADLINE_S)
        line = server.stdout.readline()


def refused(server: subprocess.Popen[str]) -> str:
    """Return the one line of a server that does not start."""
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


ENGINE = ("--set", "prefill.engine=tests.support.stub_rank:stub_rank")
STUB = ("--attention-ranks", "0", "--expert-ranks", "0", "--prefill-ranks", "1", *ENGINE)


@pytest.mark.slow
def test_named_servers_share_cluster_and_end_independently(
    ray_cluster: RayHead, tmp_path: Path
) -> None:
    """The first server ends with status 3: a lost rank is not replaced in time."""
    (tmp_path / "models.py").write_text("raise RuntimeError('of the current folder')\n")
    hostile = tmp_path / "cluster"
    hostile.mkdir()
    (hostile / "__init__.py").write_text("raise RuntimeError('of the current folder')\n")
    first, second = free_port(), free_port()
    settings = ("kv.pool_tokens=4096", "groups.recovery_timeout_s=1", "planner.enabled=false")
    command = ("serve", "--port", str(first), *(f"--set={one}" for one in settings))
    with tandem(ray_cluster.address, *command, cwd=tmp_path) as one:
        wait_until_ready(one)
        assert one.stdout is not None
        expert = next(line for line in one.stdout if line.startswith("  expert-0 "))
        assert len(ranks_of(ray_cluster)) >= 4, "two ranks, Groups and Ingress"

        with tandem(ray_cluster.address, "serve", "--port", str(second), *STUB) as second_server:
            line = refused(second_server)
        for part in ("serve.name=tandem", "RUNNING", "--name", "--port", "tandem stop"):
            assert part in line
        assert answers(first), "the first one is untouched"

        (words,) = {c.text for c in documented() if c.text.startswith(DOCUMENTED)}
        other = ("--name", "other", "--port", str(second), *ENGINE)
        with tandem(ray_cluster.address, *words.split()[1:], *other) as two:
            wait_until_ready(two)
            assert answers(first)
            two.kill()  # its application is left
        assert answers(second)
        stop = ("stop", "--name", "other")
        with tandem(ray_cluster.address, *stop, cwd=tmp_path) as stopped:
            out, err = stopped.communicate(timeout=DEADLINE_S)
            assert (stopped.returncode, out) == (0, "other: ended\n"), err
        assert not can_connect(second)
        assert answers(first)

        os.kill(int(expert.split()[-1]), signal.SIGKILL)
        _, err = one.communicate(timeout=2 * DEADLINE_S)
    assert one.returncode == 3
    (line,) = [line for line in err.splitlines() if line.startswith("tandem serve:")]
    assert "the server has failed" in line
    assert "expert-0" in line
    wait_until_none(ray_cluster)
    assert not can_connect(first)
    assert can_connect(int(ray_cluster.address.rpartition(":")[2])), "the cluster stays"


@pytest.mark.slow
def test_ingress_failure_is_one_line_and_leaves_no_process(
    ray_cluster: RayHead, tmp_path: Path
) -> None:
    model = shutil.copytree(resolve_model_folder(BUNDLED), tmp_path / "bundled")
    failing = ("serve", "--port", str(free_port()), *STUB, "--model", str(model))
    with tandem(ray_cluster.address, *failing) as server:
        wait_until_launched(ray_cluster, server)
        (model / "tokenizer.json").unlink()  # after the check, before the ingress reads it
        assert "no tokenizer.json" in refused(server)
    wait_until_none(ray_cluster)


@pytest.mark.slow
def test_sigterm_completes_stream_and_refuses_requests(ray_cluster: RayHead) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": "bundled", "prompt": "The", "max_tokens": 400, "ignore_eos": True}
    pool = ("--set", "kv.pool_tokens=4096")
    with tandem(ray_cluster.address, "serve", "--port", str(port), *pool) as server:
        wait_until_ready(server)
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=DEADLINE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            end_s = time.monotonic() + DEADLINE_S
            while httpx.post(url, json={**body, "max_tokens": 1}).status_code == 200:
                assert time.monotonic() < end_s, "requests are still admitted"
            check_complete(lines)
        out, err = server.communicate(timeout=DEADLINE_S)
        assert (server.returncode, out.endswith("stopping\n")) == (0, True), err
    wait_until_none(ray_cluster)


def test_unplaceable_server_is_one_line_and_leaves_no_process(ray_cluster: RayHead) -> None:
    port = str(free_port())
    spread = ("--set", "groups.placement=spread")
    with tandem(ray_cluster.address, "serve", "--port", port, *spread) as server:
        line = refused(server)
    for part in ("groups.placement=spread", "at least 2 nodes", "has 1"):
        assert part in line
    wait_until_none(ray_cluster)


@pytest.mark.parametrize("stage", ["process", "Groups"])
def test_sigterm_during_start_exits_with_0_or_143_and_leaves_nothing(
    ray_cluster: RayHead, tmp_path: Path, stage: str
) -> None:
    command = ("serve", "--port", str(free_port()), *STUB)
    temporary = {"TMPDIR": str(tmp_path)}
    with tandem(ray_cluster.address, *command, environment=temporary) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("logs in ")
        if stage == "Groups":
            wait_until_launched(ray_cluster, server)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=DEADLINE_S)
    assert server.returncode in (0, 128 + signal.SIGTERM), out + err
    assert not any(word in err for word in ("Traceback", ".cc:", "Stack trace"))
    assert not list(tmp_path.iterdir())
    wait_until_none(ray_cluster)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "bulk"])
def test_lost_gcs_ends_command_with_its_status_and_one_line(command: str, tmp_path: Path) -> None:
    rows, temporary = tmp_path / "rows.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    rows.write_text('{"text": "row"}\n' * 300_000)
    options = ("--input", str(rows), "--output", str(tmp_path / "out"), "--labels", "a,b")
    environment = {"RAY_gcs_rpc_server_reconnect_timeout_s": "20", "TMPDIR": str(temporary)}
    with (
        ray_head() as head,
        tandem(
            head.address,
            *(command, *STUB, *(("--port", str(free_port())) if command == "serve" else ())),
            *(("--model", "bundled", *options) if command == "bulk" else ()),
            environment=environment,
        ) as process,
    ):
        if command == "serve":
            wait_until_ready(process)
        else:
            wait_until(lambda: any(tmp_path.glob("out/journal-*")), "no rows", DEADLINE_S)
        for one in head.running("gcs_server"):
            one.kill()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == (3 if command == "serve" else 2), err
    (line,) = [line for line in err.splitlines() if line.startswith("tandem")]
    assert line.startswith("tandem: the Ray cluster is lost: its GCS at ")
    assert ".h:" not in err
    assert not list(temporary.iterdir())
