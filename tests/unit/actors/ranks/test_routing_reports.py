"""Routing reports of attention ranks over the planner's link."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.planner_messages import RoutingSampleReport
from models.spec.model import read_spec
from tests.support.fake_planner import DEADLINE_S, FakePlanner
from tests.support.group_harness import RankConnection, ThreadGroup, greedy, group_config
from tests.support.tiny_models import prompts


@pytest.mark.parametrize("placement", [{"rebalance": "continuous"}, {"record": "/tmp"}])
def test_routing_paths_are_reported_if_needed(
    tiny_checkpoint: Callable[..., Path], placement: dict[str, Any]
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    spec = read_spec(folder)
    rows = prompts(4, [40, 33, 57])
    config = group_config(1, 2, placement={**placement, "sample_tokens": 64})
    with ThreadGroup(folder, config) as group, FakePlanner(token=group.token) as planner:
        group.join_planner(planner.address)
        with group.client() as client:
            report = _first(planner, client, rows)
    ids_P2 = np.frombuffer(report.ids, "<i4").reshape(-1, 2)
    shape = len(ids_P2), len(spec.moe_layers), spec.top_k
    paths_PLK = np.frombuffer(report.paths, "<i2").reshape(shape)
    assert report.rank == "attention-0"
    assert 0 < len(ids_P2) <= min(report.tokens, 32)
    assert paths_PLK.min() >= 0
    assert paths_PLK.max() < spec.num_experts
    sets = paths_PLK.reshape(-1, spec.top_k).tolist()
    assert all(len(set(experts)) == spec.top_k for experts in sets)


def _first(
    planner: FakePlanner, client: RankConnection, rows: list[list[int]]
) -> RoutingSampleReport:
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        client.generated(client.submit(rows[0], sampling=greedy(4)))
        while not planner.received.empty():
            message = planner.received.get()
            if isinstance(message, RoutingSampleReport):
                return message
    raise AssertionError("nothing was reported")
