"""Alerts on a real Prometheus, with the rules at 15 times their pace, that scrapes a server.

The tests run in order and take minutes. Causes: a missing scrape, a killed rank, a flapping epoch,
and an attention rank that delays first tokens. For the other alerts see test_alerts_of_hours.py.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from cluster.http.server import free_port
from tests.support.alert_world import Watched, World, again_and_again, stopped, until
from tests.support.prometheus import is_installed

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="no prometheus: apt-get install prometheus"),
]

FASTER = 15.0
AT_ONCE = 8  # requests
LATE_S = 1.6  # the objective has 1 s


class Quiet(BaseHTTPRequestHandler):
    """A process that exports nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def quiet_process(port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), Quiet) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def other_port() -> int:
    """That is scraped too."""
    return free_port()


@pytest.fixture(scope="module")
def world(
    app_settings: list[str], tmp_path_factory: pytest.TempPathFactory, other_port: int
) -> Iterator[World]:
    settings = [
        *app_settings,
        "groups.prefill_ranks=2",
        "priority.ls_max_wait_s=60",
        "priority.be_max_wait_s=1.8",  # LATE_S is near it
        "channel.heartbeat_timeout_s=10",  # a rank that stands still for LATE_S is not lost
    ]
    watched = Watched(FASTER, targets=[f"127.0.0.1:{other_port}"])
    with contextlib.ExitStack() as stack:
        yield World(stack, tmp_path_factory.mktemp("prometheus"), watched, settings)


def test_missing_scrape_alert_fires_and_resolves(world: World, other_port: int) -> None:
    world.fires("TandemScrapeMissing")
    with quiet_process(other_port):
        world.resolves("TandemScrapeMissing")


def test_rank_down_alert_fires_and_resolves_after_replacement(world: World) -> None:
    pid = world.kill("prefill-1")
    world.fires("TandemRankDown")
    until(lambda: world.pids().get("prefill-1", pid) != pid, "it was not replaced")
    world.resolves("TandemRankDown")


def test_flapping_epoch_alert_fires_and_resolves(world: World) -> None:
    """Three losses in a minute, which stands for a quarter of an hour."""
    for _ in range(3):
        pid = world.kill("prefill-0")
        until(lambda pid=pid: world.pids().get("prefill-0", pid) != pid, "it was not replaced")  # type: ignore[misc]
    world.fires("TandemEpochFlaps")
    world.resolves("TandemEpochFlaps")


@pytest.mark.parametrize(
    ("name", "priority"), [("TandemTtftBurnsFast", "ls"), ("TandemBestEffortNearBound", "be")]
)
def test_late_first_tokens_alert_fires_and_resolves(world: World, name: str, priority: str) -> None:
    pid = world.pids()["attention-0"]

    def all_late() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool, stopped(pid, LATE_S):
            for _ in range(AT_ONCE):
                pool.submit(world.complete, priority)

    with again_and_again(all_late):
        world.fires(name)
    with again_and_again(lambda: world.complete(priority)):
        world.resolves(name)
