"""deploy/serve.yaml by `serve run` and by `serve deploy`, and beside it the RayJob's entrypoint by
`ray job submit`: the commands that documents show, on a cluster that was there before."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from benchmarks.ray_head import BIN, ENVIRONMENT, ROOT, RayHead, ray_head
from cluster.serving.front import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHead]:
    with ray_head(dashboard=True) as head:
        yield head


class File:
    """deploy/serve.yaml on a port that is free, with a small KV pool."""

    def __init__(self, folder: Path) -> None:
        told = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
        self.port = told["http_options"]["port"] = free_port()
        told["applications"][0]["args"]["kv"]["pool_tokens"] = 4096
        told["applications"][0]["args"].setdefault("http", {})["drain_s"] = DEADLINE_S
        self.path = folder / "serve.yaml"
        self.path.write_text(yaml.safe_dump(told), encoding="utf-8")

    def without_applications(self) -> Path:
        """The same file, by which `serve deploy` takes all of them away."""
        told = yaml.safe_load(self.path.read_text(encoding="utf-8"))
        path = self.path.with_name("none.yaml")
        path.write_text(yaml.safe_dump({**told, "applications": []}), encoding="utf-8")
        return path

    def wait_healthy(self, process: subprocess.Popen[bytes] | None = None) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not self._is_healthy():
            assert time.monotonic() < end_s
            assert process is None or process.poll() is None
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200
        return False

    def answers(self) -> bool:
        body = {"model": "bundled", "prompt": "The", "max_tokens": 4}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        answer = httpx.post(url, json=body, timeout=DEADLINE_S)
        return answer.status_code == 200 and bool(answer.json()["choices"][0]["text"])


def run(cluster: RayHead, *words: str) -> str:
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        env={**ENVIRONMENT, "RAY_ADDRESS": cluster.address},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def entrypoint(folder: Path) -> str:
    """The RayJob's, with its volume in `folder`, and rows there."""
    job = yaml.safe_load((ROOT / "deploy/kubernetes/bulk_job.yaml").read_text(encoding="utf-8"))
    text: str = job["spec"]["entrypoint"]
    rows = pyarrow.table({"id": [1, 2, 3], "text": ["It works.", "It broke.", "Fine."]})
    (folder / "reviews").mkdir()
    pyarrow.parquet.write_table(rows, folder / "reviews" / "rows.parquet")
    return text.replace("/shared", str(folder))


def test_serve_run_and_the_jobs_entrypoint_beside_it(cluster: RayHead, tmp_path: Path) -> None:
    file = File(tmp_path)
    with subprocess.Popen(
        [str(BIN / "serve"), "run", str(file.path)],
        env={**ENVIRONMENT, "RAY_ADDRESS": cluster.address},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            file.wait_healthy(server)
            assert file.answers()
            words = shlex.split(entrypoint(tmp_path))
            run(cluster, "ray", "job", "submit", "--address", cluster.dashboard, "--", *words)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(DEADLINE_S)
    (part,) = (tmp_path / "reviews-classified").glob("part-*.jsonl")
    answers = [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()]
    assert sorted(answer["id"] for answer in answers) == [1, 2, 3]
    assert {answer["label"] for answer in answers} <= {"negative", "positive"}


def test_serve_deploy_and_what_is_taken_away_answers_what_it_has(
    cluster: RayHead, tmp_path: Path
) -> None:
    file = File(tmp_path)
    deploy = ("serve", "deploy", "--address", cluster.dashboard)
    run(cluster, *deploy, os.fspath(file.path))
    file.wait_healthy()
    assert file.answers()
    assert "RUNNING" in run(cluster, "serve", "status", "--address", cluster.dashboard)
    body = {"model": "bundled", "prompt": "The", "max_tokens": 1500, "ignore_eos": True}
    url = f"http://127.0.0.1:{file.port}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=DEADLINE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        run(cluster, *deploy, os.fspath(file.without_applications()))
        assert not file.answers(), "nobody else gets in"
        chunks = [line for line in lines if line]
    assert chunks[-1] == "data: [DONE]"
    assert not [chunk for chunk in chunks if '"error"' in chunk]
    told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]
    assert told[-1]["choices"][0]["finish_reason"] == "length", "to its last token"
    end_s = time.monotonic() + DEADLINE_S
    while cluster.running("Groups"):
        assert time.monotonic() < end_s, "it has not ended"
        time.sleep(0.5)
