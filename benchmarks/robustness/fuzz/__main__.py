"""Mutated requests against the API: no 5xx, documented shapes, bounded time and memory.

    python -m benchmarks.robustness.fuzz --requests 1000000        # in process, without ranks
    python -m benchmarks.robustness.fuzz --seed 1 --first 4711 --requests 1      # one request again

The seed and the number determine a request. Exit status 1: at least one failed. Over HTTP mutated
and malformed requests are part of a soak (`python -m benchmarks.robustness --hostile`).
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from typing import Any

import msgspec
import psutil

from benchmarks.robustness.fuzz.in_process import KEY, OPERATOR_KEY, InProcess, fuzzed_app
from benchmarks.robustness.fuzz.oracle import Oracle, invariant
from benchmarks.robustness.fuzz.requests import FuzzRequest, RequestGenerator
from contracts.config import BUNDLED

MEMORY_GROWTH_BYTES = 512 << 20  # over the start, of all processes together
PROBE_INTERVAL = 500
MAX_FAILURES = 20  # then the run ends


class FuzzRun:
    """Sends requests, and valid ones after every PROBE_INTERVAL, whose answers must not change.
    failures: a line each."""

    def __init__(
        self,
        target: InProcess,
        generator: RequestGenerator,
        oracle: Oracle,
    ) -> None:
        self._target, self._generator, self._oracle = target, generator, oracle
        self._expected: list[tuple[FuzzRequest, Any]] = []
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []

    async def run(self, numbers: range) -> None:
        memory, start_bytes = psutil.Process().memory_info, psutil.Process().memory_info().rss
        await self._learn()
        for start in range(0, len(numbers), PROBE_INTERVAL):
            some = numbers[start : start + PROBE_INTERVAL]
            for number in some:
                await self._try(number)
            await self._probe(some[-1])
            grown = memory().rss - start_bytes
            if grown > MEMORY_GROWTH_BYTES:
                self.failures.append(f"request {some[-1]}: memory grew by {grown >> 20} MiB")
            if len(self.failures) >= MAX_FAILURES:
                return

    async def _try(self, number: int) -> None:
        request = self._generator.request(number)
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
    return asyncio.run(_run(InProcess(fuzzed_app()[0]), options))


async def _run(target: InProcess, options: argparse.Namespace) -> int:
    got = await target.send(FuzzRequest(-1, "GET", "/openapi.json", "", [], b""))
    document = msgspec.json.decode(got.body)
    generator = RequestGenerator(options.seed, document, BUNDLED, KEY, OPERATOR_KEY)
    run = FuzzRun(target, generator, Oracle(document))
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
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
