"""The router of prefill-only requests (MoE-Prefill, Section 7).

    longest contiguous match over committed ∪ pending → least load

A router's view of a worker is the fold of the worker's log (planner/routing/worker_state.py), equal
for all routers, and its *own* requests that the worker has not accepted yet. Pure: the caller
passes reports in and sends the decisions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from contracts.requests import Priority
from contracts.routing_messages import Prompt, RequestKey, WorkerReport, WorkerSnapshot
from planner.routing.open_requests import OpenRequests, RequestTotals, RequestWork
from planner.routing.prefix_index import PendingBlocks, PrefixIndex
from planner.routing.worker_state import SaturationConfig, WorkerState, threshold, usable_tokens

LOAD_FOR_SAVED = 8  # extra load that is accepted per unit of saved work


class RouteCandidate(NamedTuple):
    """A worker that accepts requests, and the load a request would meet there.

    matched_blocks: leading blocks that are committed or pending. added: work of the request. load:
    work of open requests. queued: the part of it in no running batch. threshold: queued work from
    which on the worker is saturated. saved: work of further tokens that the worker has in a block
    that starts alike. local: load that is accepted because the worker has the request's experts.
    All in one unit; an LS request counts no BE work.
    """

    worker: int
    matched_blocks: int
    added: int
    load: int
    queued: int
    threshold: int
    saved: int = 0
    local: int = 0


RoutePolicy = Callable[[Sequence[RouteCandidate]], RouteCandidate]
"""Choice among the candidates, at least one, in the order of workers."""


def prefix_within_round(candidates: Sequence[RouteCandidate]) -> RouteCandidate:
    """Return the choice for a request that may wait: a worker is full one threshold above the best.

    Siblings then stay with a prefix that costs more to recompute than to wait for.
    """
    return _near(candidates, lambda soonest, threshold: soonest + threshold)


def prefix_while_busy(candidates: Sequence[RouteCandidate]) -> RouteCandidate:
    """Return the choice for a background request: a worker is full at twice the best completion.

    Later requests fill the other workers' queues; without any, those take over (`Backlog.take`).
    """
    return _near(candidates, lambda soonest, threshold: soonest + max(soonest, threshold))


def _near(candidates: Sequence[RouteCandidate], limit: Callable[[int, int], int]) -> RouteCandidate:
    """Return the longest match, then the least load, among workers below `limit`."""
    soonest = min(c.load + c.added for c in candidates)
    near = [c for c in candidates if c.load + c.added < limit(soonest, c.threshold)]
    return min(near, key=by_match_then_load)


def by_match_then_load(candidate: RouteCandidate) -> tuple[int, int, int]:
    load = candidate.load - LOAD_FOR_SAVED * candidate.saved - candidate.local
    return -candidate.matched_blocks, load, candidate.worker


class RouterConfig(NamedTuple):
    """Configuration; number: of this router in its request keys. block_tokens: as in the caches."""

    workers: int
    saturation: SaturationConfig
    number: int = 0
    block_tokens: int = 16


class Router:
    """State and decisions of one router. Not thread-safe."""

    def __init__(self, config: RouterConfig, work: RequestWork) -> None:
        self.config = config
        self._work = work
        self._states = [WorkerState(work, config.block_tokens) for _ in range(config.workers)]
        self._unaccepted = [OpenRequests(work) for _ in range(config.workers)]
        self._placed: dict[RequestKey, int] = {}  # worker of each unaccepted request
        self._thresholds = [threshold(config.saturation, work, None)] * config.workers
        self._committed = PrefixIndex(config.workers)
        self._pending = PendingBlocks()  # of all open requests, accepted or not
        self._retired: set[int] = set()

    def retire(self, worker: int) -> None:
        """Stop routing to the worker; it finishes its requests."""
        self._retired.add(worker)

    def readmit(self, worker: int) -> None:
        """Resume routing to a worker of this number, once it is present."""
        self._retired.discard(worker)

    def load(self, worker: int, visible_to: Priority = Priority.BE) -> int:
        """Return the work of open and unaccepted requests that the class waits for."""
        return sum(totals.load for totals in self._totals(worker, visible_to))

    def queued(self, worker: int, visible_to: Priority = Priority.BE) -> int:
        """Return `load` without the work in running batches."""
        return sum(totals.queued for totals in self._totals(worker, visible_to))

    def threshold(self, worker: int) -> int:
        """Return the queued work from which on the worker is saturated: its next batch is full."""
        return self._thresholds[worker]

    @property
    def blocks(self) -> int:
        """Number of distinct committed and pending blocks."""
        return len(self._committed) + len(self._pending)

    def assign(self, prompt: Prompt, worker: int) -> None:
        """Book a request with a worker."""
        cached_tokens = self.cached_tokens(prompt, self._match(worker, prompt))
        self._unaccepted[worker].open(prompt, cached_tokens)
        self._pending.add(worker, prompt.hashes)
        self._placed[prompt.key] = worker

    def candidates(
        self,
        prompt: Prompt,
        extra_blocks: PendingBlocks | None = None,
        held: Sequence[OpenRequests] | None = None,
    ) -> list[RouteCandidate]:
        """Return the candidates for a request.

        extra_blocks, held: blocks and requests to count in addition.
        """
        matches = self._committed.matches(prompt.hashes)
        for promises in (self._pending, extra_blocks):
            if promises is not None:
                for worker, blocks in promises.matches(prompt.hashes).items():
                    matches[worker] = max(matches[worker], blocks)
        added = {blocks: self._added(prompt, blocks) for blocks in set(matches)}
        return [
            self._candidate(worker, prompt.priority, matches[worker], added[matches[worker]], held)
            for worker, state in enumerate(self._states)
            if state.present and worker not in self._retired
        ]

    def is_present(self, worker: int) -> bool:
        return self._states[worker].present

    def is_open(self, worker: int, priority: Priority = Priority.BE) -> bool:
        """Return whether the worker accepts requests and is below its threshold for that class."""
        accepts = self._states[worker].present and worker not in self._retired
        return accepts and self.queued(worker, priority) < self._thresholds[worker]

    def added(self, prompt: Prompt, worker: int) -> int:
        """Return the work of the request at a worker."""
        return self._added(prompt, self._match(worker, prompt))

    def cached_tokens(self, prompt: Prompt, matched_blocks: int) -> int:
        return usable_tokens(prompt, matched_blocks, self.config.block_tokens)

    def withdraw(self, key: RequestKey) -> None:
        """Remove an own request that did not reach its worker or is over.

        No effect on an accepted one: the worker's log reports its end.
        """
        worker = self._placed.pop(key, None)
        if worker is not None:
            self._pending.remove(worker, self._unaccepted[worker].close(key).hashes)

    def apply(self, report: WorkerReport) -> None:
        """Apply a worker's report; order between workers is free. Raises MissingReportsError."""
        worker = report.worker
        ended = self._states[worker].apply(report)
        if ended is None:
            return
        for prompt in report.accepted:
            self._pending.add(worker, prompt.hashes)
        self._drop_accepted(worker, (prompt.key for prompt in report.accepted))
        for prompt in ended:
            self._pending.remove(worker, prompt.hashes)
        self._committed.add(worker, report.stored)
        self._committed.discard(worker, report.evicted)
        self._set_threshold(worker)

    def restore(self, snapshot: WorkerSnapshot) -> None:
        """Replace missed reports by a snapshot.

        The snapshot omits own requests that were accepted and have ended: `withdraw` them on
        completion.
        """
        worker = snapshot.worker
        if not self._states[worker].restore(snapshot):
            return
        self._drop_accepted(worker, (request.prompt.key for request in snapshot.requests))
        self._clear(worker)
        for prompt in (
            *self._states[worker].requests.prompts(),
            *self._unaccepted[worker].prompts(),
        ):
            self._pending.add(worker, prompt.hashes)
        self._committed.add(worker, snapshot.committed)
        self._set_threshold(worker)

    def snapshot(self, worker: int) -> WorkerSnapshot:
        """Return the folded log of the worker, without own unaccepted requests."""
        return self._states[worker].snapshot(worker)

    def lose(self, worker: int, *, permanently: bool = True) -> list[RequestKey]:
        """Drop a worker's state; return this router's requests there, to be routed again.

        permanently: this incarnation does not return; otherwise its next snapshot counts.
        """
        state, unaccepted_requests = self._states[worker], self._unaccepted[worker]
        accepted_keys = [key for key in state.requests if key.router == self.config.number]
        unaccepted = list(unaccepted_requests)
        if permanently:
            state.lose()
        else:
            state.forget()
        for key in unaccepted:
            self.withdraw(key)
        self._clear(worker)
        self._set_threshold(worker)
        return [*accepted_keys, *unaccepted]

    def _added(self, prompt: Prompt, matched_blocks: int) -> int:
        return self._work(self.cached_tokens(prompt, matched_blocks), prompt.prompt_tokens)

    def _candidate(
        self,
        worker: int,
        priority: Priority,
        matched_blocks: int,
        added: int,
        held: Sequence[OpenRequests] | None,
    ) -> RouteCandidate:
        books = self._totals(worker, priority)
        if held is not None:
            books.append(held[worker].visible_to(priority))
        return RouteCandidate(
            worker=worker,
            matched_blocks=matched_blocks,
            added=added,
            load=sum(totals.load for totals in books),
            queued=sum(totals.queued for totals in books),
            threshold=self._thresholds[worker],
        )

    def _totals(self, worker: int, visible_to: Priority) -> list[RequestTotals]:
        books = self._states[worker].requests, self._unaccepted[worker]
        return [open_requests.visible_to(visible_to) for open_requests in books]

    def _match(self, worker: int, prompt: Prompt) -> int:
        committed = self._committed.match(worker, prompt.hashes)
        return max(committed, self._pending.match(worker, prompt.hashes))

    def _drop_accepted(self, worker: int, accepted: Iterable[RequestKey]) -> None:
        for key in accepted:
            if key in self._unaccepted[worker]:
                self.withdraw(key)

    def _clear(self, worker: int) -> None:
        self._committed.clear(worker)
        self._pending.clear(worker)

    def _set_threshold(self, worker: int) -> None:
        calibration = self._states[worker].calibration
        self._thresholds[worker] = threshold(self.config.saturation, self._work, calibration)
