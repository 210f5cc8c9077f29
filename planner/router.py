"""The router of prefill-only requests: which worker, and when to wait (MoE-Prefill, Section 7).

    saturation filter → longest contiguous match over committed ∪ pending → least load

What a router knows of a worker is the fold of the worker's log (planner/worker_state.py), the same
for all routers, and besides its *own* requests that the worker has not yet accepted. Pure: whoever
holds it hands it reports and sends what it decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from contracts.routing import Prompt, RequestKey, WorkerReport, WorkerSnapshot
from planner.open_requests import OpenRequests
from planner.prefix_index import PrefixIndex
from planner.request_work import RequestWork
from planner.route_policies import Candidate, Policy, prefix_then_load
from planner.saturation import SaturationConfig, threshold
from planner.worker_state import WorkerState, usable_tokens


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """number: of this router, as in its requests' keys. block_tokens: as in the workers' caches."""

    workers: int
    saturation: SaturationConfig
    number: int = 0
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("workers", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"router.{name}={getattr(self, name)}: give 1 or more")


class Decision(NamedTuple):
    """Where a request goes. cached_tokens: of its prompt, as expected; added: its work there."""

    worker: int
    cached_tokens: int
    added: int


class Router:
    """State and decisions of one router. Not thread-safe: one owner."""

    def __init__(
        self, config: RouterConfig, work: RequestWork, policy: Policy = prefix_then_load
    ) -> None:
        self.config = config
        self._work = work
        self._policy = policy
        self._states = [WorkerState(work, config.block_tokens) for _ in range(config.workers)]
        self._own = [OpenRequests(work) for _ in range(config.workers)]  # not accepted yet
        self._placed: dict[RequestKey, int] = {}  # worker of each of those
        self._thresholds = [threshold(config.saturation, work, None)] * config.workers
        self._index = PrefixIndex(config.workers)
        self._turn = 0

    def load(self, worker: int) -> int:
        """Work of its open requests and of those on their way."""
        return self._states[worker].requests.load + self._own[worker].load

    def threshold(self, worker: int) -> int:
        """Load from which on it is saturated."""
        return self._thresholds[worker]

    @property
    def blocks(self) -> int:
        """Distinct blocks that some worker holds or will hold."""
        return len(self._index)

    def route(self, prompt: Prompt) -> Decision | None:
        """Places a request and books it, or None: nobody takes it now, ask again after a report."""
        candidates = self.candidates(prompt)
        chosen = self._policy(candidates, self._turn) if candidates else None
        if chosen is None:
            return None
        return self._book(prompt, chosen.worker, chosen.matched_blocks, chosen.added)

    def assign(self, prompt: Prompt, worker: int) -> Decision:
        """Books a request with a worker that was chosen elsewhere (planner/backlog.py)."""
        matched_blocks = self._index.match(worker, prompt.hashes)
        return self._book(prompt, worker, matched_blocks, self._added(prompt, matched_blocks))

    def candidates(
        self,
        prompt: Prompt,
        beside: PrefixIndex | None = None,
        held: Sequence[OpenRequests] | None = None,
    ) -> list[Candidate]:
        """What each present worker is to the request. `beside` counts blocks that it also has, and
        `held` requests that it will also run."""
        matches = self._index.matches(prompt.hashes, beside)
        added = {blocks: self._added(prompt, blocks) for blocks in set(matches)}
        return [
            self._candidate(worker, matches[worker], added[matches[worker]], held)
            for worker, state in enumerate(self._states)
            if state.present
        ]

    def is_present(self, worker: int) -> bool:
        return self._states[worker].present

    def is_open(self, worker: int) -> bool:
        """Present and below its threshold."""
        return self._states[worker].present and self.load(worker) < self._thresholds[worker]

    def added(self, prompt: Prompt, worker: int) -> int:
        """Work that the request would be to a worker."""
        return self._added(prompt, self._index.match(worker, prompt.hashes))

    def cached_tokens(self, prompt: Prompt, matched_blocks: int) -> int:
        return usable_tokens(prompt, matched_blocks, self.config.block_tokens)

    def withdraw(self, key: RequestKey) -> None:
        """This router's request did not reach its worker, or is over. Without effect for one that
        was accepted: the worker's log says when that ends."""
        worker = self._placed.pop(key, None)
        if worker is not None:
            self._refresh(worker, self._own[worker].close(key))

    def apply(self, report: WorkerReport) -> None:
        """A worker's report, in any order between workers. Raises MissingReportsError."""
        touched = self._states[report.worker].apply(report)
        self._after_log(report.worker, touched, (prompt.key for prompt in report.accepted))

    def restore(self, snapshot: WorkerSnapshot) -> None:
        """In place of reports that were missed. It does not name own requests that have been
        accepted and have ended meanwhile: `withdraw` those once their answers are here."""
        touched = self._states[snapshot.worker].restore(snapshot)
        accepted = (request.prompt.key for request in snapshot.requests)
        self._after_log(snapshot.worker, touched, accepted)

    def snapshot(self, worker: int) -> WorkerSnapshot:
        """What this router has folded of the worker's log; its own requests are not in it."""
        return self._states[worker].snapshot(worker)

    def lose(self, worker: int, *, for_good: bool = True) -> list[RequestKey]:
        """The worker died. Returns this router's requests there, which must be routed again.

        for_good: this incarnation of it does not come back. Otherwise it only cannot be heard, and
        its next snapshot counts.
        """
        state, own = self._states[worker], self._own[worker]
        mine = [key for key in state.requests if key.router == self.config.number]
        unaccepted = list(own)
        self._refresh(worker, state.lose() if for_good else state.forget())
        for key in unaccepted:
            self.withdraw(key)
        self._thresholds[worker] = threshold(self.config.saturation, self._work, None)
        return [*mine, *unaccepted]

    def _book(self, prompt: Prompt, worker: int, matched_blocks: int, added: int) -> Decision:
        cached_tokens = self.cached_tokens(prompt, matched_blocks)
        self._own[worker].open(prompt, cached_tokens)
        self._index.add(worker, prompt.hashes[matched_blocks:])
        self._placed[prompt.key] = worker
        self._turn += 1
        return Decision(worker, cached_tokens, added)

    def _added(self, prompt: Prompt, matched_blocks: int) -> int:
        return self._work(self.cached_tokens(prompt, matched_blocks), prompt.prompt_tokens)

    def _candidate(
        self, worker: int, matched_blocks: int, added: int, held: Sequence[OpenRequests] | None
    ) -> Candidate:
        accepted, own = self._states[worker].requests, self._own[worker]
        load = accepted.load + own.load
        open_tokens = accepted.open_tokens + own.open_tokens
        waiting = accepted.waiting + own.waiting
        if held is not None:
            load += held[worker].load
            open_tokens += held[worker].open_tokens
            waiting += held[worker].waiting
        tau, running = self._thresholds[worker], accepted.running
        return Candidate(worker, matched_blocks, added, load, tau, open_tokens, waiting, running)

    def _after_log(self, worker: int, touched: list[bytes], accepted: Iterable[RequestKey]) -> None:
        state, own = self._states[worker], self._own[worker]
        for key in accepted:
            if key in own:  # from here on the log speaks for it
                del self._placed[key]
                touched += own.close(key)
        self._thresholds[worker] = threshold(self.config.saturation, self._work, state.calibration)
        self._refresh(worker, touched)

    def _refresh(self, worker: int, touched: Iterable[bytes]) -> None:
        state, own = self._states[worker], self._own[worker]
        for digest in touched:
            held = state.holds(digest) or own.promises(digest)
            self._index.put(worker, digest, held=held)
