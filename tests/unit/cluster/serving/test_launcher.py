"""An ingress without its launcher answers what it can, and says so of the rest."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from ray.exceptions import RayError

from cluster.fleet.codec import encode_scale
from cluster.serving.launcher import GroupsClient, Launcher
from contracts.clock import monotonic_s
from contracts.errors import NotReadyError
from contracts.scaling import ScaleState, ScaleTarget


async def _silent(*_: Any) -> Any:
    raise RayError("the actor died")


SILENT = GroupsClient(_silent, _silent, _silent, _silent, _silent)


@pytest.mark.parametrize(
    ("calls", "event"),
    [
        (lambda launcher: launcher.status(), "rank_status_failed"),
        (lambda launcher: launcher.trace(1.0), "trace_failed"),
        (lambda launcher: launcher.offset(), "trace_failed"),
        (lambda launcher: launcher.scale(None), "scale_request_failed"),
    ],
)
def test_status_without_launcher_is_not_ready(
    calls: Any, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "tandem.ingress"),
        pytest.raises(NotReadyError, match="the launcher of the ranks does not answer"),
    ):
        asyncio.run(calls(Launcher(SILENT)))
    assert event in caplog.text
    assert "the actor died" in caplog.text


def test_launcher_receives_requests_and_clock_is_compared() -> None:
    calls: list[bytes] = []

    async def scale(body: bytes) -> tuple[bytes, bytes]:
        calls.append(body)
        return encode_scale(ScaleState()), b""

    async def clock() -> tuple[float, str]:
        return monotonic_s() - 3600, "another boot"

    launcher = Launcher(SILENT._replace(scale=scale, clock=clock))
    requested = ScaleTarget(expert_ranks=2)
    assert asyncio.run(launcher.scale(requested)) == ScaleState()
    asyncio.run(launcher.scale(None))
    assert calls == [encode_scale(requested), b""]
    ahead = asyncio.run(launcher.offset())
    assert ahead.applied_s == pytest.approx(3600, abs=1.0)
    assert not ahead.is_shared
