"""deploy/serve.yaml by `serve run` and `serve deploy`, and the RayJob by `ray job submit`."""

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
        document = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
        self.port = document["http_options"]["port"] = free_port()
        document["applications"][0]["args"]["kv"]["pool_tokens"] = 4096
        document["applications"][0]["args"].setdefault("http", {})["drain_timeout_s"] = DRAIN_S
        self.path = folder / "serve.yaml"
        self.path.write_text(yaml.safe_dump(document), encoding="utf-8")

    def without_applications(self) -> Path:
        """Return the same file, by which `serve deploy` removes all applications."""
        return self._changed("none.yaml", {**self._document(), "applications": []})

    def with_model_named(self, name: str) -> Path:
        """Return the same file with another argument, by which `serve deploy` redeploys it."""
        document = self._document()
        document["applications"][0]["args"]["model"]["name"] = name
        return self._changed("anew.yaml", document)

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load(self.path.read_text(encoding="utf-8"))
        return document

    def _changed(self, name: str, document: dict[str, Any]) -> Path:
        path = self.path.with_name(name)
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
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
        """Yield the lines of an answer after its first line."""
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
    """Return the RayJob's command with its volume in `folder`, which has rows."""
    job = yaml.safe_load((ROOT / "deploy/kubernetes/bulk_job.yaml").read_text(encoding="utf-8"))
    text: str = job["spec"]["entrypoint"]
    rows = pyarrow.table({"id": [1, 2, 3], "text": ["It works.", "It broke.", "Fine."]})
    (folder / "reviews").mkdir()
    pyarrow.parquet.write_table(rows, folder / "reviews" / "rows.parquet")
    return text.replace("/shared", str(folder))


def test_serve_run_and_job_entrypoint_answer(cluster: RayHead, tmp_path: Path) -> None:
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


def test_redeployed_or_removed_application_completes_answers(
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
        check_complete(lines)
    until(lambda: file.answers("anew"), "the redeployed application does not answer")
    until(lambda: len(cluster.running("Groups")) == 1, "the replaced ranks have not ended")
    with file.long_answer("anew") as lines:
        run(cluster, *deploy, os.fspath(file.without_applications()))
        assert not file.answers("anew")
        check_complete(lines)
    until(lambda: not cluster.running("Groups"), "it has not ended")


def check_complete(lines: Iterator[str]) -> None:
    """Check that the rest of an answer extends to its last token."""
    chunks = [line for line in lines if line]
    assert chunks[-1] == "data: [DONE]"
    assert not [chunk for chunk in chunks if '"error"' in chunk]
    events = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
