"""What a router hears of one prefill worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from cluster.routing.rank_client import RankClient
from contracts.errors import ChannelError, PeerDeadError
from contracts.logs import event
from contracts.messages import RankState
from contracts.routing_messages import WorkerReport, WorkerSnapshot
from planner.routing.router import Router
from planner.routing.worker_state import MissingReportsError

log = logging.getLogger("tandem.prefill_router")


class OnLost(Protocol):
    def __call__(self, worker: int, *, for_good: bool) -> None: ...


class PrefillPeer:
    """A `rank_client.Listener`: folds the worker's log into the router.

    present: between its snapshot and its loss, while it says that it is healthy. After that it is
    absent until another connection brings another snapshot. contradiction: why it is given up.
    serves: it is one of the workers that there are; else nothing new is sent to it.
    """

    def __init__(
        self,
        worker: int,
        client: RankClient,
        router: Router,
        on_change: Callable[[], None],
        on_lost: OnLost,
        on_leaving: Callable[[int], None] = lambda worker: None,
    ) -> None:
        self.client = client
        self.is_available = False
        self.is_member = bool(client.address)
        self._worker = worker
        self._router = router
        self._on_change = on_change
        self._on_lost, self._on_leaving = on_lost, on_leaving
        self._is_unhealthy = self._is_leaving = False
        self.replace_reason = ""
        router.lose(worker, for_good=False)  # until it is heard
        if not self.is_member:
            router.retire(worker)
        client.subscribe(self)

    def settle(self, address: str | None) -> bool:
        """Where the worker is now; None: it is to go, when it has answered what it has. Whether it
        takes nothing more from here on."""
        if address is None:
            return self._retire()
        if self.is_member:
            self.client.set_address(address)
            return False
        self.is_member = True
        self._router.readmit(self._worker)
        self.client.disconnect()  # one of this number that was there before
        self.client.set_address(address)
        self.client.start()
        event(log, "worker_joined", name=self.client.name)
        return False

    def _retire(self) -> bool:
        if self.is_member:
            self.is_member = False
            self._router.retire(self._worker)
            event(log, "worker_draining", name=self.client.name)
            return True
        if self.client.address and self.client.state is None:
            self.client.disconnect()
        return False

    @property
    def problem(self) -> str | None:
        """Why it takes no requests now, or None."""
        name, problem = self.client.name, self.client.problem
        if problem is None and not self.is_available:
            problem = self.replace_reason or "has not told its state yet"
        return problem if problem is None or name in problem else f"{name}: {problem}"

    def on_log(self, entry: WorkerReport | WorkerSnapshot) -> None:
        """Raises PeerDeadError if the entry contradicts what the worker said before: it is given
        up, until it is replaced."""
        if not self.is_available and isinstance(entry, WorkerReport):
            return  # of the time before the next snapshot
        try:
            self._apply(entry)
        except (MissingReportsError, ValueError) as error:
            name = self.client.name
            self.replace_reason = f"{name}: its log contradicts itself: {error}"
            event(log, "worker_abandoned", logging.ERROR, reason=self.replace_reason)
            self._mark_lost(for_good=not isinstance(error, MissingReportsError))
            raise PeerDeadError(self.replace_reason, name) from None
        self._on_change()

    def _apply(self, entry: WorkerReport | WorkerSnapshot) -> None:
        if entry.worker != self._worker:
            raise ValueError(f"an entry of worker {entry.worker} in the log of {self._worker}")
        if isinstance(entry, WorkerReport):
            self._router.apply(entry)
            return
        self._router.restore(entry)
        if self._router.is_present(self._worker):
            self.is_available, self.replace_reason = not self._is_unhealthy, ""

    def on_state(self, state: RankState) -> None:
        if state.leaving and not self._is_leaving:  # another one of its number may come
            self._is_leaving = True
            self._router.retire(self._worker)
            self._on_leaving(self._worker)
        if state.healthy and self._is_unhealthy:  # what it said meanwhile was not listened to
            self._is_unhealthy = False
            self.client.reset_connection("is healthy again: connecting anew")
        elif not state.healthy and not self._is_unhealthy:
            self._is_unhealthy = True
            self._mark_lost(for_good=False)

    def on_lost(self, error: ChannelError) -> None:
        self._is_unhealthy = False
        if self._is_leaving and self.is_member:
            self._router.readmit(self._worker)
        self._is_leaving = False
        self._mark_lost(for_good=False)

    def _mark_lost(self, *, for_good: bool) -> None:
        self.is_available = False
        self._on_lost(self._worker, for_good=for_good)
