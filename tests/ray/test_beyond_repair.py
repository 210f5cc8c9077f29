"""`tandem serve` whose expert rank is killed: it ends by itself, and says why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.http.server import free_port

pytestmark = pytest.mark.ray

DEADLINE_S = 120.0


def test_a_server_whose_lost_expert_rank_is_not_replaced_in_time_ends_with_status_3_and_its_name(
    tmp_path: Path,
) -> None:
    """FINDINGS B15: it answered 503 for ever, and no orchestrator restarted it."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "cluster", "serve", "--port", str(free_port())]
    command += ["--set", "groups.recovery_timeout_s=1", "--set", "planner.enabled=false"]
    with (tmp_path / "errors").open("w+") as errors:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if found := re.match(r"\s*expert-0\s+pid (\d+)", line):
                    os.kill(int(found[1]), signal.SIGKILL)
                    break
            assert server.wait(DEADLINE_S) == 3
        finally:
            server.kill()
            server.wait(DEADLINE_S)
        errors.seek(0)
        said = [line for line in errors if line.startswith("tandem serve:")]
    assert len(said) == 1
    assert "the server has failed" in said[0]
    assert "expert-0" in said[0]
