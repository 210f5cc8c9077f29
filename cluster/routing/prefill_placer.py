"""Which prefill worker runs a request, and when: sockets and waiting around
`planner/routing/router.py`.

    put ─> Backlog ─ take ─> Ticket.send ─> prefill worker
              ▲                                │ log: reports, snapshots
              └──── Router <── PrefillPeer <───┘ then the answers, to their tickets
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence

from cluster.routing.placer import NoRankTimeout, RoutingConfig
from cluster.routing.prefill_peer import PrefillPeer
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_discovery import FindRanks, RankDiscovery
from cluster.routing.ticket import Ticket
from contracts.errors import NotReadyError, TooCostlyError
from contracts.requests import Priority
from contracts.routing_messages import Prompt, RequestKey
from planner.routing.backlog import Backlog
from planner.routing.request_work import RequestWork
from planner.routing.router import Router, RouterConfig
from planner.routing.saturation import SaturationConfig
from planner.routing.worker_queue import Lane

ROUTER_BITS = 63


class PrefillPlacer:
    """The `placer.Placer` of prefill workers, which are in the order of their ranks.

    clients: of all numbers that there may be; one without an address is none yet. find: where the
    workers are now, asked while one of them is missing; follows: always, for they come and go.
    number: of this router among all; None: a random one.
    """

    kind = "prefill worker"

    def __init__(
        self,
        clients: Sequence[RankClient],
        config: RoutingConfig,
        saturation: SaturationConfig,
        work: RequestWork,
        find: FindRanks | None = None,
        number: int | None = None,
        *,
        poll_always: bool = False,
    ) -> None:
        self.config = config
        self.number = secrets.randbits(ROUTER_BITS) if number is None else number
        settings = RouterConfig(
            workers=len(clients),
            saturation=saturation,
            number=self.number,
            block_tokens=config.block_tokens,
        )
        self._router = Router(settings, work)
        self._backlog = Backlog(self._router, work)
        self._slots = [
            PrefillPeer(
                index, client, self._router, self._on_change, self._on_lost, self._on_leaving
            )
            for index, client in enumerate(clients)
        ]
        self._workers = {client: worker for worker, client in enumerate(clients)}
        self._discovery = RankDiscovery(
            self._slots, find, self._on_addresses, poll_always=poll_always
        )
        self._poll_always = poll_always
        self._numbers = itertools.count()
        self._keys: dict[Ticket, RequestKey] = {}
        self._queued: dict[RequestKey, Ticket] = {}  # not sent yet
        self._on_available: Callable[[], None] = lambda: None
        self._dispatching = False
        self._no_rank_timeout = NoRankTimeout(self, self._fail_all)

    @property
    def peers(self) -> list[PrefillPeer]:
        """Of the workers that there are."""
        return [peer for peer in self._slots if peer.is_member]

    def subscribe(self, on_available: Callable[[], None]) -> None:
        self._on_available = on_available

    async def close(self) -> None:
        await self._discovery.close()
        self._no_rank_timeout.cancel()
        for peer in self._slots:
            if not peer.is_member:
                await peer.client.close()

    def load(self, worker: int) -> int:
        """Work of the open requests there, as this router knows it."""
        return self._router.load(worker)

    def put(self, ticket: Ticket) -> None:
        """Into the backlog, under a new key: the log of a worker that has lost it names the old."""
        key = RequestKey(self.number, next(self._numbers))
        self._keys[ticket], self._queued[key] = key, ticket
        submit, hashes = ticket.submit, ticket.hashes(self.config.block_tokens)
        avoid = tuple(self._workers[client] for client in ticket.failed_clients())
        is_full = self._backlog.put(
            Prompt(key, len(submit.token_ids), hashes, submit.priority),
            _lane_of(ticket),
            submit.token_ids,
            submit.caller,
            avoid,
        )
        self._on_change()
        if is_full and not avoid:  # of many that come at once: a worker need not wait for the last
            self._dispatch()
            for peer in self.peers:
                peer.client.flush()

    def record_answer(self, ticket: Ticket) -> None: ...

    def remove(self, ticket: Ticket) -> None:
        """Without effect for what a worker's log speaks for."""
        key = self._keys.pop(ticket, None)
        if key is None:
            return
        if self._queued.pop(key, None) is not None:
            self._backlog.remove(key)
        else:
            self._router.withdraw(key)
        self._on_change()

    # ---- dispatch

    def _on_change(self) -> None:
        """Requests may go now. Once for all that happens in one turn of the event loop."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        self._discovery.ensure_polling()
        has_no_rank = not any(peer.is_available for peer in self.peers)
        if has_no_rank and len(self._backlog):
            self._no_rank_timeout.start()
            return
        self._no_rank_timeout.cancel()
        self._on_available()
        if len(self._backlog) == 0:
            return
        self._backlog.settle()
        for prompt, decision in self._backlog.take():
            ticket = self._queued.pop(prompt.key)
            try:
                ticket.send(self._slots[decision.worker].client, prompt.key)
            except TooCostlyError as error:  # its own fault: the others go on
                ticket.fail(error)

    def _on_addresses(self, addresses: Mapping[str, str]) -> None:
        """Where the workers are now. One that is not named stays where it was, or goes."""
        for worker, peer in enumerate(self._slots):
            kept = None if self._poll_always else peer.client.address
            if peer.settle(addresses.get(peer.client.name, kept)):
                self._on_leaving(worker)

    def _on_leaving(self, worker: int) -> None:
        """What is held for it goes to others."""
        self._backlog.lose(worker)
        self._on_change()

    def _on_lost(self, worker: int, *, for_good: bool) -> None:
        """Its requests hear of it themselves (`Ticket.lose`)."""
        self._router.lose(worker, for_good=for_good)
        self._backlog.lose(worker)
        self._discovery.poll()
        self._on_change()

    def _fail_all(self, error: NotReadyError) -> None:
        for ticket in self._keys:
            ticket.fail(error)


def _lane_of(ticket: Ticket) -> Lane:
    if ticket.submit.priority is Priority.BE:
        return Lane.LATER
    return Lane.REST if ticket.wait_for_slot else Lane.FIRST
