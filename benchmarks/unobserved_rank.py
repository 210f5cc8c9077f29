"""A rank's process that measures nothing of itself: the other side of benchmarks/observed_cost.py.
What is left of its metrics is what somebody asks for."""

from __future__ import annotations

from actors.telemetry.rank_metrics import RankMetrics
from actors.telemetry.telemetry import Telemetry
from tests.support.rank_process import main


def _nothing(*_: object, **__: object) -> None:
    pass


def measure_nothing() -> None:
    """In this process, from now on."""
    for kind, name in (
        (Telemetry, "count"),
        (Telemetry, "set"),
        (Telemetry, "observe"),
        (RankMetrics, "span"),
    ):
        setattr(kind, name, _nothing)


if __name__ == "__main__":
    measure_nothing()
    main()
