"""A prefill worker's log: its changes since the last report, and their sum.

The loop records events and makes at most one report per iteration. The worker applies its own
reports as routers do (planner/routing/worker_state.py), so that snapshots equal the routers' state
and a contradictory report is detected here first.
"""

from __future__ import annotations

from collections.abc import Iterable

from contracts.requests import Priority
from contracts.routing_messages import (
    Calibration,
    Prompt,
    PromptProgress,
    RequestKey,
    WorkerReport,
    WorkerSnapshot,
)
from planner.routing.request_work import RequestWork
from planner.routing.worker_state import WorkerState


class WorkerLog:
    """Owned by the loop thread."""

    def __init__(self, worker: int, epoch: int, work: RequestWork, block_tokens: int) -> None:
        self._worker = worker
        self._epoch = epoch
        self._state = WorkerState(work, block_tokens)
        self._number = -1
        self._calibration: Calibration | None = None
        self._accepted: list[Prompt] = []
        self._progress: dict[RequestKey, PromptProgress] = {}
        self._cache: dict[bytes, bool] = {}  # latest state by block
        self._ended: list[RequestKey] = []
        self._open: set[RequestKey] = set()

    def __contains__(self, key: RequestKey) -> bool:
        """Return True if a request with this key is open."""
        return key in self._open

    def ends(self, key: RequestKey) -> bool:
        """Return True if the next report ends this request."""
        return key in self._ended

    @property
    def load(self) -> int:
        """Work of the open requests, as of the last report."""
        return self._state.requests.visible_to(Priority.BE).load

    @property
    def calibration(self) -> Calibration | None:
        """The calibration last reported."""
        return self._state.calibration

    def calibrated(self, calibration: Calibration) -> None:
        self._calibration = calibration

    def accepted(self, prompt: Prompt) -> None:
        self._open.add(prompt.key)
        self._accepted.append(prompt)

    def progressed(self, key: RequestKey, done_tokens: int, until_tokens: int = 0) -> None:
        self._progress[key] = PromptProgress(key, done_tokens, until_tokens)

    def stored(self, digests: Iterable[bytes]) -> None:
        self._cache.update(dict.fromkeys(digests, True))

    def evicted(self, digests: Iterable[bytes]) -> None:
        self._cache.update(dict.fromkeys(digests, False))

    def ended(self, key: RequestKey) -> None:
        self._open.remove(key)
        self._ended.append(key)

    def report(self) -> WorkerReport | None:
        """Return the changes since the last report, or None if there are none."""
        noted = (self._accepted, self._progress, self._cache, self._ended)
        if self._calibration is None and not any(noted):
            return None
        self._number += 1
        report = WorkerReport(
            worker=self._worker,
            epoch=self._epoch,
            number=self._number,
            calibration=self._calibration,
            accepted=tuple(self._accepted),
            progress=tuple(self._progress.values()),
            stored=tuple(digest for digest, held in self._cache.items() if held),
            evicted=tuple(digest for digest, held in self._cache.items() if not held),
            ended=tuple(self._ended),
        )
        self._calibration = None
        self._accepted, self._progress, self._cache, self._ended = [], {}, {}, []
        self._state.apply(report)
        return report

    def snapshot(self) -> WorkerSnapshot:
        """Return the sum of all reports, for a new client."""
        state = self._state
        return WorkerSnapshot(
            worker=self._worker,
            epoch=self._epoch,
            number=self._number,
            calibration=state.calibration,
            committed=state.committed(),
            requests=tuple(state.requests.entries()),
        )
