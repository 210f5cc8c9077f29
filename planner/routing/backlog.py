"""Requests held for saturated workers, in lanes, each with a home chosen on arrival.

MoE-Prefill drains one FIFO queue, round by round. Under load all workers but the one that has just
reported are saturated, so the head of the queue goes there, matched or not. Here each request gets
a home at once, by the same cascade over the content of workers *and their held requests*, and waits
until its home is below the threshold:

    load    0        tau                2 tau               3 tau
            |---------|-------------------|-------------------|
    w0      sent sent sent | held held held held
    w1      sent sent | held held held held held held         (home full: the request would end
    w2      sent sent sent | held held                         a tau later than at best)

Held requests beyond the last threshold are sent while the home runs a batch, so that the next batch
is ready. The last threshold of background requests stays, so that a dry worker can take over from
the end of the longest queue.

Queues have lanes and turns (planner/routing/backlog.py), so small requests do not wait for a large
one. For background requests (all but the first of a client's request, and best-effort ones) the
completion of the last one counts: they stay with their prefix longer and move only if that saves
more time than it recomputes.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from contracts.requests import Caller, Priority
from contracts.routing_messages import Prompt, RequestKey
from planner.routing.open_requests import OpenRequests, RequestWork
from planner.routing.prefix_index import BlockHead, BlockHeadIndex, PendingBlocks, block_head_keys
from planner.routing.router import (
    RouteCandidate,
    RoutePolicy,
    Router,
    prefix_while_busy,
    prefix_within_round,
)
from planner.scheduling.fair_queue import FairQueue

ANONYMOUS = Caller()


class Lane(enum.IntEnum):
    """FIRST: the first prompt of a request. REST: its others. LATER: best-effort work."""

    FIRST = 0
    REST = 1
    LATER = 2


class HeldRequest(NamedTuple):
    """A waiting prompt.

    avoid: workers that failed it, in order; used only as a last resort. token_ids: its tokens, if
    workers share parts of blocks, or for locality.
    """

    prompt: Prompt
    lane: Lane = Lane.FIRST
    caller: Caller = ANONYMOUS
    avoid: tuple[int, ...] = ()
    token_ids: Sequence[int] = ()


class WorkerQueue:
    """FIRST and REST alternate, LATER goes when both are empty.

    Within a lane API keys take turns, then their requests (planner/scheduling/fair_queue.py), then
    first come, first served:

        FIRST  a b c          a P b Q c R S | L
        REST   P Q R S   →
        LATER  L
    """

    def __init__(self) -> None:
        self._turns: dict[Lane, FairQueue[RequestKey]] = {lane: FairQueue() for lane in Lane}
        self._lanes: dict[Lane, dict[RequestKey, HeldRequest]] = {
            lane: {} for lane in Lane
        }  # in order of arrival
        self._lane_of: dict[RequestKey, Lane] = {}
        self._turn = Lane.FIRST

    def __len__(self) -> int:
        return len(self._lane_of)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._lane_of)

    def add(self, held: HeldRequest) -> None:
        key, caller = held.prompt.key, held.caller
        self._lanes[held.lane][key] = held
        self._lane_of[key] = held.lane
        self._turns[held.lane].push(
            key, caller.tenant, caller.request, cost=held.prompt.prompt_tokens
        )

    def held(self, key: RequestKey) -> HeldRequest:
        return self._lanes[self._lane_of[key]][key]

    def first(self, *, urgent: bool = False) -> RequestKey | None:
        """Return the next request except best-effort work; urgent: from lane FIRST only."""
        other = Lane.REST if self._turn is Lane.FIRST else Lane.FIRST
        lanes = (Lane.FIRST,) if urgent else (self._turn, other)
        return next((key for lane in lanes if (key := self._turns[lane].peek()) is not None), None)

    def later(self) -> RequestKey | None:
        """Return the next best-effort request if no other work waits."""
        if self._lanes[Lane.FIRST] or self._lanes[Lane.REST]:
            return None
        return self._turns[Lane.LATER].peek()

    def last(self) -> Iterator[tuple[Lane, RequestKey]]:
        """Yield the last request of each lane, the one that would wait longest first."""
        for lane in reversed(Lane):
            if self._lanes[lane]:
                yield lane, next(reversed(self._lanes[lane]))

    def pop(self, key: RequestKey, *, is_dispatched: bool = True) -> HeldRequest:
        """Remove a request. is_dispatched: it had its turn, and the other lane is next."""
        lane = self._lane_of.pop(key)
        if is_dispatched:
            self._turns[lane].take(key)
        else:
            self._turns[lane].remove(key)
        if lane is self._turn:
            self._turn = Lane.REST if lane is Lane.FIRST else Lane.FIRST
        return self._lanes[lane].pop(key)


class Dispatch(NamedTuple):
    """A request to send now."""

    prompt: Prompt
    worker: int


Locality = Callable[[Sequence[int], int], Sequence[float]]


class Backlog:
    """Queues of held requests in front of a router's workers; owned with the router.

    policy: of lane FIRST. locality: returns the load that is accepted on each worker for its
    experts, in multiples of a request's work, from the request's tokens and the first of them that
    is not cached.
    """

    def __init__(
        self,
        router: Router,
        work: RequestWork,
        policy: RoutePolicy = prefix_within_round,
        locality: Locality | None = None,
    ) -> None:
        workers = router.config.workers
        self._router = router
        self._work = work
        self._policies = {
            Lane.FIRST: policy,
            Lane.REST: prefix_while_busy,
            Lane.LATER: prefix_while_busy,
        }
        self._held = [OpenRequests(work) for _ in range(workers)]
        self._queues = [WorkerQueue() for _ in range(workers)]
        self._home: dict[RequestKey, int] = {}
        self._unassigned: dict[RequestKey, HeldRequest] = {}  # while no worker is present
        self._promises = PendingBlocks()
        self._heads = BlockHeadIndex()
        self._locality = locality

    def __len__(self) -> int:
        return len(self._home) + len(self._unassigned)

    def put(self, held: HeldRequest) -> bool:
        """Assign a home; `take` returns what to send.

        Returns True if it goes at once: a full batch is held for an idle worker.
        """
        prompt, lane, caller, avoid, token_ids = held
        candidates = self._router.candidates(prompt, self._promises, self._held)
        if avoid:
            candidates = (
                _excluding(candidates, avoid) or _excluding(candidates, avoid[-1:]) or candidates
            )
        blocks = max((candidate.matched_blocks for candidate in candidates), default=0)
        heads = self._heads_after(blocks, prompt, token_ids, caller.salt)
        if shared := self._heads.shared_tokens(heads):
            candidates = [self._with_savings(c, blocks, shared) for c in candidates]
        if self._locality is not None:
            local = self._locality(token_ids, blocks * self._router.config.block_tokens)
            candidates = [c._replace(local=round(local[c.worker] * c.added)) for c in candidates]
        if not candidates:
            self._unassigned[prompt.key] = held
            return False
        chosen = self._policies[lane](candidates)
        worker = chosen.worker
        cached_tokens = self._router.cached_tokens(prompt, chosen.matched_blocks)
        self._held[worker].open(prompt, cached_tokens)
        self._promises.add(worker, prompt.hashes)
        self._queues[worker].add(held)
        self._home[prompt.key] = worker
        self._heads.note(worker, heads)
        visible_to = prompt.priority
        full = self._work_at(worker, visible_to) >= self._router.threshold(worker)
        is_open = self._router.is_open(worker, visible_to)
        return full and is_open and not self._is_busy(worker, visible_to)

    def _heads_after(
        self, blocks: int, prompt: Prompt, token_ids: Sequence[int], salt: bytes
    ) -> list[BlockHead]:
        block_tokens = self._router.config.block_tokens
        tokens = token_ids[blocks * block_tokens : (blocks + 1) * block_tokens]
        return block_head_keys(prompt.hashes[blocks - 1] if blocks else salt, tokens)

    def _with_savings(
        self, candidate: RouteCandidate, blocks: int, shared: dict[int, int]
    ) -> RouteCandidate:
        """Return the candidate with the work it saves inside the block after the matched ones."""
        tokens = shared.get(candidate.worker, 0)
        if not tokens or candidate.matched_blocks != blocks:
            return candidate
        start = blocks * self._router.config.block_tokens
        return candidate._replace(saved=self._work(start, start + tokens))

    def take(self) -> list[Dispatch]:
        """Return the requests to send now, booked with the router; call after `put` and reports."""
        dispatched = []
        for worker, queue in enumerate(self._queues):
            while (key := self._next(worker, queue)) is not None:
                dispatched.append(self._dispatch(key, worker))
        for worker in range(len(self._queues)):  # only what no home can start now is taken over
            while self._home and self._router.is_open(worker, Priority.LS):
                key = self._pick_stolen(worker)
                if key is None:
                    break
                dispatched.append(self._dispatch(key, worker))
        return dispatched

    def _next(self, worker: int, queue: WorkerQueue) -> RequestKey | None:
        """Return the request that its home can start now; for LS work only LS load counts."""
        if not self._router.is_open(worker, Priority.LS):
            return None
        key = queue.first(urgent=self._is_tail(worker, Priority.LS))
        if key is None and self._router.is_open(worker) and not self._is_tail(worker):
            return queue.later()
        return key

    def _is_busy(self, worker: int, visible_to: Priority = Priority.BE) -> bool:
        """Return whether the worker has a batch, or enough work for one."""
        return self._router.load(worker, visible_to) >= self._router.threshold(worker)

    def _is_tail(self, worker: int, visible_to: Priority = Priority.BE) -> bool:
        """Return whether less than a batch is held for a busy worker; that is not sent ahead."""
        held = self._held[worker].visible_to(visible_to).load
        return self._is_busy(worker, visible_to) and held < self._router.threshold(worker)

    def _pick_stolen(self, worker: int) -> RequestKey | None:
        """Return a request held for another worker, from the end of the longest queue."""
        homes = [n for n, queue in enumerate(self._queues) if queue]
        for home in sorted(homes, key=self._work_at, reverse=True):
            for lane, key in self._queues[home].last():
                if worker in self._queues[home].held(key).avoid:
                    continue
                if lane is Lane.FIRST or self._pays(worker, home, key):
                    return key
        return None

    def _pays(self, worker: int, home: int, key: RequestKey) -> bool:
        """Return whether running it here instead of at home saves more than it recomputes."""
        prompt = self._queues[home].held(key).prompt
        visible_to = prompt.priority
        if self._is_busy(worker, visible_to) or not self._router.is_open(worker, visible_to):
            return False
        added = self._router.added(prompt, worker)
        recomputed = added - self._held[home].remaining(key)
        return self._router.load(worker, visible_to) + added + recomputed <= self._work_at(
            home, visible_to
        )

    def _work_at(self, worker: int, visible_to: Priority = Priority.BE) -> int:
        """Return the sent and held work."""
        return (
            self._router.load(worker, visible_to) + self._held[worker].visible_to(visible_to).load
        )

    def _dispatch(self, key: RequestKey, worker: int) -> Dispatch:
        prompt = self._remove(key, is_dispatched=True).prompt
        self._router.assign(prompt, worker)
        return Dispatch(prompt, worker)

    def remove(self, key: RequestKey) -> None:
        """Remove a cancelled request, if it is held."""
        self._unassigned.pop(key, None)
        if key in self._home:
            self._remove(key, is_dispatched=False)

    def lose(self, worker: int) -> None:
        """Assign new homes to a dead worker's requests; call after `Router.lose`."""
        self.settle([self._remove(key, is_dispatched=False) for key in list(self._queues[worker])])

    def settle(self, moved: Iterable[HeldRequest] = ()) -> None:
        """Assign homes to `moved` and to requests without one, after a worker has returned."""
        unassigned = [*self._unassigned.values(), *moved]
        self._unassigned.clear()
        for held in unassigned:
            self.put(held)

    def _remove(self, key: RequestKey, *, is_dispatched: bool) -> HeldRequest:
        worker = self._home.pop(key)
        self._promises.remove(worker, self._held[worker].close(key).hashes)
        return self._queues[worker].pop(key, is_dispatched=is_dispatched)


def _excluding(
    candidates: Sequence[RouteCandidate], avoid: tuple[int, ...]
) -> list[RouteCandidate]:
    return [candidate for candidate in candidates if candidate.worker not in avoid]
