"""Placement on prefill workers: connections and waiting requests around `planner.routing.router`.

put ─> Backlog ─ take ─> Ticket.send ─> prefill worker
          ▲                                 │ log: reports, snapshots
          └──── Router <── PrefillWorker <──┘ then the answers, to their tickets
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence

from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import FindRanks, RankMember, RankSet, RoutingConfig
from cluster.routing.ticket import Ticket
from contracts.errors import ChannelError, NotReadyError, PeerDeadError, TooCostlyError
from contracts.logs import event
from contracts.messages import RankState
from contracts.requests import Priority
from contracts.routing_messages import Prompt, RequestKey, WorkerReport, WorkerSnapshot
from planner.routing.backlog import Backlog, HeldRequest, Lane, Locality
from planner.routing.open_requests import RequestWork
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import MissingReportsError, SaturationConfig

log = logging.getLogger("tandem.prefill_router")

ROUTER_BITS = 63


class PrefillWorker(RankMember):
    """A member of the set that applies the worker's log to the router.

    It is available from a snapshot until the connection is lost or the worker reports that it is
    unhealthy; then the next connection must bring another snapshot.
    """

    def __init__(self, worker: int, client: RankClient, placer: PrefillPlacer) -> None:
        super().__init__(client, is_member=bool(client.address))
        self._worker, self._placer = worker, placer
        self._router = placer.router
        self._is_available = False
        self._is_unhealthy = self._is_leaving = False
        self._router.lose(worker, permanently=False)  # until its first snapshot
        if not self.is_member:
            self._router.retire(worker)

    @property
    def is_available(self) -> bool:
        return self._is_available

    @property
    def problem(self) -> str | None:
        name, problem = self.client.name, self.client.problem
        if problem is None and not self.is_available:
            problem = self.replace_reason or "has not reported its state yet"
        return problem if problem is None or name in problem else f"{name}: {problem}"

    def join(self, address: str) -> None:
        if not self.is_member:
            self._router.readmit(self._worker)
            self.client.disconnect()  # from an earlier worker of this number
        super().join(address)

    def leave(self) -> bool:
        if self.is_member:
            super().leave()
            self._router.retire(self._worker)
            self._placer.on_leaving(self._worker)
        elif self.client.address and self.client.state is None:
            self.client.disconnect()
        return False  # workers are numbered: another one may take the number

    def on_log(self, entry: WorkerReport | WorkerSnapshot) -> None:
        """Apply an entry. Raises PeerDeadError if it contradicts the log.

        The worker is then excluded until it is replaced.
        """
        if not self.is_available and isinstance(entry, WorkerReport):
            return  # predates the next snapshot
        try:
            self._apply(entry)
        except (MissingReportsError, ValueError) as error:
            name = self.client.name
            self.replace_reason = f"{name}: its log contradicts itself: {error}"
            event(log, "worker_abandoned", logging.ERROR, reason=self.replace_reason)
            self._mark_lost(permanently=not isinstance(error, MissingReportsError))
            raise PeerDeadError(self.replace_reason, name) from None
        self._placer.on_change()

    def _apply(self, entry: WorkerReport | WorkerSnapshot) -> None:
        if entry.worker != self._worker:
            raise ValueError(f"an entry of worker {entry.worker} in the log of {self._worker}")
        if isinstance(entry, WorkerReport):
            self._router.apply(entry)
            return
        self._router.restore(entry)
        if self._router.is_present(self._worker):
            self._is_available, self.replace_reason = not self._is_unhealthy, ""

    def on_state(self, state: RankState) -> None:
        if state.leaving and not self._is_leaving:  # another worker may take its number
            self._is_leaving = True
            self._router.retire(self._worker)
            self._placer.on_leaving(self._worker)
        if state.healthy and self._is_unhealthy:  # its reports were ignored meanwhile
            self._is_unhealthy = False
            self.client.reset_connection("is healthy again: reconnecting")
        elif not state.healthy and not self._is_unhealthy:
            self._is_unhealthy = True
            self._mark_lost(permanently=False)

    def on_lost(self, error: ChannelError) -> None:
        self._is_unhealthy = False
        if self._is_leaving and self.is_member:
            self._router.readmit(self._worker)
        self._is_leaving = False
        self._mark_lost(permanently=False)

    def _mark_lost(self, *, permanently: bool) -> None:
        self._is_available = False
        self._placer.on_lost(self._worker, permanently=permanently)


class PrefillPlacer:
    """The `Placer` of prefill workers, which are in the order of their ranks.

    clients: one per possible worker; without an address it is not started yet. find: see
    `RankSet`. locality: see `Backlog`.
    """

    def __init__(
        self,
        clients: Sequence[RankClient],
        config: RoutingConfig,
        saturation: SaturationConfig,
        work: RequestWork,
        find: FindRanks | None = None,
        *,
        locality: Locality | None = None,
    ) -> None:
        self.config = config
        self.number = secrets.randbits(ROUTER_BITS)  # identifies this router among all
        settings = RouterConfig(
            workers=len(clients),
            saturation=saturation,
            number=self.number,
            block_tokens=config.block_tokens,
        )
        self.router = Router(settings, work)
        self._backlog = Backlog(self.router, work, locality=locality)
        self._clients = clients
        self._workers = {client: worker for worker, client in enumerate(clients)}
        self.ranks: RankSet[PrefillWorker] = RankSet(
            "prefill worker",
            [PrefillWorker(*each, self) for each in enumerate(clients)],
            config.no_rank_timeout_s,
            self._fail_all,
            find,
        )
        self._numbers = itertools.count()
        self._keys: dict[Ticket, RequestKey] = {}
        self._queued: dict[RequestKey, Ticket] = {}  # not sent yet
        self._dispatching = False

    def put(self, ticket: Ticket) -> None:
        """Queue the request under a new key: the log of a worker that lost it uses the old one."""
        key = RequestKey(self.number, next(self._numbers))
        self._keys[ticket], self._queued[key] = key, ticket
        submit, hashes = ticket.submit, ticket.hashes(self.config.block_tokens)
        avoid = tuple(self._workers[client] for client in ticket.failed_clients())
        prompt = Prompt(key, len(submit.token_ids), hashes, submit.priority)
        is_full = self._backlog.put(
            HeldRequest(prompt, _lane_of(ticket), submit.caller, avoid, submit.token_ids)
        )
        self.on_change()
        if is_full and not avoid:  # of many simultaneous requests: do not wait for the last one
            self._dispatch()
            for client in self.ranks.clients:
                client.flush()

    def record_answer(self, ticket: Ticket) -> None: ...

    def remove(self, ticket: Ticket) -> None:
        """Forget the request, unless a worker's log accounts for it."""
        key = self._keys.pop(ticket, None)
        if key is None:
            return
        if self._queued.pop(key, None) is not None:
            self._backlog.remove(key)
        else:
            self.router.withdraw(key)
        self.on_change()

    def on_change(self) -> None:
        """Dispatch once for all events of one turn of the event loop."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        self.ranks.ensure_polling()
        self.ranks.update_timeout(has_waiting=bool(len(self._backlog)))
        if len(self._backlog) and not self.ranks.available:
            return
        self.ranks.on_available()
        if len(self._backlog) == 0:
            return
        self._backlog.settle()
        for prompt, worker in self._backlog.take():
            ticket = self._queued.pop(prompt.key)
            try:
                ticket.send(self._clients[worker], prompt.key)
            except TooCostlyError as error:  # concerns this request only
                ticket.fail(error)

    def on_leaving(self, worker: int) -> None:
        """Give the requests that are held for the worker to others."""
        self._backlog.lose(worker)
        self.on_change()

    def on_lost(self, worker: int, *, permanently: bool) -> None:
        """Forget the worker. Its requests are retried through `Ticket.on_rank_lost`."""
        self.router.lose(worker, permanently=permanently)
        self._backlog.lose(worker)
        self.ranks.ensure_polling()
        self.on_change()

    def _fail_all(self, error: NotReadyError) -> None:
        for ticket in self._keys:
            ticket.fail(error)


def _lane_of(ticket: Ticket) -> Lane:
    if ticket.submit.priority is Priority.BE:
        return Lane.LATER
    return Lane.REST if ticket.wait_for_slot else Lane.FIRST
