"""Ten faults under mixed load: the short form of `make chaos`."""

import asyncio

import pytest

import benchmarks.robustness.front_process
from benchmarks.robustness import verdict
from benchmarks.robustness.__main__ import ROLES, WEIGHTS, config
from benchmarks.robustness.plain import PlainTarget
from benchmarks.robustness.questions import light_load
from benchmarks.robustness.run import Run
from benchmarks.robustness.schedule import Mix, drawn
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from tests.support.fork_server import fork_server, start_forked

pytestmark = pytest.mark.timeout(400)

FAULTS = 10
STOPS_S = (0.2, 2.0)


@pytest.mark.usefixtures("ranks_are_forked")
def test_every_answer_is_unchanged_over_ten_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server().import_too("benchmarks.robustness.front")
    start_forked(monkeypatch, benchmarks.robustness.front_process)
    mix = Mix(WEIGHTS, STOPS_S, longest_pause_s=0.3)
    faults = drawn(1, FAULTS, [*ROLES, "ingress-0", "ingress-1"], mix)
    with PlainTarget(resolve_model_folder(BUNDLED), config("float32")) as target:
        run = Run(target, faults, light_load())
        asyncio.run(run.go())
    summary = verdict.summary(run, [])
    assert not summary["failures"], verdict.table(run)
    assert summary["faults"] == FAULTS
    for kind in ("greedy", "seeded", "classify", "bulk"):
        assert summary["answers"][kind]["same"] >= 5
