"""Alerts that take hours or a planted fault, with the rules at 120 times their pace.

The tests run in order and take minutes. Causes: attention ranks that pause, so that objectives burn
slowly and predictions fail; a rank that hangs until requests time out; a saturation threshold that
is too high; and leaked blocks, by a policy (docs/policies.md) that disables the block manager's
`release` while a file exists.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.http.server import free_port
from dashboards.rules import TimeScale
from tests.support.alert_world import Watched, World, again_and_again, stopped
from tests.support.prometheus import is_installed
from tests.support.ray_support import own_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed(), reason="no prometheus: apt-get install prometheus"),
]

PACE = TimeScale(faster=120.0, interval_s=0.5)  # six hours are three minutes
AT_ONCE = 8  # requests
REQUEST_S = 5.0  # longer than a rank may hang: it is replaced, and its requests end before that
STILL_S = 1.2  # late is a first token after 1 s, another one after 0.25 s
BETWEEN_CPU_S = 0.04  # of some steps
MEAN_S = 0.5  # of one that stops as it likes
ROWS = ["It broke after two days, and nobody has answered since. " * 12] * 32
LEAKS = """
from pathlib import Path

from actors.kv.block_manager import BlockManager
from planner.scheduling.task_order import by_plan

FILE = Path({file!r})
release, kept = BlockManager.release, []


def leak(blocks, released, **of):
    if FILE.exists():
        kept.append((released, of))
        return
    while kept:
        late, as_of = kept.pop()
        release(blocks, late, **as_of)
    release(blocks, released, **of)


class Leaks:
    def pick(self, tasks):
        return by_plan(tasks)


BlockManager.release = leak
"""


@pytest.fixture(scope="module")
def leak_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it is there blocks leak."""
    return tmp_path_factory.mktemp("leak") / "now"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, leak_file: Path) -> Iterator[World]:
    (leak_file.parent / "leaking.py").write_text(LEAKS.format(file=str(leak_file)))
    settings = [
        "groups.prefill_ranks=1",
        "priority.ls_max_wait_s=60",
        "priority.policy=leaking:Leaks",
        "prefill.saturation=1000000000000000",
        "planner.report_interval_s=0",
        f"http.request_timeout_s={REQUEST_S}",
        f"http.port={free_port()}",
        "channel.heartbeat_timeout_s=30",
    ]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.syspath_prepend(leak_file.parent)
        patch.setenv("PYTHONPATH", str(leak_file.parent))  # a cluster of its own inherits it
        stack.enter_context(own_ray(tmp_path_factory.mktemp("state")))
        folder = tmp_path_factory.mktemp("prometheus")
        yield World(stack, folder, Watched(PACE, scrape_s=0.5), settings)


def test_slow_burn_alerts_fire_for_a_rank_that_pauses(world: World) -> None:
    alerts = {"TandemTtftBurnsSlow", "TandemTbtBurnsSlow", "TandemTbtBurnsFast"}
    with still_now_and_then(world, BETWEEN_CPU_S, STILL_S):
        world.fire(alerts)
    with again_and_again(lambda: complete(world)):
        world.all_resolve(alerts)


def test_paused_rank_raises_prediction_alert(world: World) -> None:
    source = random.Random(0)

    def stand_still() -> None:
        pid = world.compute("attention-0", source.expovariate(1 / MEAN_S))
        with stopped(pid, source.expovariate(1 / MEAN_S)):
            pass

    with again_and_again(lambda: world.complete("ls", "and so on", tokens=24), AT_ONCE):
        with again_and_again(stand_still):
            world.fires("TandemPredictionsOff")
        world.resolves("TandemPredictionsOff")


def test_timeouts_burn_the_answers_objective(world: World) -> None:
    """A rank that hangs for so long is replaced, and then the next one hangs."""
    alerts = {"TandemAnswersBurnsFast", "TandemAnswersBurnsSlow"}
    with still_now_and_then(world, BETWEEN_CPU_S, REQUEST_S):
        world.fire(alerts)
    with again_and_again(lambda: complete(world)):
        world.all_resolve(alerts)


def test_saturation_lost_alert_fires_if_the_threshold_is_too_high(world: World) -> None:
    body = {"model": "bundled", "input": ROWS, "labels": [" no", " yes"]}
    with again_and_again(lambda: world.http.post("/v1/classify", json=body), AT_ONCE):
        world.fires("TandemSaturationLost")
    world.resolves("TandemSaturationLost")


def test_block_leak_alert_fires_and_resolves(world: World, leak_file: Path) -> None:
    leak_file.touch()
    world.complete("ls")
    world.fires("TandemBlocksLeak")
    leak_file.unlink()
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
