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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from cluster.http.server import free_port
from tests.support.ray_head import BIN, ENVIRONMENT, ROOT, RayHead, ray_head
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

DEADLINE_S = 180.0
DRAIN_S = 500.0  # an answer of 1,500 tokens takes minutes beside other tests


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
        told["applications"][0]["args"].setdefault("http", {})["drain_timeout_s"] = DRAIN_S
        self.path = folder / "serve.yaml"
        self.path.write_text(yaml.safe_dump(told), encoding="utf-8")

    def without_applications(self) -> Path:
        """The same file, by which `serve deploy` takes all of them away."""
        return self._changed("none.yaml", {**self._told(), "applications": []})

    def with_model_named(self, name: str) -> Path:
        """The same file with another argument, by which `serve deploy` deploys it anew."""
        told = self._told()
        told["applications"][0]["args"]["model"]["name"] = name
        return self._changed("anew.yaml", told)

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = yaml.safe_load(self.path.read_text(encoding="utf-8"))
        return told

    def _changed(self, name: str, told: dict[str, Any]) -> Path:
        path = self.path.with_name(name)
        path.write_text(yaml.safe_dump(told), encoding="utf-8")
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

    def answers(self, model: str = "bundled") -> bool:
        body = {"model": model, "prompt": "The", "max_tokens": 4}
        answer = httpx.post(self._url, json=body, timeout=DEADLINE_S)
        return answer.status_code == 200 and bool(answer.json()["choices"][0]["text"])

    @contextlib.contextmanager
    def long_answer(self, model: str = "bundled") -> Iterator[Iterator[str]]:
        """The lines of one that has begun."""
        body = {
            "model": model,
            "prompt": "The",
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", self._url, json=body, timeout=DEADLINE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            yield lines

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    wait_until(is_so, otherwise, DEADLINE_S)


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


def test_serve_deploy_and_what_is_deployed_anew_or_taken_away_answers_what_it_has(
    cluster: RayHead, tmp_path: Path
) -> None:
    file = File(tmp_path)
    deploy = ("serve", "deploy", "--address", cluster.dashboard)
    run(cluster, *deploy, os.fspath(file.path))
    file.wait_healthy()
    assert file.answers()
    assert "RUNNING" in run(cluster, "serve", "status", "--address", cluster.dashboard)
    with file.long_answer() as lines:
        run(cluster, *deploy, os.fspath(file.with_model_named("anew")))
        is_whole(lines)
    until(lambda: file.answers("anew"), "what was deployed anew does not answer")
    until(lambda: len(cluster.running("Groups")) == 1, "the ranks of before have not ended")
    with file.long_answer("anew") as lines:
        run(cluster, *deploy, os.fspath(file.without_applications()))
        assert not file.answers("anew"), "nobody else gets in"
        is_whole(lines)
    until(lambda: not cluster.running("Groups"), "it has not ended")


def is_whole(lines: Iterator[str]) -> None:
    """What is left of an answer: it goes to its last token."""
    chunks = [line for line in lines if line]
    assert chunks[-1] == "data: [DONE]"
    assert not [chunk for chunk in chunks if '"error"' in chunk]
    told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]
    assert told[-1]["choices"][0]["finish_reason"] == "length"
