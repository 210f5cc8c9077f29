"""Alerts that take hours or a planted fault, with the rules at 120 times their pace.

The tests run in order and take minutes. Causes: ranks that stand still, for moments or until
requests time out; a saturation threshold that is too high; and faults that a policy
(docs/policies.md) plants while a file exists: batches that pause before they sample, for a random
time, and a block manager that does not release.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cluster.http.server import free_port
from tests.support.alert_world import Watched, World, again_and_again, stopped
from tests.support.prometheus import is_installed
from tests.support.ray_support import own_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed(), reason="no prometheus: apt-get install prometheus"),
]

FASTER = 120.0  # six hours are three minutes
AT_ONCE = 8  # requests
REQUEST_S = 5.0  # longer than a rank may hang: it is replaced, and its requests end before that
STILL_S = 1.2  # late is a first token after 1 s, another one after 0.25 s
BETWEEN_CPU_S = 0.04  # of some steps
ROWS = ["It broke after two days, and nobody has answered since. " * 12] * 32
FAULTS = """
import random
import time
from pathlib import Path

from actors.batching.sampler import TokenSampler
from actors.kv.block_manager import BlockManager
from planner.scheduling.task_order import by_plan

FOLDER = Path(__file__).parent
release, start, kept = BlockManager.release, TokenSampler.__init__, []


def leak(blocks, released, **of):
    if (FOLDER / "leak").exists():
        kept.append((released, of))
        return
    while kept:
        late, as_of = kept.pop()
        release(blocks, late, **as_of)
    release(blocks, released, **of)


def pause(sampler, logits_RV):
    if (FOLDER / "pause").exists():
        time.sleep(10 ** random.uniform(-3, -0.5))
    start(sampler, logits_RV)


class Faults:
    def pick(self, tasks):
        return by_plan(tasks)


BlockManager.release, TokenSampler.__init__ = leak, pause
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the policy, in which a file "leak" or "pause" plants a fault."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "planted.py").write_text(FAULTS)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, faults: Path) -> Iterator[World]:
    settings = [
        "groups.prefill_ranks=1",
        "priority.ls_max_wait_s=60",
        "priority.policy=planted:Faults",
        "prefill.saturation=1000000000000000",
        "planner.report_interval_s=0",
        f"http.request_timeout_s={REQUEST_S}",
        f"http.port={free_port()}",
        "channel.heartbeat_timeout_s=30",
    ]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.syspath_prepend(faults)
        patch.setenv("PYTHONPATH", str(faults), prepend=os.pathsep)  # its own cluster inherits it
        stack.enter_context(own_ray(tmp_path_factory.mktemp("state")))
        folder = tmp_path_factory.mktemp("prometheus")
        yield World(stack, folder, Watched(FASTER, scrape_s=0.5), settings)


def test_slow_burn_alerts_fire_for_a_rank_that_pauses(world: World) -> None:
    alerts = {"TandemTtftBurnsSlow", "TandemTbtBurnsSlow", "TandemTbtBurnsFast"}
    with still_now_and_then(world, BETWEEN_CPU_S, STILL_S):
        world.fires(*alerts)
    with again_and_again(lambda: complete(world)):
        world.resolves(*alerts)


def test_batches_of_random_length_raise_prediction_alert(world: World, faults: Path) -> None:
    with again_and_again(lambda: world.complete("ls", "and so on", tokens=24), AT_ONCE):
        (faults / "pause").touch()
        world.fires("TandemPredictionsOff")
        (faults / "pause").unlink()
        world.resolves("TandemPredictionsOff")


def test_timeouts_burn_the_answers_objective(world: World) -> None:
    """A rank that hangs for so long is replaced, and then the next one hangs."""
    alerts = {"TandemAnswersBurnsFast", "TandemAnswersBurnsSlow"}
    with still_now_and_then(world, BETWEEN_CPU_S, REQUEST_S):
        world.fires(*alerts)
    with again_and_again(lambda: complete(world)):
        world.resolves(*alerts)


def test_saturation_lost_alert_fires_if_the_threshold_is_too_high(world: World) -> None:
    """Prompts wait for a worker that stands still after some answers, however fast it is."""
    body = {"model": "bundled", "input": ROWS, "labels": [" no", " yes"]}
    post, pid = partial(world.http.post, "/v1/classify", json=body), world.pids()["prefill-0"]
    answers: list[object] = []

    def stand_still() -> None:
        enough = len(answers) + AT_ONCE // 2
        while len(answers) < enough:
            time.sleep(0.002)
        for _ in range(4):
            time.sleep(0.01)  # in which it is scraped
            with stopped(pid, STILL_S / 3):
                pass

    with again_and_again(lambda: answers.append(post()), AT_ONCE), again_and_again(stand_still):
        world.fires("TandemSaturationLost")
    world.resolves("TandemSaturationLost")


def test_block_leak_alert_fires_and_resolves(world: World, faults: Path) -> None:
    (faults / "leak").touch()
    world.complete("ls")
    world.fires("TandemBlocksLeak")
    (faults / "leak").unlink()
    world.complete("ls")  # with which the planted fault gives back what it has kept
    world.resolves("TandemBlocksLeak")


@contextlib.contextmanager
def still_now_and_then(world: World, cpu_s: float, seconds: float) -> Iterator[None]:
    """Inside clients ask, and attention rank 0 stands still for so long after each cpu_s."""

    def stand_still() -> None:
        with stopped(world.compute("attention-0", cpu_s), seconds):
            pass

    with again_and_again(lambda: complete(world), AT_ONCE), again_and_again(stand_still):
        yield


def complete(world: World) -> None:
    world.complete("ls", "and so on", tokens=3)
