"""Which attention rank runs a request, and whether it may wait for one at all.

The choice is a pure function over what is known of each rank. A rank's cost for a request is the
work in front of it: tokens outstanding there, plus the request's own prompt tokens that are not in
its prefix cache. On equally busy ranks that is the longest prefix match; without any match it is
the least load; and one prefix that all requests share does not pile them up on one rank.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

import msgspec

from cluster.routing.rank_client import RankClient, smallest_pool_tokens
from cluster.routing.rank_stream import RankStream
from cluster.routing.room import Room
from contracts.clock import Clock, monotonic_s
from contracts.errors import NotReadyError, OverloadError, RankError
from contracts.messages import Failed, Finished, Scored, Submit, Tokens
from contracts.metrics import Pipeline


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice may depend on. load_tokens: prompt and generated tokens still outstanding."""

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


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """block_tokens: as in the ranks' prefix caches. max_waiting: sequences per rank of which no
    answer has come back yet. request_share: of those, what one request may hold while others are
    there."""

    block_tokens: int = 16
    max_waiting: int = 1024
    request_share: float = 0.25
    max_prefix_blocks: int = 1 << 16


class _Rank:
    def __init__(self, client: RankClient, config: DispatcherConfig) -> None:
        self.client = client
        self.prefixes = PrefixTable(config.max_prefix_blocks)
        self.waiting = 0
        self.load_tokens = 0
        self._connection = 0

    def view(self, hashes: Sequence[bytes], block_tokens: int) -> RankView:
        if self._connection != self.client.connections:  # a new process, with an empty cache
            self._connection = self.client.connections
            self.prefixes.clear()
        return RankView(
            name=self.client.name,
            load_tokens=self.load_tokens,
            prefix_tokens=self.prefixes.match(hashes) * block_tokens,
        )


class Dispatcher:
    """The API's backend. Owns the rank clients; use on one event loop."""

    def __init__(
        self,
        clients: Sequence[RankClient],
        config: DispatcherConfig,
        choose: Choose = least_work,
        clock: Clock = monotonic_s,
    ) -> None:
        self._ranks = {client.name: _Rank(client, config) for client in clients}
        self._config = config
        self._choose = choose
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._room = Room(self._places, config.request_share, clock)

    @property
    def clients(self) -> list[RankClient]:
        return [rank.client for rank in self._ranks.values()]

    def start(self) -> None:
        for rank in self._ranks.values():
            rank.client.start()

    async def close(self) -> None:
        for rank in self._ranks.values():
            await rank.client.close()

    async def wait_ready(self) -> None:
        """Returns once every rank takes requests."""
        for rank in self._ranks.values():
            await rank.client.wait_until(lambda client: client.problem is None)

    @property
    def serves(self) -> bool:
        """Whether any rank takes requests."""
        return any(rank.client.problem is None for rank in self._ranks.values())

    def pool_tokens(self, *, prefill: bool) -> int | None:
        """What the smallest rank's KV pool holds; None: no rank has told."""
        return smallest_pool_tokens(self.clients, self._config.block_tokens)

    def problems(self) -> list[str]:
        """One line per rank that takes no requests now; empty: ready."""
        found = (rank.client.problem for rank in self._ranks.values())
        return [problem for problem in found if problem is not None]

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Requests that wait for a first answer, by (pipeline, class)."""
        return self._waiting

    async def generate(
        self, submit: Submit, *, patient: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        """Events as they arrive, batch by batch; the last one is a `Finished`. Raises TandemError.

        Where all queues are full it raises OverloadError, or if `patient` waits for room: for the
        later sequences of a client whose first one was let in. Closing it (or cancelling the task
        that iterates) cancels the request on its rank.
        """
        async with self._placed(submit, patient) as (stream, answered):
            while batch := await stream.next_batch():
                answered()
                good = [event for event in batch if isinstance(event, Tokens | Finished)]
                if good:
                    yield good
                _raise_if_failed(batch[-1])

    async def score(self, submit: Submit, *, patient: bool = False) -> Scored:
        """The answer of a prefill-only job. Raises TandemError; cancelling cancels the job.
        patient: as in `generate`."""
        async with self._placed(submit, patient) as (stream, _):
            async for event in stream:
                if isinstance(event, Scored):
                    return event
                _raise_if_failed(event)
        raise RankError(
            f"{stream.rank} ended a scoring request without an answer", "no_answer", 500
        )

    @contextlib.asynccontextmanager
    async def _placed(
        self, submit: Submit, patient: bool
    ) -> AsyncIterator[tuple[RankStream, Callable[[], None]]]:
        """The request on its rank, and a function to call when something has come back."""
        if patient:
            await self._room.wait(submit.caller)
        elif not self._room.enter(submit.caller):
            raise self._overload()
        try:
            rank = self._choose_rank(submit)
        except BaseException:
            self._room.leave(submit.caller)
            raise
        account = _Account(rank, self._waiting, self._room, submit)
        try:
            stream = await rank.client.submit(submit)
            try:
                yield stream, account.answered
            finally:
                stream.cancel()
        finally:
            account.close()

    def _healthy(self) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if rank.client.problem is None]

    def _places(self) -> int:
        """Without a rank as many as one has: who enters then is told so."""
        return self._config.max_waiting * max(1, len(self._healthy()))

    def _overload(self) -> NotReadyError | OverloadError:
        ranks, limit, wait_s = (
            len(self._healthy()),
            self._config.max_waiting,
            self._room.retry_after_s,
        )
        if not ranks:
            return self._not_ready()
        return OverloadError(
            f"{limit} requests are waiting on each of {ranks} attention ranks"
            f" (schedule.max_waiting): try again in {math.ceil(wait_s)} s",
            wait_s,
        )

    def _not_ready(self) -> NotReadyError:
        return NotReadyError(f"no attention rank takes requests: {'; '.join(self.problems())}")

    def _choose_rank(self, submit: Submit) -> _Rank:
        """The rank for this request, which has a place. Raises NotReadyError."""
        healthy = self._healthy()
        if not healthy:
            raise self._not_ready()
        limit = self._config.max_waiting
        free = {r.client.name: r for r in healthy if r.waiting < limit}
        if not free:  # a rank was lost while they waited
            free = {r.client.name: r for r in healthy}
        if len(self._ranks) == 1:
            return next(iter(free.values()))
        block_tokens = self._config.block_tokens
        hashes = submit.block_hashes(block_tokens)
        views = [rank.view(hashes, block_tokens) for rank in free.values()]
        chosen = free[self._choose(views).name]
        chosen.prefixes.add(hashes)
        return chosen


class _Account:
    """Books one request's load on its rank, and takes it off again whatever happens."""

    def __init__(
        self, rank: _Rank, waiting: Counter[tuple[str, str]], room: Room, submit: Submit
    ) -> None:
        pipeline = Pipeline.PREFILL if submit.prefill_only else Pipeline.GENERATION
        self._rank, self._waiting, self._room = rank, waiting, room
        self._key, self._caller = (pipeline.value, submit.priority.label), submit.caller
        self._tokens = len(submit.token_ids) + (
            submit.sampling.max_tokens if submit.sampling else 0
        )
        self._is_waiting = True
        rank.load_tokens += self._tokens
        rank.waiting += 1
        waiting[self._key] += 1

    def answered(self) -> None:
        """Something has come back. May be called again."""
        if self._is_waiting:
            self._is_waiting = False
            self._rank.waiting -= 1
            self._waiting[self._key] -= 1
            self._room.leave(self._caller)

    def close(self) -> None:
        self.answered()
        self._rank.load_tokens -= self._tokens


def _raise_if_failed(event: Tokens | Finished | Scored | Failed) -> None:
    if isinstance(event, Failed):
        raise RankError(event.message, event.code, event.status)
