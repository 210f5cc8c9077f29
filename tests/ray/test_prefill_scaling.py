"""Prefill workers scale with the load, and every request is answered correctly."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from actors.planning.planner_inputs import shape_of
from cluster.fleet.model_folder import resolve_model_folder
from cluster.serving.server import RunningServer, serving
from contracts.config import BUNDLED
from contracts.loading import load_config
from models.spec.model import read_spec
from planner.routing.open_requests import work_of
from tests.support.ray_support import rank_pids
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

DEADLINE_S = 120.0
CLIENTS = 4
ROWS = 120
LABELS = ["positive", "negative"]
SETTINGS = (
    *("groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=1"),
    *(
        "model.dtype=float32",
        "kv.pool_tokens=16384",
        "prefill.max_batch_tokens=512",
        "kv.prefix_cache=false",
    ),
    *(
        "scaling.max_prefill_ranks=3",
        "scaling.look_back_period_s=0.5",
        "scaling.downscale_delay_s=2",
    ),
    *("scaling.scale_up_utilization=0.8", "scaling.scale_down_utilization=0.5"),
    "groups.ready_timeout_s=100",
)


class Load:
    """Clients that repeat requests until `stop`. failed: unexpected answers."""

    def __init__(self, url: str, expected: list[list[float]]) -> None:
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self.rows_per_request = ROWS
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=DEADLINE_S) as client:
            while not self._stop.is_set():
                self._request(client, self.rows_per_request)

    def _request(self, client: httpx.Client, rows: int) -> None:
        answer = client.post("/v1/classify", json=body(rows))
        self.outcomes[str(answer.status_code)] += 1
        if answer.status_code != 200:
            self.failed.append(answer.text)
            return
        for row, known in zip(answer.json()["data"], self._expected, strict=False):
            if row["probs"] != pytest.approx(known, abs=1e-4):
                self.failed.append(f"{row['probs']} instead of {known}")


def body(rows: int) -> dict[str, Any]:
    texts = [f"Row {row}: it is fine, and it has been so for {row} days." for row in range(rows)]
    return {"model": "bundled", "input": texts, "labels": LABELS}


def wait_for(served: RunningServer, workers: int) -> dict[str, int]:
    end_s = time.monotonic() + DEADLINE_S
    while len(found := rank_pids(served)) != workers:
        assert time.monotonic() < end_s, found
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def served(app_settings: list[str]) -> Iterator[RunningServer]:
    # A busy machine must not calibrate a threshold that no load reaches.
    work = work_of(shape_of(read_spec(resolve_model_folder(BUNDLED)), 4))
    pinned = f"prefill.saturation={work(0, 256)}"
    with serving(load_config(None, [*SETTINGS, pinned, *app_settings])) as served:
        yield served


def test_workers_scale_up_and_down_without_failed_request(served: RunningServer) -> None:
    first = httpx.post(f"{served.url}/v1/classify", json=body(ROWS), timeout=DEADLINE_S)
    load = Load(served.url, [row["probs"] for row in first.json()["data"]])
    (start,) = rank_pids(served).items()
    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(load.run) for _ in range(CLIENTS)]
        try:
            most = wait_for(served, 3)
            at_most = load.outcomes.total()
            at_most += 10 * CLIENTS  # all three have work
            wait_until(lambda: load.outcomes.total() >= at_most, "no answers", DEADLINE_S)
            load.rows_per_request = 1
            least = wait_for(served, 1)
            gone = set(most.values()) - set(least.values())
            wait_until(lambda: not any(map(psutil.pid_exists, gone)), f"{gone} run", DEADLINE_S)
        finally:
            load.stop()
        for future in running:
            future.result(DEADLINE_S)
    assert not load.failed, load.failed[:3]
    assert set(load.outcomes) == {"200"}
    assert least.items() == {start}, "the first one stays"
    assert len(gone) == 2
    shown = httpx.get(f"{served.url}/metrics").text
    requests = load.outcomes.total() + 1
    assert f'outcome="ok",pipeline="prefill"}} {requests}.0' in shown
    up = [line for line in shown.splitlines() if line.startswith("tandem_rank_up{")]
    assert up == ['tandem_rank_up{group="prefill",rank="prefill-0"} 1.0']
    assert httpx.get(f"{served.url}/health").status_code == 200
