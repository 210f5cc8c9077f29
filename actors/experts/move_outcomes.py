"""What became of an expert rank's moves: counted, told to the planner, and in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from actors.experts.brought import Brought
from actors.experts.generations import Report
from contracts.logs import event
from contracts.planning import Outcome, PlacementOutcome

log = logging.getLogger("tandem.experts")

_FAILURES = 8  # are remembered


class MoveOutcomes:
    """counts, loaded_bytes, load_s: so far. failures: by generation, why the latest that have
    failed did. Read from any thread."""

    def __init__(self, rank: str, report: Callable[[PlacementOutcome], None]) -> None:
        self._rank, self._report = rank, report
        self.counts = dict.fromkeys(Outcome, 0)
        self.loaded_bytes, self.load_s = 0, 0.0
        self.failures: dict[int, str] = {}

    def brought(self, brought: Brought[Any]) -> None:
        self.loaded_bytes += brought.loaded_bytes
        self.load_s += brought.seconds

    def ended(self, report: Report, brought: Brought[Any] | None) -> None:
        """brought: what came last."""
        if brought is None or brought.generation != report.generation:
            brought = Brought(report.generation, None)
        level = logging.WARNING if report.outcome is Outcome.FAILED else logging.INFO
        self.counts[report.outcome] += 1
        if report.outcome is Outcome.FAILED:
            latest = list(self.failures.items())[1 - _FAILURES :]
            self.failures = dict([*latest, (report.generation, report.reason)])
        event(
            log,
            f"placement_{report.outcome}",
            level,
            rank=self._rank,
            generation=report.generation,
            reason=report.reason,
            loaded_bytes=brought.loaded_bytes,
            seconds=round(brought.seconds, 3),
        )
        self._report(
            PlacementOutcome(
                rank=self._rank,
                generation=report.generation,
                outcome=report.outcome,
                reason=report.reason,
                loaded_bytes=brought.loaded_bytes,
                seconds=brought.seconds,
            )
        )
