"""`tandem serve` whose expert rank, then whose attention rank is killed under load: every answer is
that of an undisturbed server, and others are in their places."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.http.server import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

DEADLINE_S = 150.0
PROMPTS = ["The capital of France is", "One two three", "A film that", "It was"]


class Server:
    """pids: of ranks, as printed at its start."""

    def __init__(self, errors: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-m", "cluster", "serve", "--port", str(port)]
        for setting in (
            "groups.attention_ranks=2",
            "groups.expert_ranks=2",
            "model.dtype=float32",
            "planner.enabled=false",
        ):
            command += ["--set", setting]
        self._errors = errors.open("w+")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.pids: dict[str, int] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.match(r"\s*((?:attention|expert)-\d)\s+pid (\d+)", line):
                self.pids[found[1]] = int(found[2])
            if len(self.pids) == 4:
                break
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._reader.start()
        self.wait_healthy()
        self.model: str = json.loads(self.read("/v1/models"))["data"][0]["id"]

    def read(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10.0) as answer:
            text: str = answer.read().decode()
        return text

    @property
    def restarts(self) -> float:
        found = re.search(
            r'tandem_rank_restarts_total{group="attention_expert"} (\S+)', self.read("/metrics")
        )
        return float(found[1]) if found else 0.0

    def wait_healthy(self) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5.0):
                    return
            except OSError:
                assert time.monotonic() < end_s
                time.sleep(0.2)

    def complete(self, prompt: str) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 64, "temperature": 0.0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            text = json.load(answer)["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30.0)
        finally:
            self.process.kill()
            self.process.wait(30.0)
            self._errors.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "errors")
    yield made
    made.close()


def test_every_answer_is_right_when_ranks_are_killed_under_load(server: Server) -> None:
    expected = [server.complete(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as clients:
        for number, victim in enumerate(("expert-1", "attention-0"), 1):
            asked = [clients.submit(server.complete, prompt) for prompt in PROMPTS * 4]
            time.sleep(0.3)
            os.kill(server.pids[victim], signal.SIGKILL)
            assert [one.result(DEADLINE_S) for one in asked] == expected * 4
            end_s = time.monotonic() + DEADLINE_S
            while server.restarts < number:
                assert time.monotonic() < end_s
                time.sleep(0.2)
            server.wait_healthy()
    assert [server.complete(prompt) for prompt in PROMPTS] == expected
