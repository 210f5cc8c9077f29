"""Which attention rank runs a request: it goes there at once.

The choice is a pure function over what is known of each rank. A rank's cost for a request is the
work in front of it: tokens outstanding there, without those of BE requests that it overtakes, plus
the request's own prompt tokens that are not in its prefix cache. On equally busy ranks that is the
longest prefix match; without any match it is the least load; and one prefix that all requests share
does not pile them up on one rank.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from cluster.routing.placer import RoutingConfig, nobody
from cluster.routing.rank_client import RankClient
from cluster.routing.ticket import Ticket
from contracts.errors import ChannelError
from contracts.messages import RankState
from contracts.requests import Priority
from contracts.routing import WorkerReport, WorkerSnapshot

MAX_PREFIX_BLOCKS = 1 << 16  # known of each rank


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
    """A `rank_client.Listener`, and what this ingress has sent there."""

    def __init__(self, client: RankClient) -> None:
        self.client = client
        self.prefixes = PrefixTable(MAX_PREFIX_BLOCKS)
        self._waiting: Counter[Priority] = Counter()
        self._load_tokens: Counter[Priority] = Counter()
        self.on_present: Callable[[], None] = lambda: None
        self._connection = 0
        client.listen(self)

    @property
    def present(self) -> bool:
        return self.client.problem is None

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

    def on_lost(self, error: ChannelError) -> None: ...


class LeastWork:
    """The `placer.Placer` of attention ranks. choose: which of those that have room."""

    kind = "attention rank"
    waits = False

    def __init__(
        self, clients: Sequence[RankClient], config: RoutingConfig, choose: Choose = least_work
    ) -> None:
        self.config = config
        self.peers = [_Rank(client) for client in clients]
        self._choose = choose
        self._booked: dict[Ticket, tuple[_Rank, int]] = {}  # with its tokens

    def listen(self, on_present: Callable[[], None]) -> None:
        for rank in self.peers:
            rank.on_present = on_present

    def put(self, ticket: Ticket) -> None:
        rank, submit = self._chosen(ticket), ticket.submit
        tokens = submit.prompt_tokens + (submit.sampling.max_tokens if submit.sampling else 0)
        self._booked[ticket] = rank, tokens
        rank.book(submit.priority, tokens, ticket.waits)
        ticket.send(rank.client)
        rank.client.flush()

    def answered(self, ticket: Ticket) -> None:
        if ticket in self._booked:
            self._booked[ticket][0].book(ticket.submit.priority, 0, -1)

    def remove(self, ticket: Ticket) -> None:
        rank, tokens = self._booked.pop(ticket, (None, 0))
        if rank is not None:
            rank.book(ticket.submit.priority, -tokens, -ticket.waits)

    async def close(self) -> None: ...

    def _chosen(self, ticket: Ticket) -> _Rank:
        """The rank for this request. Raises NotReadyError."""
        tried = ticket.tried()
        healthy = [rank for rank in self.peers if rank.present and rank.client not in tried]
        if not healthy:
            raise nobody(self)
        if len(self.peers) == 1:
            return healthy[0]
        priority, most = ticket.submit.priority, self.config.max_waiting
        free = [rank for rank in healthy if rank.waiting(priority) < most]
        free = free or healthy  # a rank was lost while they waited
        block_tokens = self.config.block_tokens
        hashes = ticket.hashes(block_tokens)
        by_name = {rank.client.name: rank for rank in free}
        views = [rank.view(priority, hashes, block_tokens) for rank in free]
        chosen = by_name[self._choose(views).name]
        chosen.prefixes.add(hashes)
        return chosen
