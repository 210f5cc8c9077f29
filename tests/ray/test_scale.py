"""Ranks are added, removed and replaced under streams: every answer is unchanged.

Ranks change by `tandem scale` and by signals; nothing of removed ranks is left.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import ray

from cluster.cli.main import main
from cluster.observe import operator_client as client
from cluster.observe.operator_client import follow_scale, start_scale
from cluster.observe.server_client import Server
from cluster.serving.server import RunningServer, serving
from contracts.loading import load_config
from contracts.scaling import ScaleTarget
from tests.support.ray_head import RayHead
from tests.support.ray_support import rank_pids
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]

DEADLINE_S = 150.0
CLIENTS = 4
TOKENS = 48
SETTINGS = (
    *("groups.attention_ranks=2", "groups.expert_ranks=2", "groups.drain_timeout_s=4"),
    *("model.dtype=float32", "kv.pool_tokens=8192", "groups.ready_timeout_s=120"),
    "groups.orphan_timeout_s=300",  # a busy machine may take minutes to start another launcher
    *("http.api_keys=[client]", "http.operator_key=operator"),
)
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "The capital of France is", "temperature": 0.0},
    {"prompt": "One two three", "temperature": 0.0},
    {"prompt": "A film that", "temperature": 1.0, "seed": 5},
    {"prompt": "It was", "temperature": 0.8, "seed": 11, "top_p": 0.9},
]


class Streams:
    """Clients that repeat generations. wrong: unexpected answers."""

    def __init__(self, served: RunningServer) -> None:
        self.served = served
        self._stop = threading.Event()
        with self._client() as client:
            self._expected = [self._generate(client, each) for each in PROMPTS]
        self.answers = 0
        self.wrong: list[str] = []

    def _client(self) -> httpx.Client:
        headers = {"authorization": "Bearer client"}
        return httpx.Client(base_url=self.served.url, timeout=DEADLINE_S, headers=headers)

    def _generate(self, client: httpx.Client, fields: dict[str, Any]) -> str:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **fields}
        text = ""
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return str(event)
                    text += "".join(choice["text"] for choice in event["choices"])
        return text if answer.status_code == 200 else f"{answer.status_code}"

    def _run(self, first: int) -> None:
        with self._client() as client:
            number = first
            while not self._stop.is_set():
                number = (number + 1) % len(PROMPTS)
                found = self._generate(client, PROMPTS[number])
                self.answers += 1
                if found != self._expected[number]:
                    self.wrong.append(f"{found!r} instead of {self._expected[number]!r}")

    def wait_more(self, answers: int) -> None:
        """Wait for `answers` more answers."""
        requested = self.answers + answers
        wait_until(lambda: self.answers >= requested, "no answers", DEADLINE_S, 0.05)

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as threads:
            running: list[Future[None]] = [threads.submit(self._run, n) for n in range(CLIENTS)]
            try:
                yield
            finally:
                self._stop.set()
            for future in running:
                future.result(DEADLINE_S)
        self._stop.clear()
        assert not self.wrong, self.wrong[:3]


@pytest.fixture(scope="module")
def served(app_settings: list[str]) -> Iterator[RunningServer]:
    with serving(load_config(None, [*SETTINGS, *app_settings])) as served:
        yield served


@pytest.fixture(scope="module")
def free(served: RunningServer) -> float:
    """Return the CPUs that the launched server leaves free."""
    return free_cpus()


@pytest.fixture(scope="module")
def streams(served: RunningServer) -> Streams:
    return Streams(served)


def scale(served: RunningServer, *arguments: str) -> int:
    return main(["scale", "--url", served.url, "--api-key", "operator", *arguments])


def ranks_up(served: RunningServer) -> list[str]:
    """Return the lines of attention ranks in /metrics."""
    lines = httpx.get(f"{served.url}/metrics", timeout=DEADLINE_S).text.splitlines()
    return [line for line in lines if line.startswith('tandem_rank_up{group="attention"')]


def test_attention_ranks_scale_up_and_down(
    served: RunningServer, streams: Streams, free: float, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rank_pids(served)
    with streams.going():
        streams.wait_more(CLIENTS)
        assert scale(served, "--attention-ranks", "3") == 0
        three = rank_pids(served)
        assert set(three) - set(before) == {"attention-2"}
        assert three.items() >= before.items()
        streams.wait_more(4 * CLIENTS)
        status = httpx.get(f"{served.url}/status", timeout=DEADLINE_S).json()
        computed = {one["name"]: one["sections"].get("totals", {}) for one in status["ranks"]}
        assert computed["attention-2"]["computed_tokens"] > 0
        assert scale(served, "--attention-ranks", "1") == 0
        streams.wait_more(4 * CLIENTS)
    one = rank_pids(served)
    assert set(before) - set(one) == {"attention-1"}
    gone = {three[name] for name in ("attention-1", "attention-2")}
    wait_until(lambda: not any(map(psutil.pid_exists, gone)), "their processes still run", 20.0)
    assert len(ranks_up(served)) == 1
    assert "attention_ranks=1" in capsys.readouterr().out
    # What was taken for the third is free again; the seat of the launch's second is kept.
    assert free - free_cpus() == pytest.approx(0.0, abs=0.01)
    assert scale(served, "--attention-ranks", "2") == 0
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_expert_ranks_scale_up_and_down(served: RunningServer, streams: Streams) -> None:
    before = rank_pids(served)
    with streams.going():
        for ranks in ("3", "1", "2"):
            streams.wait_more(CLIENTS)
            assert scale(served, "--expert-ranks", ranks) == 0
            streams.wait_more(2 * CLIENTS)
            assert sum(name.startswith("expert-") for name in rank_pids(served)) == int(ranks)
    after = rank_pids(served)
    assert {name for name in after if after[name] != before[name]} == {"expert-1"}
    assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_ranks_are_replaced_and_every_answer_is_complete(
    served: RunningServer, streams: Streams, number: signal.Signals
) -> None:
    before = rank_pids(served)

    def is_replaced() -> bool:
        return rank_pids(served)[name] != before[name]

    with streams.going():
        for name in ("attention-0", "expert-1"):
            streams.wait_more(CLIENTS)
            os.kill(rank_pids(served)[name], number)
            wait_until(is_replaced, "it was not replaced", DEADLINE_S)
        streams.wait_more(4 * CLIENTS)


class Killed:
    """A scaling whose launcher gets SIGKILL at the step that starts with `at`."""

    def __init__(
        self, ray_cluster: RayHead, served: RunningServer, at: str, **requested: int
    ) -> None:
        self.ray_cluster = ray_cluster
        self.at, self.steps, self.killed = at, list[str](), 0
        server = Server(served.url, "operator")
        operation = start_scale(server, ScaleTarget(**requested))
        self.state = follow_scale(server, operation, self._on_step, 2 * DEADLINE_S)

    def _on_step(self, step: str) -> None:
        self.steps.append(step)
        if step.startswith(self.at) and not self.killed:
            rank, what = self.at.split(maxsplit=1)
            if what == "starts":
                ranks = self.ray_cluster.running
                wait_until(lambda: bool(ranks(f"ray::{rank}")), f"{rank} did not start", 90.0)
            (launcher,) = self.ray_cluster.running("Groups")
            self.killed = launcher.pid
            os.kill(launcher.pid, signal.SIGKILL)


def free_cpus() -> float:
    return float(ray.available_resources()["CPU"])


@pytest.mark.parametrize(
    ("at", "requested", "seats"),
    [
        ("attention-2 starts", {"attention_ranks": 3}, 1),
        ("attention-2 leaves", {"attention_ranks": 1}, 0),
        ("attention-1 starts", {"attention_ranks": 2}, 0),
        ("expert-2 starts", {"expert_ranks": 3}, 1),
        ("experts move to 2", {"expert_ranks": 2}, 0),
    ],
)
def test_scaling_continues_after_launcher_is_killed(
    ray_cluster: RayHead,
    served: RunningServer,
    streams: Streams,
    free: float,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    requested: dict[str, int],
    seats: int,
) -> None:
    """seats: used afterwards, beyond those of the launch."""
    monkeypatch.setattr(client, "_MAX_SILENCE_S", DEADLINE_S)
    with streams.going():
        streams.wait_more(CLIENTS)
        killed = Killed(ray_cluster, served, at, **requested)
        streams.wait_more(2 * CLIENTS)
    assert killed.killed
    assert killed.state.state == "done"
    ((name, count),) = requested.items()
    assert killed.state.ranks[name] == count
    found = rank_pids(served)
    kind = name.removesuffix("_ranks")
    assert sorted(one for one in found if one.startswith(kind)) == [
        f"{kind}-{rank}" for rank in range(count)
    ]
    theirs = {pid for name, pid in found.items() if name.startswith(kind)}
    wait_until(
        lambda: {one.pid for one in ray_cluster.running(f"ray::{kind}-")} == theirs,
        f"other processes than {found}",
        30.0,
    )
    wait_until(
        lambda: abs(free - free_cpus() - 0.25 * seats) < 0.01, f"{free}, {free_cpus()} free", 30.0
    )
    assert httpx.get(f"{served.url}/health").status_code == 200
