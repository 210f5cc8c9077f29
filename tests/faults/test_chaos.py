"""Twenty faults under mixed load: the short form of `make chaos`."""

from __future__ import annotations

import asyncio

import pytest

import benchmarks.chaos.front_process
from benchmarks.chaos import verdict
from benchmarks.chaos.__main__ import ROLES, WEIGHTS, config
from benchmarks.chaos.plain import PlainTarget
from benchmarks.chaos.run import Run
from benchmarks.chaos.schedule import Mix, drawn
from cluster.files.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from tests.support.fork_server import start_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAULTS = 20
LONGEST_STOP_S = 2.5


@pytest.mark.usefixtures("ranks_are_forked")
def test_twenty_faults_lose_and_change_no_answer_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and seeded streams, classification and bulk rows, each compared with its answer before
    the first fault."""
    start_forked(monkeypatch, benchmarks.chaos.front_process)
    mix = Mix(WEIGHTS, stops_s=(0.5, LONGEST_STOP_S))
    faults = drawn(1, FAULTS, [*ROLES, "ingress-0", "ingress-1"], mix)
    with PlainTarget(resolve_model_folder(BUNDLED), config("float32")) as target:
        run = Run(target, faults)
        asyncio.run(run.go())
    told = verdict.summary(run, [])
    assert not told["failures"], verdict.table(run)
    assert told["faults"] == FAULTS
    for kind in ("greedy", "seeded", "classify", "bulk"):
        assert told["answers"][kind]["same"] >= 5
