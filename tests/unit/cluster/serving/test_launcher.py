"""An ingress without its launcher answers what it can, and says so of the rest."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from ray.exceptions import RayError

from cluster.fleet.codec import encode_scale
from cluster.serving.launcher import AskGroups, Launcher
from contracts.clock import monotonic_s
from contracts.errors import NotReadyError
from contracts.scaling import ScaleState, ScaleWanted


async def _silent(*_: Any) -> Any:
    raise RayError("the actor died")


SILENT = AskGroups(_silent, _silent, _silent, _silent, _silent)


@pytest.mark.parametrize(
    ("asked", "event"),
    [
        (lambda launcher: launcher.status(), "rank_status_failed"),
        (lambda launcher: launcher.trace(1.0), "trace_failed"),
        (lambda launcher: launcher.offset(), "trace_failed"),
        (lambda launcher: launcher.scale(None), "scale_not_asked"),
    ],
)
def test_without_a_launcher_the_ingress_is_not_ready_to_tell(
    asked: Any, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "tandem.ingress"),
        pytest.raises(NotReadyError, match="the launcher of the ranks does not answer"),
    ):
        asyncio.run(asked(Launcher(SILENT)))
    assert event in caplog.text
    assert "the actor died" in caplog.text


def test_without_a_launcher_the_ingress_has_metrics_of_its_own_only() -> None:
    assert asyncio.run(Launcher(SILENT).metrics()) == ""


def test_a_launcher_is_asked_for_what_is_wanted_and_its_clock_is_compared() -> None:
    asked: list[bytes] = []

    async def scale(body: bytes) -> tuple[bytes, bytes]:
        asked.append(body)
        return encode_scale(ScaleState()), b""

    async def clock() -> tuple[float, str]:
        return monotonic_s() - 3600, "another boot"

    launcher = Launcher(SILENT._replace(scale=scale, clock=clock))
    wanted = ScaleWanted(expert_ranks=2)
    assert asyncio.run(launcher.scale(wanted)) == ScaleState()
    asyncio.run(launcher.scale(None))
    assert asked == [encode_scale(wanted), b""]
    ahead = asyncio.run(launcher.offset())
    assert ahead.applied_s == pytest.approx(3600, abs=1.0)
    assert not ahead.is_shared
