"""Open requests of one worker, and their remaining work."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.requests import Priority
from contracts.routing_messages import OpenRequest, Prompt, RequestKey
from planner.routing.request_work import RequestWork


class _Open:
    __slots__ = ("done_tokens", "in_progress", "prompt", "remaining", "started", "until_tokens")

    def __init__(self, request: OpenRequest, remaining: int, in_progress: int) -> None:
        self.prompt = request.prompt
        self.done_tokens = request.done_tokens
        self.until_tokens = request.until_tokens
        self.started = request.started
        self.remaining = remaining
        self.in_progress = in_progress


class RequestTotals:
    """Sums over open requests.

    load    = Σ work(done, prompt)
    queued  = load − Σ work(done, until)   of requests in a running batch
    """

    __slots__ = ("load", "queued")

    def __init__(self) -> None:
        self.load = self.queued = 0

    def count(self, entry: _Open, sign: int) -> None:
        self.load += sign * entry.remaining
        self.queued += sign * (entry.remaining - entry.in_progress)


class OpenRequests:
    """Open requests of one worker; each stores its share of the totals, so they cannot drift."""

    def __init__(self, work: RequestWork) -> None:
        self._totals = {priority: RequestTotals() for priority in Priority}
        self._work = work
        self._requests: dict[RequestKey, _Open] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    def visible_to(self, priority: Priority) -> RequestTotals:
        """Return the totals that a request of that class waits for; LS ignores BE work."""
        return self._totals[priority]

    def remaining(self, key: RequestKey) -> int:
        """Return the remaining work of an open request."""
        return self._entry(key).remaining

    def entries(self) -> Iterator[OpenRequest]:
        """Yield the requests in order of arrival; `add` rebuilds the state from them."""
        for entry in self._requests.values():
            yield OpenRequest(entry.prompt, entry.done_tokens, entry.started, entry.until_tokens)

    def prompts(self) -> list[Prompt]:
        return [entry.prompt for entry in self._requests.values()]

    def open(self, prompt: Prompt, done_tokens: int) -> None:
        """Add a request of which `done_tokens` are expected to be cached."""
        self.add(OpenRequest(prompt, done_tokens, False))

    def add(self, request: OpenRequest) -> None:
        key = request.prompt.key
        if key in self._requests:
            raise ValueError(f"request {tuple(key)} is already open on this worker")
        remaining = self._work(request.done_tokens, request.prompt.prompt_tokens)
        in_progress = self._in_progress(request.done_tokens, request.until_tokens)
        entry = self._requests[key] = _Open(request, remaining, in_progress)
        self._count(entry, 1)

    def advance(self, key: RequestKey, done_tokens: int, until_tokens: int = 0) -> None:
        """Set the tokens that are done, and the end of what a running batch computes."""
        entry = self._entry(key)
        if max(done_tokens, until_tokens) > entry.prompt.prompt_tokens:
            raise ValueError(
                f"request {tuple(key)}: done_tokens={done_tokens}, until_tokens={until_tokens} of "
                f"a prompt of {entry.prompt.prompt_tokens} tokens"
            )
        self._count(entry, -1)
        entry.started = True
        entry.done_tokens, entry.until_tokens = done_tokens, until_tokens
        entry.remaining = self._work(done_tokens, entry.prompt.prompt_tokens)
        entry.in_progress = self._in_progress(done_tokens, until_tokens)
        self._count(entry, 1)

    def close(self, key: RequestKey) -> Prompt:
        """Remove an ended request."""
        entry = self._entry(key)
        self._count(entry, -1)
        del self._requests[key]
        return entry.prompt

    def _entry(self, key: RequestKey) -> _Open:
        entry = self._requests.get(key)
        if entry is None:
            raise ValueError(f"request {tuple(key)} is not open on this worker")
        return entry

    def _in_progress(self, done_tokens: int, until_tokens: int) -> int:
        return self._work(done_tokens, until_tokens) if until_tokens > done_tokens else 0

    def _count(self, entry: _Open, sign: int) -> None:
        for priority, totals in self._totals.items():
            if entry.prompt.priority <= priority:
                totals.count(entry, sign)
