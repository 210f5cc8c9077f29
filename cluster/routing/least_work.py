"""Which attention rank runs a request: it goes there at once, or waits while none has room.

The choice is a pure function over what is known of each rank. A rank's cost for a request is the
work in front of it: tokens outstanding there, without those of BE requests that it overtakes, plus
the request's own prompt tokens that are not in its prefix cache. On equally busy ranks that is the
longest prefix match; without any match it is the least load; and one prefix that all requests share
does not pile them up on one rank.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cluster.routing.finder import Find, Finder
from cluster.routing.placer import Loneliness, RoutingConfig
from cluster.routing.rank_client import RankClient
from cluster.routing.ticket import Ticket
from contracts.errors import ChannelError, NotReadyError, TandemError
from contracts.logs import event
from contracts.messages import RankState
from contracts.requests import Priority
from contracts.routing import WorkerReport, WorkerSnapshot
from contracts.worker import Group

log = logging.getLogger("tandem.routing")

MAX_PREFIX_BLOCKS = 1 << 16  # known of each rank
_PREFIX = f"{Group.ATTENTION.value}-"


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice may depend on. load_tokens: prompt and generated tokens still outstanding, of
    what the request does not overtake."""

    name: str
    load_tokens: int
    prefix_tokens: int


Choose = Callable[[Sequence[RankView]], RankView]


def least_work(ranks: Sequence[RankView]) -> RankView:
    """The rank with the least work before this request is done; ties go to the longer prefix,
    then to the first."""
    return min(ranks, key=lambda rank: (rank.load_tokens - rank.prefix_tokens, -rank.prefix_tokens))


class PrefixTable:
    """Hashes of the blocks recently sent to one rank; the oldest are forgotten."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are known."""
        for index, digest in enumerate(hashes):
            if digest not in self._blocks:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        for digest in reversed(hashes):  # so that a chain's end is forgotten before its beginning
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class _Rank:
    """A `rank_client.Listener`, and what this ingress has sent there. serves: it is one of those
    that there are; else nothing new is sent to it."""

    contradiction = ""

    def __init__(self, client: RankClient, on_lost: Callable[[], None]) -> None:
        self.client = client
        self.serves = True
        self._on_lost = on_lost
        self.prefixes = PrefixTable(MAX_PREFIX_BLOCKS)
        self._waiting: Counter[Priority] = Counter()
        self._load_tokens: Counter[Priority] = Counter()
        self.on_present: Callable[[], None] = lambda: None
        self._connection = 0
        client.listen(self)

    @property
    def present(self) -> bool:
        return self.serves and self.client.problem is None

    @property
    def problem(self) -> str | None:
        return self.client.problem

    def book(self, priority: Priority, tokens: int, waiting: int) -> None:
        """So much more; less, if negative."""
        self._load_tokens[priority] += tokens
        self._waiting[priority] += waiting

    def waiting(self, priority: Priority) -> int:
        """Requests of that class without a first answer."""
        return self._waiting[priority]

    def view(self, priority: Priority, hashes: Sequence[bytes], block_tokens: int) -> RankView:
        """What one of that class meets here."""
        if self._connection != self.client.connections:  # a new process, with an empty cache
            self._connection = self.client.connections
            self.prefixes.clear()
        return RankView(
            name=self.client.name,
            load_tokens=sum(n for other, n in self._load_tokens.items() if other <= priority),
            prefix_tokens=self.prefixes.match(hashes) * block_tokens,
        )

    def on_state(self, state: RankState) -> None:
        if state.healthy:
            self.on_present()

    def on_log(self, entry: WorkerReport | WorkerSnapshot) -> None: ...

    def on_lost(self, error: ChannelError) -> None:
        self._on_lost()


@dataclass(slots=True)
class _Booked:
    """Of a request that has been sent. waits: nothing of it has come back from there."""

    rank: _Rank
    tokens: int
    waits: bool = True


Connect = Callable[[str, str], RankClient]
"""Name and client address of a rank → a client of it, not yet started."""


class LeastWork:
    """The `placer.Placer` of attention ranks. choose: which of those that have room. find: where
    they are now, asked while one of them is missing, or where they come and go at all times.
    connect: a client of one that comes later; None: none does, and none goes."""

    kind = "attention rank"

    def __init__(
        self,
        clients: Sequence[RankClient],
        config: RoutingConfig,
        choose: Choose = least_work,
        find: Find | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.config = config
        self._ranks = [_Rank(client, self._on_lost) for client in clients]  # with those that go
        self._connect = connect
        self._finder = Finder(self._ranks, find, self._found, follows=connect is not None)
        self._choose = choose
        self._on_present: Callable[[], None] = lambda: None
        self._booked: dict[Ticket, _Booked] = {}
        self._held: dict[Priority, dict[Ticket, None]] = {priority: {} for priority in Priority}
        self._loneliness = Loneliness(self, self._give_up)

    @property
    def peers(self) -> list[_Rank]:
        """Of the ranks that there are."""
        return [rank for rank in self._ranks if rank.serves]

    def listen(self, on_present: Callable[[], None]) -> None:
        self._on_present = on_present
        for rank in self._ranks:
            rank.on_present = self._present

    def _present(self) -> None:
        self._dispatch()
        self._on_present()

    def put(self, ticket: Ticket) -> None:
        held = self._held[ticket.submit.priority]
        rank = None if held else self._chosen(ticket)
        if rank is not None:
            self._send(ticket, rank)
            return
        held[ticket] = None
        self._wait_if_alone()

    def answered(self, ticket: Ticket) -> None:
        booked = self._booked.get(ticket)
        if booked is not None and booked.waits:
            booked.waits = False
            booked.rank.book(ticket.submit.priority, 0, -1)
            self._dispatch()

    def remove(self, ticket: Ticket) -> None:
        priority = ticket.submit.priority
        self._held[priority].pop(ticket, None)
        booked = self._booked.pop(ticket, None)
        if booked is not None:
            booked.rank.book(priority, -booked.tokens, -booked.waits)
            self._dispatch()

    async def close(self) -> None:
        self._loneliness.end()
        await self._finder.close()
        for rank in self._ranks:
            if not rank.serves:
                await rank.client.close()

    # ---- those that wait for a rank

    def _dispatch(self) -> None:
        """As many as there is room for, in the order in which they came."""
        self._finder.follow()
        self._wait_if_alone()
        for held in self._held.values():
            while held and (rank := self._chosen(ticket := next(iter(held)))) is not None:
                del held[ticket]
                try:
                    self._send(ticket, rank)
                except TandemError as error:  # its own fault: the others go on
                    ticket.fail(error)

    def _wait_if_alone(self) -> None:
        if any(self._held.values()) and not any(rank.present for rank in self.peers):
            self._loneliness.begin()
        else:
            self._loneliness.end()

    def _give_up(self, error: NotReadyError) -> None:
        for held in self._held.values():
            for ticket in held:
                ticket.fail(error)
            held.clear()

    # ---- ranks

    def _send(self, ticket: Ticket, rank: _Rank) -> None:
        submit = ticket.submit
        tokens = submit.prompt_tokens + (submit.sampling.max_tokens if submit.sampling else 0)
        self._booked[ticket] = _Booked(rank, tokens)
        rank.book(submit.priority, tokens, 1)
        ticket.send(rank.client)
        rank.client.flush()

    def _chosen(self, ticket: Ticket) -> _Rank | None:
        """The rank for this request; None: none has room. One that waits for expert ranks, or that
        has failed it, is taken only where there is no other."""
        tried, present = ticket.tried(), [rank for rank in self.peers if rank.present]
        able = [rank for rank in present if not rank.client.waits] or present
        others = [rank for rank in able if rank.client not in tried]
        priority, most = ticket.submit.priority, self.config.max_waiting
        free = [rank for rank in others or able if rank.waiting(priority) < most]
        if len(self.peers) == 1 or not free:
            return free[0] if free else None
        block_tokens = self.config.block_tokens
        hashes = ticket.hashes(block_tokens)
        by_name = {rank.client.name: rank for rank in free}
        views = [rank.view(priority, hashes, block_tokens) for rank in free]
        chosen = by_name[self._choose(views).name]
        chosen.prefixes.add(hashes)
        return chosen

    def _found(self, addresses: Mapping[str, str]) -> None:
        """Where the ranks are now. One that is not named stays where it was, or goes."""
        named = {name: at for name, at in addresses.items() if name.startswith(_PREFIX)}
        for rank in list(self._ranks):
            if address := named.pop(rank.client.name, ""):
                self._settle(rank, address)
            elif self._connect is not None and addresses:
                self._retire(rank)
        for name, address in named.items():
            self._join(name, address)

    def _settle(self, rank: _Rank, address: str) -> None:
        if not rank.serves and rank.client.address != address:
            self._forget(rank)  # another one of its number
            self._join(rank.client.name, address)
            return
        rank.serves = True
        rank.client.move(address)

    def _join(self, name: str, address: str) -> None:
        if self._connect is None:
            return
        client = self._connect(name, address)
        rank = _Rank(client, self._on_lost)
        rank.on_present = self._present
        self._ranks.append(rank)
        client.start()
        event(log, "worker_joined", name=client.name)

    def _retire(self, rank: _Rank) -> None:
        """It ends what it has, or hands it over."""
        if rank.serves:
            rank.serves = False
            event(log, "worker_leaves", name=rank.client.name)
        if not rank.client.has_open:
            self._forget(rank)

    def _forget(self, rank: _Rank) -> None:
        self._ranks.remove(rank)
        rank.client.leave()

    def _on_lost(self) -> None:
        self._wait_if_alone()
        self._finder.look()
