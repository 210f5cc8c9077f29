"""Open requests of one worker: what they promise to cache, and the work they still are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contracts.routing import OpenRequest, Prompt, RequestKey
from planner.request_work import RequestWork


class _Open:
    __slots__ = ("done_tokens", "prompt", "remaining", "started")

    def __init__(self, request: OpenRequest, remaining: int) -> None:
        self.prompt = request.prompt
        self.done_tokens = request.done_tokens
        self.started = request.started
        self.remaining = remaining


class OpenRequests:
    """The books of one worker. At any time

        load        = Σ work(done, prompt)     over open requests
        open_tokens = Σ prompt                 of those that have not started
                    + Σ (prompt − done)        of those that have

    What a request adds is stored with it, and that is what is taken off: no drift. It promises all
    blocks of its prompt as long as it is open, those that were cached included: an evicted one it
    computes again, and one that another request was to compute, but will not.

    A hash names all blocks before its own, so promised blocks are a tree; each knows how many
    requests end there and how many blocks follow it. Siblings touch their own suffixes only:

        h0 (1) ─ h1 (2) ┬ h2 (1) ─ h3 (1)      prompts h0 h1 h2 h3 and h0 h1 h4
                        └ h4 (1)
    """

    def __init__(self, work: RequestWork) -> None:
        self.load = 0
        self.open_tokens = 0
        self.running = 0
        self._work = work
        self._requests: dict[RequestKey, _Open] = {}
        self._promised: dict[bytes, int] = {}  # hash → requests that end there + next blocks

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    def remaining(self, key: RequestKey) -> int:
        """Work that an open request still is."""
        return self._entry(key).remaining

    def entries(self) -> Iterator[OpenRequest]:
        """What `add` would rebuild these books from, in order of arrival."""
        for entry in self._requests.values():
            yield OpenRequest(entry.prompt, entry.done_tokens, entry.started)

    def promises(self, digest: bytes) -> bool:
        return digest in self._promised

    def promised(self) -> list[bytes]:
        return list(self._promised)

    def open(self, prompt: Prompt, done_tokens: int) -> Sequence[bytes]:
        """Adds a request of which `done_tokens` are expected to be cached. Returns the hashes that
        were not promised before."""
        return self.add(OpenRequest(prompt, done_tokens, False))

    def add(self, request: OpenRequest) -> Sequence[bytes]:
        key = request.prompt.key
        if key in self._requests:
            raise ValueError(f"request {tuple(key)} is already open on this worker")
        remaining = self._work(request.done_tokens, request.prompt.prompt_tokens)
        entry = self._requests[key] = _Open(request, remaining)
        self._count(entry, 1)
        return self._promise(request.prompt.hashes)

    def _promise(self, hashes: tuple[bytes, ...]) -> Sequence[bytes]:
        promised = self._promised
        if not hashes or hashes[0] not in promised:
            promised.update(dict.fromkeys(hashes, 1))  # at once: on the path of a decision
            return hashes
        blocks = len(hashes)
        while hashes[blocks - 1] not in promised:
            blocks -= 1
        promised[hashes[blocks - 1]] += 1
        promised.update(dict.fromkeys(hashes[blocks:], 1))
        return hashes[blocks:]

    def advance(self, key: RequestKey, done_tokens: int) -> None:
        """`done_tokens` are cached or computed; fewer than expected put work back."""
        entry = self._entry(key)
        if done_tokens > entry.prompt.prompt_tokens:
            raise ValueError(
                f"request {tuple(key)}: done_tokens={done_tokens} of a prompt of "
                f"{entry.prompt.prompt_tokens} tokens"
            )
        self._count(entry, -1)
        entry.started = True
        entry.done_tokens = done_tokens
        entry.remaining = self._work(done_tokens, entry.prompt.prompt_tokens)
        self._count(entry, 1)

    def close(self, key: RequestKey) -> list[bytes]:
        """The request ended. Returns the hashes that are no longer promised."""
        entry = self._entry(key)
        self._count(entry, -1)
        del self._requests[key]
        promised, broken = self._promised, []
        for digest in reversed(entry.prompt.hashes):
            promised[digest] -= 1
            if promised[digest]:
                break
            del promised[digest]
            broken.append(digest)
        return broken

    def _entry(self, key: RequestKey) -> _Open:
        entry = self._requests.get(key)
        if entry is None:
            raise ValueError(f"request {tuple(key)} is not open on this worker")
        return entry

    def _count(self, entry: _Open, sign: int) -> None:
        self.load += sign * entry.remaining
        self.running += sign * entry.started
        done_tokens = entry.done_tokens if entry.started else 0
        self.open_tokens += sign * (entry.prompt.prompt_tokens - done_tokens)
