"""Adoption of ranks by a restarted launcher, and the end of orphans."""

import os
import signal
from collections.abc import Callable, Iterator

import httpx
import openai
import psutil
import pytest

from cluster.http.server import free_port
from cluster.serving.server import RunningServer, serving
from contracts.config import BUNDLED
from contracts.loading import load_config
from tests.support.ray_support import own_ray, processes_of, rank_pids
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 90.0
ORPHAN_TIMEOUT_S = 45.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Return a server for all tests, in order; the last one ends it."""
    settings = [
        "model.dtype=float32",
        "groups.ingress_replicas=2",
        "groups.ready_timeout_s=100",
        f"groups.orphan_timeout_s={ORPHAN_TIMEOUT_S}",
        "kv.pool_tokens=16384",
        f"http.port={free_port()}",
    ]
    state = tmp_path_factory.mktemp("state")
    with own_ray(state), serving(load_config(None, settings)) as served:
        yield served


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, "it never came true", DEADLINE_S)


def stream(served: RunningServer) -> Iterator[str]:
    """Yield the texts of a deterministic generation that takes seconds."""
    client = openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
    )
    answer = client.completions.create(
        model=BUNDLED,
        prompt="The",
        max_tokens=300,
        seed=5,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return (piece.choices[0].text for piece in answer)


def test_restarted_launcher_adopts_ranks(served: RunningServer) -> None:
    whole = "".join(stream(served))
    running = stream(served)
    text = next(running)
    (launcher,) = processes_of("Groups")
    os.kill(launcher.pid, signal.SIGKILL)
    until(lambda: [one.pid for one in processes_of("Groups")] not in ([], [launcher.pid]))
    assert text + "".join(running) == whole
    assert rank_pids(served) == {rank.name: rank.pid for rank in served.directory.ranks}
    assert not served.groups.problem.remote(served.directory.token).result(timeout_s=DEADLINE_S)
    assert "".join(stream(served)) == whole
    assert httpx.get(f"{served.url}/health", timeout=DEADLINE_S).status_code == 200


def test_killed_ingress_replica_breaks_only_its_connections(served: RunningServer) -> None:
    replicas = processes_of("Ingress")
    assert len(replicas) == 2
    os.kill(replicas[0].pid, signal.SIGKILL)
    answers = []
    for _ in range(20):
        try:
            answers.append(httpx.get(f"{served.url}/v1/models", timeout=DEADLINE_S).status_code)
        except httpx.TransportError:
            answers.append(0)
    assert answers.count(200) >= 15, answers
    until(lambda: len(processes_of("Ingress")) == 2)


def test_orphaned_ranks_end(served: RunningServer) -> None:
    """Serve's controller is suspended, so nothing restarts the launcher."""
    ranks = [psutil.Process(pid) for pid in rank_pids(served).values()]
    (launcher,) = processes_of("Groups")
    (controller,) = processes_of("ServeController")
    controller.suspend()
    os.kill(launcher.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=ORPHAN_TIMEOUT_S + DEADLINE_S)
    controller.resume()
    assert not alive
