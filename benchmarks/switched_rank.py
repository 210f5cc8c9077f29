"""A rank's process that is observed or not as a byte in a file says, at any moment: what
benchmarks/observed_switch.py asks. Whoever is not observed counts nothing and keeps no span."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.telemetry.rank_metrics import RankMetrics
from actors.telemetry.telemetry import Telemetry
from actors.telemetry.timeline import Timeline
from tests.support.rank_process import main

SWITCH = "TANDEM_BENCHMARK_SWITCH"  # names the file


class Switch:
    """The byte, in memory that all processes share."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    @property
    def is_on(self) -> bool:
        return self._byte[0] == 1

    def turn(self, *, on: bool) -> None:
        self._byte[0] = int(on)


def follow_switch() -> Switch:
    """In this process, from now on."""
    switch = Switch(Path(os.environ[SWITCH]))
    for kind, name in (
        (Telemetry, "count"),
        (Telemetry, "set"),
        (Telemetry, "observe"),
        (RankMetrics, "span"),
    ):
        setattr(kind, name, _switched(getattr(kind, name), switch))
    keeps = property(lambda _: switch.is_on, lambda _, value: None)
    setattr(Timeline, "keeps", keeps)  # noqa: B010 - it is no name of its own
    return switch


def _switched(does: Callable[..., None], switch: Switch) -> Callable[..., None]:
    def does_or_not(*args: Any, **kwargs: Any) -> None:
        if switch.is_on:
            does(*args, **kwargs)

    return does_or_not


if __name__ == "__main__":
    follow_switch()
    main()
