"""Requests that wait for saturated workers, each with a home chosen ahead of its round.

MoE-Prefill drains one FIFO queue, round by round. While work is plentiful every worker is saturated
but the one that has just reported, so the head of the queue goes there, matched or not. Here a
request is given a home as soon as it comes, by the same cascade over what workers have *and what is
held for them*, and waits there until its home is below the threshold:

    load    0        tau                2 tau               3 tau
            |---------|-------------------|-------------------|
    w0      sent sent sent | held held held held
    w1      sent sent | held held held held held held         (home full: the request would be
    w2      sent sent sent | held held                         done a tau later than at best)

What is held beyond that goes while its home still runs a batch, so that the next one is there when
that ends; but for the last threshold of requests that nobody waits for one by one: a worker that
runs dry takes over from the end of the line with the most work.

A line has lanes and turns (planner/routing/line.py): small requests need not wait for the whole of
a large one, nor keys for each other's. Of requests that are not the first of their client's, and of
best-effort ones, the last to be done counts: they stay with their prefix for longer, and are taken
over only where that saves more time than it computes twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from contracts.requests import Caller, Priority
from contracts.routing import Prompt, RequestKey
from planner.routing.block_heads import BlockHeads, Head, heads_of
from planner.routing.line import NOBODY, Held, Lane, Line
from planner.routing.open_requests import OpenRequests
from planner.routing.promises import Promises
from planner.routing.request_work import RequestWork
from planner.routing.route_policies import (
    Candidate,
    Policy,
    prefix_while_busy,
    prefix_within_round,
)
from planner.routing.router import Decision, Router


class Release(NamedTuple):
    """A request to send now."""

    prompt: Prompt
    decision: Decision


class Backlog:
    """Lines of held requests in front of a router's workers. Owned with the router.

    policy: of the lane FIRST; patient_policy: of the others.
    """

    def __init__(
        self,
        router: Router,
        work: RequestWork,
        policy: Policy = prefix_within_round,
        patient_policy: Policy = prefix_while_busy,
    ) -> None:
        workers = router.config.workers
        self._router = router
        self._work = work
        self._policies = {
            Lane.FIRST: policy,
            Lane.REST: patient_policy,
            Lane.LATER: patient_policy,
        }
        self._held = [OpenRequests(work) for _ in range(workers)]
        self._lines = [Line() for _ in range(workers)]
        self._home: dict[RequestKey, int] = {}
        self._homeless: dict[RequestKey, Held] = {}  # while no worker is present
        self._promises = Promises()
        self._heads = BlockHeads()

    def __len__(self) -> int:
        return len(self._home) + len(self._homeless)

    def put(
        self,
        prompt: Prompt,
        lane: Lane = Lane.FIRST,
        token_ids: Sequence[int] = (),
        caller: Caller = NOBODY,
        avoid: tuple[int, ...] = (),
    ) -> bool:
        """Gives a request a home. `take` says when it goes; True: at once, a full batch is held for
        a worker that has none. token_ids: of the prompt, where workers share parts of blocks.
        avoid: workers that have failed it, the last one last: only where there is no other."""
        return self._put(Held(prompt, lane, caller, avoid), token_ids)

    def _put(self, held: Held, token_ids: Sequence[int] = ()) -> bool:
        prompt, lane, caller, avoid = held
        candidates = self._router.candidates(prompt, self._promises, self._held)
        if avoid:
            candidates = _but(candidates, avoid) or _but(candidates, avoid[-1:]) or candidates
        blocks = max((candidate.matched_blocks for candidate in candidates), default=0)
        heads = self._heads_after(blocks, prompt, token_ids, caller.salt)
        if shared := self._heads.shared_tokens(heads):
            candidates = [self._saving(c, blocks, shared) for c in candidates]
        chosen = self._policies[lane](candidates, len(self)) if candidates else None
        if chosen is None:
            self._homeless[prompt.key] = held
            return False
        worker = chosen.worker
        cached_tokens = self._router.cached_tokens(prompt, chosen.matched_blocks)
        self._held[worker].open(prompt, cached_tokens)
        self._promises.add(worker, prompt.hashes)
        self._lines[worker].add(held)
        self._home[prompt.key] = worker
        self._heads.note(worker, heads)
        met_by = prompt.priority
        full = self._work_at(worker, met_by) >= self._router.threshold(worker)
        is_open = self._router.is_open(worker, met_by)
        return full and is_open and not self._is_busy(worker, met_by)

    def _heads_after(
        self, blocks: int, prompt: Prompt, token_ids: Sequence[int], salt: bytes
    ) -> list[Head]:
        block_tokens = self._router.config.block_tokens
        tokens = token_ids[blocks * block_tokens : (blocks + 1) * block_tokens]
        return heads_of(prompt.hashes[blocks - 1] if blocks else salt, tokens)

    def _saving(self, candidate: Candidate, blocks: int, shared: dict[int, int]) -> Candidate:
        """With the work that it saves inside the block after the first ones, if it has those."""
        tokens = shared.get(candidate.worker, 0)
        if not tokens or candidate.matched_blocks != blocks:
            return candidate
        start = blocks * self._router.config.block_tokens
        return candidate._replace(saved=self._work(start, start + tokens))

    def take(self) -> list[Release]:
        """Requests that go now, already booked with the router. Ask after each `put` and report."""
        released = []
        for worker, line in enumerate(self._lines):
            while (key := self._next(worker, line)) is not None:
                released.append(self._release(key, worker))
        for worker in range(len(self._lines)):  # nobody takes over what its home can start now
            while self._home and self._router.is_open(worker, Priority.LS):
                key = self._to_take_over(worker)
                if key is None:
                    break
                released.append(self._release(key, worker))
        return released

    def _next(self, worker: int, line: Line) -> RequestKey | None:
        """What its home can start now. For LS work a worker that has nothing but BE is idle."""
        if not self._router.is_open(worker, Priority.LS):
            return None
        key = line.first(urgent=self._is_tail(worker, Priority.LS))
        if key is None and self._router.is_open(worker) and not self._is_tail(worker):
            return line.later()
        return key

    def _is_busy(self, worker: int, met_by: Priority = Priority.BE) -> bool:
        """With a batch, or enough for one."""
        return self._router.load(worker, met_by) >= self._router.threshold(worker)

    def _is_tail(self, worker: int, met_by: Priority = Priority.BE) -> bool:
        """Whether what is held for a busy worker is less than a batch: it is not sent ahead, for a
        worker that is done sooner can take it over."""
        held = self._held[worker].met_by(met_by).load
        return self._is_busy(worker, met_by) and held < self._router.threshold(worker)

    def _to_take_over(self, worker: int) -> RequestKey | None:
        """What a dry worker runs of what is held for others: from the end of a line, that of the
        worker with the most work first."""
        homes = [n for n, line in enumerate(self._lines) if line]
        for home in sorted(homes, key=self._work_at, reverse=True):
            for lane, key in self._lines[home].last():
                if worker in self._lines[home].held(key).avoid:
                    continue
                if lane is Lane.FIRST or self._pays(worker, home, key):
                    return key
        return None

    def _pays(self, worker: int, home: int, key: RequestKey) -> bool:
        """Whether to run it elsewhere than at home, where there is no batch to wait for, saves more
        time than it computes twice."""
        prompt = self._lines[home].held(key).prompt
        met_by = prompt.priority
        if self._is_busy(worker, met_by) or not self._router.is_open(worker, met_by):
            return False
        added = self._router.added(prompt, worker)
        twice = added - self._held[home].remaining(key)
        return self._router.load(worker, met_by) + added + twice <= self._work_at(home, met_by)

    def _work_at(self, worker: int, met_by: Priority = Priority.BE) -> int:
        """Sent and held."""
        return self._router.load(worker, met_by) + self._held[worker].met_by(met_by).load

    def _release(self, key: RequestKey, worker: int) -> Release:
        prompt = self._leave(key, goes=True).prompt
        return Release(prompt, self._router.assign(prompt, worker))

    def remove(self, key: RequestKey) -> None:
        """The request is cancelled. Without effect for one that is not held."""
        self._homeless.pop(key, None)
        if key in self._home:
            self._leave(key, goes=False)

    def lose(self, worker: int) -> None:
        """The worker died: what was held for it gets other homes. After `Router.lose`."""
        self.settle([self._leave(key, goes=False) for key in list(self._lines[worker])])

    def settle(self, moved: Iterable[Held] = ()) -> None:
        """Homes for `moved` and for those that found none, when a worker has come back."""
        homeless = [*self._homeless.values(), *moved]
        self._homeless.clear()
        for held in homeless:
            self._put(held)

    def _leave(self, key: RequestKey, *, goes: bool) -> Held:
        worker = self._home.pop(key)
        self._promises.remove(worker, self._held[worker].close(key).hashes)
        return self._lines[worker].pop(key, goes=goes)


def _but(candidates: Sequence[Candidate], avoid: tuple[int, ...]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.worker not in avoid]
