"""One run: requests in order, probes in between, failures to files."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from benchmarks.robustness.fuzz.oracle import Answer, Oracle, lasting
from benchmarks.robustness.fuzz.requests import Made, Maker

PROBE_EVERY = 500
MAX_FAILURES = 20  # then a run ends: more of the same would only fill the disk


class Target(Protocol):
    async def send(self, request: Made) -> Answer: ...

    async def close(self) -> None: ...


class Failure(msgspec.Struct):
    """What `--replay` takes. body is base64 in JSON."""

    seed: int
    request: Made
    reason: str
    status: int
    answer: str


class Report(msgspec.Struct):
    sent: int = 0
    probes: int = 0
    statuses: Counter[int] = msgspec.field(default_factory=Counter)
    failures: list[Failure] = msgspec.field(default_factory=list)
    slowest_s: float = 0.0
    seconds: float = 0.0
    rss_start_bytes: int = 0
    rss_most_bytes: int = 0


class Memory:
    """Resident memory of some processes: at the start, and at most."""

    def __init__(self, processes: Iterable[psutil.Process], most_growth_bytes: int) -> None:
        self._processes = list(processes)
        self._most_growth_bytes = most_growth_bytes
        self.start_bytes = self.most_bytes = self.now_bytes()

    def now_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)

    def problem(self) -> str | None:
        """Looks; what is wrong with it."""
        self.most_bytes = max(self.most_bytes, self.now_bytes())
        grown = self.most_bytes - self.start_bytes
        if grown <= self._most_growth_bytes:
            return None
        return (
            f"memory grew by {grown >> 20} MiB from {self.start_bytes >> 20} MiB,"
            f" at most {self._most_growth_bytes >> 20} MiB were allowed"
        )


class Run:
    """Asks `clients` requests at a time, and after every PROBE_EVERY the honest ones."""

    def __init__(
        self, target: Target, maker: Maker, oracle: Oracle, memory: Memory, *, clients: int = 1
    ) -> None:
        self._target = target
        self._maker = maker
        self._oracle = oracle
        self._memory = memory
        self._clients = clients
        self._expected: list[tuple[Made, Any]] = []
        self.report = Report(rss_start_bytes=memory.start_bytes)

    async def all(self, numbers: range, step: Callable[[], None]) -> Report:
        """step: called after each request, for a progress bar."""
        started_s = time.perf_counter()
        await self._learn()
        for start in range(0, len(numbers), PROBE_EVERY):
            some = iter(numbers[start : start + PROBE_EVERY])
            await asyncio.gather(*(self._client(some, step) for _ in range(self._clients)))
            await self._probe(numbers[min(start + PROBE_EVERY, len(numbers)) - 1])
            if len(self.report.failures) >= MAX_FAILURES:
                break
        self.report.seconds = time.perf_counter() - started_s
        self.report.rss_most_bytes = self._memory.most_bytes
        return self.report

    async def _client(self, numbers: Iterator[int], step: Callable[[], None]) -> None:
        for number in numbers:
            request = self._maker.made(number)
            self._count(request, await self._target.send(request))
            step()

    def _count(self, request: Made, answer: Answer) -> None:
        self.report.sent += 1
        self.report.statuses[answer.status] += 1
        self.report.slowest_s = max(self.report.slowest_s, answer.duration_s)
        if reason := self._oracle.verdict(request, answer):
            self._fail(request, reason, answer)

    def _fail(self, request: Made, reason: str, answer: Answer) -> None:
        answer_text = answer.body[:2000].decode("utf-8", "replace")
        self.report.failures.append(
            Failure(self._maker.seed, request, reason, answer.status, answer_text)
        )

    async def _learn(self) -> None:
        """What honest requests are answered at the start. All of them are 200."""
        for path in self._maker.routes:
            for request in self._maker.honest(path):
                answer = await self._target.send(request)
                if answer.status != 200 or answer.fault:
                    self._fail(request, f"a valid body is not answered: {answer.fault}", answer)
                elif self._steady(request):
                    self._expected.append((request, lasting(answer.body)))

    def _steady(self, request: Made) -> bool:
        """Whether the same request has the same answer: greedy, or nothing drawn."""
        drawn = request.path in ("/v1/completions", "/v1/chat/completions")
        return not drawn or b'"temperature": 0' in request.body.replace(b"0.7", b"")

    async def _probe(self, last: int) -> None:
        for request, expected in self._expected:
            answer = await self._target.send(request)
            self.report.probes += 1
            if answer.status != 200 or lasting(answer.body) != expected:
                reason = f"an honest request is answered otherwise after request {last}"
                self._fail(request, reason, answer)
        if problem := self._memory.problem():
            self._fail(self._maker.made(last), problem, Answer(0, {}, b"", 0.0))


def write_failures(failures: Iterable[Failure], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for failure in failures:
        path = folder / f"fuzz-{failure.seed}-{failure.request.number}.json"
        path.write_bytes(msgspec.json.encode(failure))
        paths.append(path)
    return paths
