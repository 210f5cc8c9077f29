"""Placement on attention ranks: a request goes to the rank with the least work in front of it.

A rank's cost for a request is the number of tokens outstanding there, without those of BE requests
that it overtakes, plus the request's prompt tokens that are not in the rank's prefix cache. Equally
busy ranks are chosen by prefix match, ranks without a match by load, and a prefix that all requests
share does not direct them all to one rank. Requests wait in the ingress while no rank has room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import FindRanks, RankMember, RankSet, RoutingConfig
from cluster.routing.ticket import Ticket
from contracts.errors import ChannelError, NotReadyError, TandemError
from contracts.messages import RankState
from contracts.ranks import Group
from contracts.requests import Priority
from contracts.routing_messages import WorkerReport, WorkerSnapshot

MAX_PREFIX_BLOCKS = 1 << 16  # per rank
_PREFIX = f"{Group.ATTENTION.value}-"


class PrefixTable:
    """Hashes of the blocks recently sent to one rank, in LRU order."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that are known."""
        for index, digest in enumerate(hashes):
            if digest not in self._blocks:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        for digest in reversed(hashes):  # a chain is evicted from its end
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class AttentionRank(RankMember):
    """A member of the set, with the work that this ingress has sent there."""

    def __init__(self, client: RankClient, placer: LeastWorkPlacer) -> None:
        super().__init__(client)
        self.prefixes = PrefixTable(MAX_PREFIX_BLOCKS)
        self._placer = placer
        self._waiting: Counter[Priority] = Counter()
        self._load_tokens: Counter[Priority] = Counter()
        self._connection = 0

    def add_load(self, priority: Priority, tokens: int, waiting: int) -> None:
        self._load_tokens[priority] += tokens
        self._waiting[priority] += waiting

    def waiting(self, priority: Priority) -> int:
        """Return the number of requests of the class without a first answer."""
        return self._waiting[priority]

    def cost(
        self, priority: Priority, hashes: Sequence[bytes], block_tokens: int
    ) -> tuple[int, int]:
        """Return the work that a request of the class waits for, less its prefix; ties go to it."""
        if self._connection != self.client.connections:  # a new process has an empty cache
            self._connection = self.client.connections
            self.prefixes = PrefixTable(MAX_PREFIX_BLOCKS)
        load_tokens = sum(n for other, n in self._load_tokens.items() if other <= priority)
        prefix_tokens = self.prefixes.match(hashes) * block_tokens
        return load_tokens - prefix_tokens, -prefix_tokens

    def on_state(self, state: RankState) -> None:
        if state.healthy:
            self._placer.on_available()

    def on_log(self, entry: WorkerReport | WorkerSnapshot) -> None: ...

    def on_lost(self, error: ChannelError) -> None:
        self._placer.on_lost()


@dataclass(slots=True)
class _Assignment:
    rank: AttentionRank
    tokens: int
    awaits_first_event: bool = True


Connect = Callable[[str, str], RankClient]
"""Name and client address of a rank → a client of it, not yet started."""


class LeastWorkPlacer:
    """The `Placer` of attention ranks.

    find: see `RankSet`. connect: creates the client of a rank that joins; None: none can.
    """

    def __init__(
        self,
        clients: Sequence[RankClient],
        config: RoutingConfig,
        find: FindRanks | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.config = config
        self._connect = connect
        self.ranks: RankSet[AttentionRank] = RankSet(
            "attention rank",
            [AttentionRank(client, self) for client in clients],
            config.no_rank_timeout_s,
            self._fail_all,
            find,
            self._connect_new,
        )
        self._assignments: dict[Ticket, _Assignment] = {}
        self._queued: dict[Priority, dict[Ticket, None]] = {priority: {} for priority in Priority}

    def put(self, ticket: Ticket) -> None:
        queued = self._queued[ticket.submit.priority]
        rank = None if queued else self._choose_rank(ticket)
        if rank is not None:
            self._send(ticket, rank)
            return
        queued[ticket] = None
        self._update_timeout()

    def record_answer(self, ticket: Ticket) -> None:
        assignment = self._assignments.get(ticket)
        if assignment is not None and assignment.awaits_first_event:
            assignment.awaits_first_event = False
            assignment.rank.add_load(ticket.submit.priority, 0, -1)
            self._dispatch()

    def remove(self, ticket: Ticket) -> None:
        priority = ticket.submit.priority
        self._queued[priority].pop(ticket, None)
        assignment = self._assignments.pop(ticket, None)
        if assignment is not None:
            assignment.rank.add_load(priority, -assignment.tokens, -assignment.awaits_first_event)
            self._dispatch()

    # ---- requests

    def _dispatch(self) -> None:
        """Send queued requests while there is room, in order of arrival."""
        self.ranks.ensure_polling()
        self._update_timeout()
        for queued in self._queued.values():
            while queued and (rank := self._choose_rank(ticket := next(iter(queued)))) is not None:
                del queued[ticket]
                try:
                    self._send(ticket, rank)
                except TandemError as error:  # concerns this request only
                    ticket.fail(error)

    def _update_timeout(self) -> None:
        self.ranks.update_timeout(has_waiting=any(self._queued.values()))

    def _fail_all(self, error: NotReadyError) -> None:
        for queued in self._queued.values():
            for ticket in queued:
                ticket.fail(error)
            queued.clear()

    def _send(self, ticket: Ticket, rank: AttentionRank) -> None:
        submit = ticket.submit
        tokens = submit.prompt_tokens + (submit.sampling.max_tokens if submit.sampling else 0)
        self._assignments[ticket] = _Assignment(rank, tokens)
        rank.add_load(submit.priority, tokens, 1)
        ticket.send(rank.client)
        rank.client.flush()

    def _choose_rank(self, ticket: Ticket) -> AttentionRank | None:
        """Return a rank with room, or None.

        Ranks that wait for expert ranks, or have failed the request, are used only if no other is
        free.
        """
        failed, available = ticket.failed_clients(), self.ranks.available
        candidates = [rank for rank in available if not rank.client.waits] or available
        others = [rank for rank in candidates if rank.client not in failed]
        priority, most = ticket.submit.priority, self.config.max_waiting
        free = [rank for rank in others or candidates if rank.waiting(priority) < most]
        if len(self.ranks.clients) == 1 or not free:
            return free[0] if free else None
        block_tokens = self.config.block_tokens
        hashes = ticket.hashes(block_tokens)
        chosen = min(free, key=lambda rank: rank.cost(priority, hashes, block_tokens))
        chosen.prefixes.add(hashes)
        return chosen

    # ---- ranks

    def _connect_new(self, name: str, address: str) -> AttentionRank | None:
        if self._connect is None or not name.startswith(_PREFIX):
            return None
        return AttentionRank(self._connect(name, address), self)

    def on_available(self) -> None:
        self._dispatch()
        self.ranks.on_available()

    def on_lost(self) -> None:
        self._update_timeout()
        self.ranks.ensure_polling()
