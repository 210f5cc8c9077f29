"""`tandem serve` with prefill workers only, on a local cluster of the test's own: what they answer,
and what becomes of their requests when one of them is killed. The tests run in order."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cluster.codec import decode_directory
from cluster.front import free_port
from cluster.serving import Served, serving
from contracts.loading import load_config

pytestmark = pytest.mark.ray

DEADLINE_S = 60.0
LABELS = ["positive", "negative"]


class Server:
    def __init__(self, stack: contextlib.ExitStack) -> None:
        config = load_config(
            None,
            [
                "groups.attention_ranks=0",
                "groups.expert_ranks=0",
                "groups.prefill_ranks=2",
                "prefill.engine=stub",
                f"http.port={free_port()}",
            ],
        )
        self.served: Served = stack.enter_context(serving(config))
        self.http = stack.enter_context(httpx.Client(base_url=self.served.url, timeout=DEADLINE_S))

    def pids(self) -> dict[str, int]:
        body = self.served.groups.directory.remote().result(timeout_s=DEADLINE_S)
        return {rank.name: rank.pid for rank in decode_directory(body).ranks}

    def classify(self, texts: list[str]) -> list[dict[str, Any]]:
        answer = self.http.post(
            "/v1/classify", json={"model": "bundled", "input": texts, "labels": LABELS}
        )
        assert answer.status_code == 200, answer.text
        data: list[dict[str, Any]] = answer.json()["data"]
        return data

    def count(self, series: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(series):
                return float(line.rpartition(" ")[2])
        return 0.0

    def wait_healthy(self) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while (answer := self.http.get("/health")).status_code != 200:
            assert time.monotonic() < end_s, answer.text
            time.sleep(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    patch = pytest.MonkeyPatch()
    patch.delenv("RAY_ADDRESS", raising=False)
    patch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    with contextlib.ExitStack() as stack:
        stack.callback(patch.undo)
        yield Server(stack)


def texts_of(client: int) -> list[str]:
    return [f"Request {client}, row {row}: it is fine." for row in range(40)]


def test_without_attention_ranks_prefill_workers_do_everything(server: Server) -> None:
    assert sorted(server.pids()) == ["prefill-0", "prefill-1"]
    assert len(server.classify(texts_of(0))) == 40
    for max_tokens, pipeline in ((1, "prefill"), (3, "generation")):
        series = f'tandem_requests_total{{class="ls",outcome="ok",pipeline="{pipeline}"}}'
        before = server.count(series)
        body = {"model": "bundled", "prompt": "Hello", "max_tokens": max_tokens}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
        assert server.count(series) == before + 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced_and_no_request_is_lost(
    server: Server, number: signal.Signals
) -> None:
    expected = [server.classify(texts_of(client)) for client in range(8)]
    pids, stop = server.pids(), threading.Event()

    def keep_asking(client: int) -> int:
        asked = 0
        while not stop.is_set():
            assert server.classify(texts_of(client)) == expected[client]
            asked += 1
        return asked

    restarts = server.count("tandem_rank_restarts_total")
    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(keep_asking, client) for client in range(8)]
        try:
            os.kill(pids["prefill-0"], number)
            end_s = time.monotonic() + DEADLINE_S
            while server.http.get("/health").status_code == 200:
                assert time.monotonic() < end_s, "nobody noticed"
            server.wait_healthy()
        finally:
            stop.set()
        assert all(future.result(DEADLINE_S) > 0 for future in asking)
    assert server.pids()["prefill-0"] != pids["prefill-0"]
    assert server.pids()["prefill-1"] == pids["prefill-1"]
    assert server.count("tandem_rank_restarts_total") == restarts + 1
    assert server.count('tandem_group_epoch{group="prefill"}') == 2 + restarts
