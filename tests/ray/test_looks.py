"""A supervisor's question is answered whatever else a rank's actor does."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from ray import cloudpickle

from actors.ranks.remote import RayRank, rank_class
from actors.ranks.shell import WorkerShell
from cluster.serving.ray_session import ray_session
from contracts.config import TandemConfig
from contracts.worker import RankStatus

pytestmark = pytest.mark.ray

DEADLINE_S = 60.0


class WaitingShell(WorkerShell):
    """Its `connect` waits for a peer that never answers; `metrics` until it is asked for spans."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = threading.Event()

    def connect(self, addresses: dict[str, str]) -> None:
        self._asked.wait()

    def metrics(self) -> str:
        self._asked.wait()
        return ""

    def status(self) -> RankStatus:
        return RankStatus(name="prefill-0", healthy=True)

    def stop(self) -> None:
        self._asked.set()


def test_the_status_is_told_while_connect_and_a_scrape_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FINDINGS B2: it waited behind `connect`, and healthy workers were killed for it."""
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_session(TandemConfig(), {}, show_rank_logs=False):
        actor: Any = rank_class("attention-0", WaitingShell).options(num_cpus=0).remote()
        rank = RayRank("prefill-0", actor)
        connecting = rank.call("connect", {"prefill-1": "tcp:10.0.0.1:1"})
        scraping = rank.call("metrics")
        for _ in range(3):
            assert rank.call("status").result(DEADLINE_S).healthy
        assert not connecting.done()
        assert not scraping.done()
