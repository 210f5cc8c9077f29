"""A real Prometheus with the committed rules, at fifteen times their pace, scrapes a server under
load: dashboards and rules have data, counts are the clients' own, and alerts fire when their
condition is caused, and resolve after. The tests run in order; minutes in all.

Caused here: a rank that is killed, an epoch that flaps, late first tokens, a scrape that is
missing. The other alerts are held by `promtool test rules` alone
(tests/unit/dashboards/test_rules.py): their conditions are faults of ours, or the door does not let
them come about on a server this small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from benchmarks.prometheus import Prometheus, is_installed
from cluster.fleet.codec import decode_directory
from cluster.serving.front import free_port
from cluster.serving.server import Served, serving
from contracts.loading import load_config
from contracts.metrics import Board
from dashboards.rules import Pace, recorded
from tests.architecture.test_dashboards import _expressions

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="no prometheus: apt-get install prometheus"),
]

QUICK = Pace(faster=15.0, interval_s=0.5)
DEADLINE_S = 150.0
LONG_PROMPT = "a long story that is told again and again and again. " * 20
# What this server never does, or nothing of it has a value of.
WITHOUT = (
    "host_copy|gather",
    "gather|host_copy",
    "tandem_policy_fallbacks",
    "tandem_local_activation",
    "tandem_prefetch_hit",
    "tandem_expert_read",
    "tandem_expert_wait",
    "tandem_keys_",
    "tandem_placement_proposals",
    "tandem_placement_gain",
    "tandem_bulk_",
    'outcome=~"overload|refused"',
)


class Quiet(BaseHTTPRequestHandler):
    """A process that exports nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


class World:
    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        settings = [
            "groups.prefill_ranks=2",
            "groups.ready_timeout_s=100",
            "priority.ls_max_wait_s=60",
            "metrics.exporters=false",
            f"http.port={free_port()}",
        ]
        self.served: Served = stack.enter_context(serving(load_config(None, settings)))
        self.http = stack.enter_context(httpx.Client(base_url=self.served.url, timeout=DEADLINE_S))
        self.other_port = free_port()
        ours = self.served.url.removeprefix("http://")
        targets = [ours, f"127.0.0.1:{self.other_port}"]
        self.prometheus = stack.enter_context(Prometheus(folder, targets, scrape_s=0.5, pace=QUICK))
        self.asked = 0
        self.tokens = 0

    def complete(self, prompt: str, tokens: int, priority: str) -> bool:
        answer = self.http.post(
            "/v1/completions",
            json={
                "model": "bundled",
                "prompt": prompt,
                "max_tokens": tokens,
                "priority": priority,
                "ignore_eos": True,
            },
        )
        if answer.status_code != 200:
            return False
        self.asked += 1
        self.tokens += answer.json()["usage"]["completion_tokens"]
        return True

    def classify(self, text: str) -> None:
        body = {"model": "bundled", "input": text, "labels": ["good", "bad"]}
        self.http.post("/v1/classify", json=body).raise_for_status()

    def kill(self, name: str) -> int:
        """The pid that it had."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def pids(self) -> dict[str, int]:
        body = self.served.groups.directory.remote().result(timeout_s=DEADLINE_S)
        return {rank.name: rank.pid for rank in decode_directory(body).ranks}

    def fires(self, name: str) -> None:
        until(lambda: name in self.prometheus.firing(), f"{name} has not fired")

    def resolves(self, name: str) -> None:
        until(lambda: name not in self.prometheus.firing(), f"{name} has not resolved")


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.2)


@contextlib.contextmanager
def quiet_process(port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), Quiet) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(stack, tmp_path_factory.mktemp("prometheus"))


def test_a_missing_scrape_is_an_alert_until_it_is_there(world: World) -> None:
    world.fires("TandemScrapeMissing")
    with quiet_process(world.other_port):
        world.resolves("TandemScrapeMissing")
    world.fires("TandemScrapeMissing")


def test_panels_and_rules_have_data_and_counts_are_the_clients_own(world: World) -> None:
    for number in range(12):
        assert world.complete(f"story {number}", 12, "ls" if number % 2 else "be")
        world.classify(f"film {number}")
    name = 'tandem_requests_total{pipeline="generation", outcome="ok"}'
    prometheus = world.prometheus
    until(lambda: _sum(prometheus, name) == world.asked, "requests are not those of the client")
    assert _sum(prometheus, "tandem_generated_tokens_total") == world.tokens
    asked = [expression for board in Board for expression in _expressions(board)]
    asked += [*recorded(), "tandem_capacity_used_fraction"]

    def without() -> list[str]:
        with ThreadPoolExecutor(4) as pool:  # of both classes at once, so that one overtakes
            for number in range(8):
                pool.submit(
                    world.complete, f"{number} {LONG_PROMPT}", 12, "be" if number % 2 else "ls"
                )
        world.classify("another")
        empty = [one for one in asked if not prometheus.now(one)]
        return [one for one in empty if not any(word in one for word in WITHOUT)]

    empty = without()

    def has_data() -> bool:
        empty[:] = without()
        return not empty

    until(has_data, f"no data of some of: {empty}")


def test_a_rank_that_is_killed_is_an_alert_until_another_is_there(world: World) -> None:
    pid = world.kill("prefill-1")
    world.fires("TandemRankDown")
    until(lambda: world.pids().get("prefill-1", pid) != pid, "it was not replaced")
    world.resolves("TandemRankDown")


def test_an_epoch_that_flaps_is_an_alert_until_it_stands_still(world: World) -> None:
    """Three losses in a minute, which stands for a quarter of an hour."""
    for _ in range(3):
        pid = world.kill("prefill-0")
        until(lambda pid=pid: world.pids().get("prefill-0", pid) != pid, "it was not replaced")  # type: ignore[misc]
    world.fires("TandemEpochFlaps")
    world.resolves("TandemEpochFlaps")


def test_late_first_tokens_burn_the_objective_until_they_are_in_time(world: World) -> None:
    _flood(world)
    world.fires("TandemTtftBurnsFast")

    def in_time() -> bool:
        world.complete("in time", 4, "ls")
        return "TandemTtftBurnsFast" not in world.prometheus.firing()

    until(in_time, "it has not resolved")


def _flood(world: World) -> None:
    """More long prompts at once than are prefilled in a second."""
    with ThreadPoolExecutor(64) as pool:
        for number in range(160):
            pool.submit(world.complete, f"{number} {LONG_PROMPT}", 8, "ls")


def _sum(prometheus: Prometheus, series: str) -> float:
    return sum(value for _, value in prometheus.now(series))
