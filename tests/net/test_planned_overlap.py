"""What benchmarks/cases/planned_overlap.py stands on, at its smallest: plans over a limited link.

Slow: by default tests/oracle/test_group_fidelity.py holds plans to equal logits, and
tests/net/test_two_nodes.py a group between two nodes to the right answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.support.two_nodes import ENVIRONMENT, TwoNodes

pytestmark = [pytest.mark.net, pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MEGABITS_PER_S = 200
TIMEOUT_S = 150


def test_two_plans_over_a_limited_link_give_equal_logits(two_nodes: TwoNodes) -> None:
    two_nodes.limit_rate(MEGABITS_PER_S)
    done = subprocess.run(
        [*two_nodes.inside(0), sys.executable, "-m", "tests.net.two_plans"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pppipe, chunked = (torch.tensor(rows) for rows in json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(chunked, pppipe, atol=1e-5, rtol=0.0)
