"""Mutated requests against the API: no 5xx, documented shapes, bounded time and memory.

    python -m benchmarks.robustness.fuzz --requests 1000000        # in process, without ranks
    python -m benchmarks.robustness.fuzz --serve                   # over HTTP, a server of its own
    python -m benchmarks.robustness.fuzz --http http://127.0.0.1:8000 --requests 1000
    python -m benchmarks.robustness.fuzz --seed 1 --first 4711 --requests 1      # one request again

The seed and the number determine a request. Exit status 1: at least one failed.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import psutil

from benchmarks.robustness.fuzz.in_process import KEY, OPERATOR_KEY, InProcess, fuzzed_app
from benchmarks.robustness.fuzz.oracle import Answer, Oracle, invariant
from benchmarks.robustness.fuzz.requests import FuzzRequest, RequestGenerator
from benchmarks.robustness.fuzz.wire import OverHttp, malformed
from benchmarks.support.server import ServerProcess
from contracts.config import BUNDLED

MEMORY_GROWTH_BYTES = 512 << 20  # over the start, of all processes together
PROBE_INTERVAL = 500
MAX_FAILURES = 20  # then the run ends
# The largest legal request is answered within the oracle's limit on two cores.
SERVED = (
    *("--attention-ranks", "1", "--expert-ranks", "1", "--prefill-ranks", "1"),
    *("--set", "model.max_context_tokens=256", "--set", "http.max_batch_items=8"),
    *("--set", "http.max_body_bytes=1048576", "--set", "kv.pool_tokens=16384"),
)


class Target(Protocol):
    async def send(self, request: FuzzRequest) -> Answer: ...


class FuzzRun:
    """Sends `clients` requests at a time, and valid ones after every PROBE_INTERVAL, whose answers
    must not change. failures: a line each."""

    def __init__(
        self,
        target: Target,
        generator: RequestGenerator,
        oracle: Oracle,
        processes: list[psutil.Process],
        *,
        clients: int = 1,
        is_wire: bool = False,
    ) -> None:
        self._target, self._generator, self._oracle = target, generator, oracle
        self._processes, self._clients, self._is_wire = processes, clients, is_wire
        self._expected: list[tuple[FuzzRequest, Any]] = []
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []

    async def run(self, numbers: range) -> None:
        start_bytes = self._memory_bytes()
        await self._learn()
        for start in range(0, len(numbers), PROBE_INTERVAL):
            some = numbers[start : start + PROBE_INTERVAL]
            left = iter(some)
            await asyncio.gather(*(self._client(left) for _ in range(self._clients)))
            await self._probe(some[-1])
            grown = self._memory_bytes() - start_bytes
            if grown > MEMORY_GROWTH_BYTES:
                self.failures.append(f"request {some[-1]}: memory grew by {grown >> 20} MiB")
            if len(self.failures) >= MAX_FAILURES:
                return

    def _memory_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            request = self._generator.request(number)
            if self._is_wire:
                request = malformed(request, self._generator.seed)
            answer = await self._target.send(request)
            self.statuses[answer.status] += 1
            if reason := self._oracle.problem(request, answer):
                self.failures.append(f"request {number}: {request.path}: {reason}")

    async def _learn(self) -> None:
        for path in self._generator.routes:
            for request in self._generator.valid_requests(path):
                answer = await self._target.send(request)
                if answer.status != 200 or answer.fault:
                    self.failures.append(f"valid {path}: {answer.status} {answer.fault}")
                elif _is_deterministic(request):
                    self._expected.append((request, invariant(answer.body)))

    async def _probe(self, last: int) -> None:
        for request, expected in self._expected:
            answer = await self._target.send(request)
            if answer.status != 200 or invariant(answer.body) != expected:
                self.failures.append(f"request {last}: then {request.path} changed its answer")


def _is_deterministic(request: FuzzRequest) -> bool:
    sampled = request.path in ("/v1/completions", "/v1/chat/completions")
    return not sampled or b'"temperature":0,' in request.body or request.body.endswith(b":0}")


def main() -> int:
    options = _options()
    logging.disable(logging.WARNING)  # the server logs malformed requests
    with contextlib.ExitStack() as stack:
        url, processes = options.http, [psutil.Process()]
        if options.serve:
            server = stack.enter_context(ServerProcess(*SERVED))
            server.wait_healthy()
            url = server.url
            processes = psutil.Process(server.pid).children(recursive=True)
        target = OverHttp(url, options.seed) if url else InProcess(fuzzed_app()[0])
        return asyncio.run(_run(target, processes, options, url))


async def _run(
    target: Target, processes: list[psutil.Process], options: argparse.Namespace, url: str | None
) -> int:
    got = await target.send(FuzzRequest(-1, "GET", "/openapi.json", "", [], b""))
    document = msgspec.json.decode(got.body)
    keys = (None,) if url else (KEY, OPERATOR_KEY)
    generator = RequestGenerator(options.seed, document, BUNDLED, *keys)
    clients = options.clients if url else 1
    run = FuzzRun(
        target, generator, Oracle(document), processes, clients=clients, is_wire=bool(url)
    )
    started_s = time.monotonic()
    await run.run(range(options.first, options.first + options.requests))
    seconds, sent = time.monotonic() - started_s, run.statuses.total()
    print(f"{sent:,} requests in {seconds:.0f} s, by status: {dict(sorted(run.statuses.items()))}")
    for failure in run.failures:
        print(f"FAILED (seed {options.seed}) {failure}")
    return 1 if run.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="concurrent ones, over HTTP")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--http", metavar="URL", help="a running server without API keys")
    where.add_argument("--serve", action="store_true", help="start a server for the run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
