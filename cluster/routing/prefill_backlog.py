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

from cluster.routing.finder import Find, Finder
from cluster.routing.placer import Loneliness, RoutingConfig
from cluster.routing.prefill_peer import PrefillPeer
from cluster.routing.rank_client import RankClient
from cluster.routing.ticket import Ticket
from contracts.errors import NotReadyError, TooCostlyError
from contracts.requests import Priority
from contracts.routing import Prompt, RequestKey
from planner.routing.backlog import Backlog
from planner.routing.line import Lane
from planner.routing.request_work import RequestWork
from planner.routing.router import Router, RouterConfig
from planner.routing.saturation import SaturationConfig

ROUTER_BITS = 63


class PrefillBacklog:
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
        find: Find | None = None,
        number: int | None = None,
        *,
        follows: bool = False,
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
        self._finder = Finder(self._slots, find, self._found, follows=follows)
        self._follows = follows
        self._numbers = itertools.count()
        self._keys: dict[Ticket, RequestKey] = {}
        self._held: dict[RequestKey, Ticket] = {}  # not sent yet
        self._on_present: Callable[[], None] = lambda: None
        self._dispatching = False
        self._loneliness = Loneliness(self, self._give_up)

    @property
    def peers(self) -> list[PrefillPeer]:
        """Of the workers that there are."""
        return [peer for peer in self._slots if peer.serves]

    def listen(self, on_present: Callable[[], None]) -> None:
        self._on_present = on_present

    async def close(self) -> None:
        await self._finder.close()
        self._loneliness.end()
        for peer in self._slots:
            if not peer.serves:
                await peer.client.close()

    def load(self, worker: int) -> int:
        """Work of the open requests there, as this router knows it."""
        return self._router.load(worker)

    def put(self, ticket: Ticket) -> None:
        """Into the backlog, under a new key: the log of a worker that has lost it names the old."""
        key = RequestKey(self.number, next(self._numbers))
        self._keys[ticket], self._held[key] = key, ticket
        submit, hashes = ticket.submit, ticket.hashes(self.config.block_tokens)
        avoid = tuple(self._workers[client] for client in ticket.tried())
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

    def answered(self, ticket: Ticket) -> None: ...

    def remove(self, ticket: Ticket) -> None:
        """Without effect for what a worker's log speaks for."""
        key = self._keys.pop(ticket, None)
        if key is None:
            return
        if self._held.pop(key, None) is not None:
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
        self._finder.follow()
        is_alone = not any(peer.present for peer in self.peers)
        if is_alone and len(self._backlog):
            self._loneliness.begin()
            return
        self._loneliness.end()
        self._on_present()
        if len(self._backlog) == 0:
            return
        self._backlog.settle()
        for prompt, decision in self._backlog.take():
            ticket = self._held.pop(prompt.key)
            try:
                ticket.send(self._slots[decision.worker].client, prompt.key)
            except TooCostlyError as error:  # its own fault: the others go on
                ticket.fail(error)

    def _found(self, addresses: Mapping[str, str]) -> None:
        """Where the workers are now. One that is not named stays where it was, or goes."""
        for worker, peer in enumerate(self._slots):
            kept = None if self._follows else peer.client.address
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
        self._finder.look()
        self._on_change()

    def _give_up(self, error: NotReadyError) -> None:
        for ticket in self._keys:
            ticket.fail(error)


def _lane_of(ticket: Ticket) -> Lane:
    if ticket.submit.priority is Priority.BE:
        return Lane.LATER
    return Lane.REST if ticket.patient else Lane.FIRST
