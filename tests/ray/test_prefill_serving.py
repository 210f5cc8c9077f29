"""A server with both pipelines: routing of requests, and loss of a prefill worker.

The tests run in order.
"""

import asyncio
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

from cluster.classification.classify import ClassifyTask, TokenizedRow, classify_row, tokenize_rows
from cluster.fleet.model_folder import resolve_model_folder
from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.rank_set import RoutingConfig
from cluster.serving.ingress_app import rank_clients
from cluster.serving.server import RunningServer, serving
from contracts.loading import load_config
from models.text.tokenizer import Tokenizer
from tests.support.attention_ranks import started
from tests.support.ray_support import rank_pids

pytestmark = pytest.mark.ray

DEADLINE_S = 60.0
CLIENTS = 4
LABELS = ["positive", "negative"]


class Server:
    def __init__(self, stack: contextlib.ExitStack, app_settings: list[str]) -> None:
        config = load_config(
            None,
            [
                *app_settings,
                "model.dtype=float32",
                "groups.prefill_ranks=2",
                "kv.pool_tokens=16384",
                "groups.ready_timeout_s=100",  # fails before pytest's timeout
            ],
        )
        self.served: RunningServer = stack.enter_context(serving(config))
        self.http = stack.enter_context(httpx.Client(base_url=self.served.url, timeout=DEADLINE_S))

    def classify(self, texts: list[str]) -> list[dict[str, Any]]:
        answer = self.http.post(
            "/v1/classify", json={"model": "bundled", "input": texts, "labels": LABELS}
        )
        assert answer.status_code == 200, answer.text
        data: list[dict[str, Any]] = answer.json()["data"]
        return data

    def busy_s(self) -> dict[str, float]:
        answers = self.served.groups.status.remote().result(timeout_s=DEADLINE_S)
        return {
            one.name: one.sections["stage_s"]["attention"] + one.sections["stage_s"]["expert"]
            for one in answers
        }

    def active_groups(self, before: dict[str, float]) -> set[str]:
        """Return the groups of ranks that have computed since `before`."""
        now = self.busy_s()
        return {name.partition("-")[0] for name in now if now[name] > before[name]}

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
def server(app_settings: list[str]) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        yield Server(stack, app_settings)


def texts_of(client: int) -> list[str]:
    return [f"Request {client}, row {row}: it is fine." for row in range(40)]


def test_single_pass_requests_use_prefill_workers(server: Server) -> None:
    busy = server.busy_s()
    server.classify(texts_of(0))
    assert server.active_groups(busy) == {"prefill"}
    busy = server.busy_s()
    for max_tokens, pipeline in ((1, "prefill"), (3, "generation")):
        series = f'tandem_requests_total{{class="ls",outcome="ok",pipeline="{pipeline}"}}'
        before = server.count(series)
        body = {"model": "bundled", "prompt": "Hello there, you", "max_tokens": max_tokens}
        answer = server.http.post("/v1/completions", json={**body, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
        assert server.count(series) == before + 1
    assert server.active_groups(busy) == {"attention", "expert", "prefill"}


def test_both_pipelines_return_equal_probabilities(server: Server) -> None:
    task = ClassifyTask(labels=tuple(LABELS))

    async def through_attention_ranks() -> list[list[float]]:
        directory = server.served.directory
        clients = rank_clients(directory.client_addresses, directory.token)
        rows = tokenize_rows(tokenizer, [(text, task) for text in texts_of(1)])
        known = [row for row in rows if isinstance(row, TokenizedRow)]
        assert known == rows
        async with started(LeastWorkPlacer(clients, RoutingConfig())) as backend:
            return [(await classify_row(backend, task, row)).probs for row in known]

    tokenizer = Tokenizer.load(resolve_model_folder("bundled"))
    expected = asyncio.run(through_attention_ranks())
    for row, probs in zip(server.classify(texts_of(1)), expected, strict=True):
        assert row["probs"] == pytest.approx(probs, abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_worker_is_replaced_and_no_request_fails(
    server: Server, number: signal.Signals
) -> None:
    expected = [server.classify(texts_of(client)) for client in range(CLIENTS)]
    pids, stop = rank_pids(server.served), threading.Event()

    def repeat(client: int) -> int:
        count = 0
        while not stop.is_set():
            for row, known in zip(server.classify(texts_of(client)), expected[client], strict=True):
                assert row["label"] == known["label"]
                assert row["probs"] == pytest.approx(known["probs"], abs=1e-4)
            count += 1
        return count

    restarts = server.count('tandem_rank_restarts_total{group="prefill"}')
    with ThreadPoolExecutor(CLIENTS) as threads:
        repeating = [threads.submit(repeat, client) for client in range(CLIENTS)]
        try:
            os.kill(pids["prefill-0"], number)
            end_s = time.monotonic() + DEADLINE_S
            while server.http.get("/health").status_code == 200:
                assert time.monotonic() < end_s, "the loss was not noticed"
            server.wait_healthy()
        finally:
            stop.set()
        assert all(future.result(DEADLINE_S) > 0 for future in repeating)
    assert rank_pids(server.served)["prefill-0"] != pids["prefill-0"]
    assert rank_pids(server.served)["prefill-1"] == pids["prefill-1"]
    assert server.count('tandem_rank_restarts_total{group="prefill"}') == restarts + 1
    assert server.count('tandem_group_epoch{group="prefill"}') == 2 + restarts
