"""Mutated requests against the API: no 5xx, no wrong shape, nothing slow, memory bounded.

    # in process, ranks that compute nothing
    python -m benchmarks.robustness.fuzz --requests 1000000
    # over HTTP, a server of its own
    python -m benchmarks.robustness.fuzz --serve --requests 100000
    python -m benchmarks.robustness.fuzz --http http://127.0.0.1:8000 --requests 1000
    python -m benchmarks.robustness.fuzz --replay fuzz-1-4711.json     # one request again

A request follows from the seed and its number. Exit status 1: something failed, and is in a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from pathlib import Path

import msgspec
import psutil
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.robustness.fuzz.in_process import KEY, OPERATOR_KEY, InProcess, fuzzed_app
from benchmarks.robustness.fuzz.oracle import Oracle
from benchmarks.robustness.fuzz.requests import Made, Maker
from benchmarks.robustness.fuzz.run import Failure, Memory, Report, Run, Target, write_failures
from benchmarks.robustness.fuzz.wire import OverHttp, with_wire
from benchmarks.support.server import ServerProcess
from contracts.config import BUNDLED

MEMORY_GROWTH_BYTES = 512 << 20  # over the start, of all processes together
# So small that the largest legal request is answered within the oracle's limit on two cores.
SERVED = (
    *("--attention-ranks", "1", "--expert-ranks", "1", "--prefill-ranks", "1"),
    *("--set", "model.max_context_tokens=256", "--set", "http.max_batch_items=8"),
    *("--set", "http.max_body_bytes=1048576", "--set", "kv.pool_tokens=16384"),
)


def main() -> int:
    options = _options()
    logging.disable(logging.WARNING)  # a broken request is no news here
    with contextlib.ExitStack() as stack:
        url = options.http
        processes = [psutil.Process()]
        if options.serve:
            server = stack.enter_context(ServerProcess(*SERVED))
            server.wait_healthy()
            url = server.url
            processes = psutil.Process(server.pid).children(recursive=True)
        seed = _failed(options.replay).seed if options.replay else options.seed
        target = OverHttp(url, seed) if url else InProcess(fuzzed_app()[0])
        return asyncio.run(_run(target, Memory(processes, MEMORY_GROWTH_BYTES), options, url))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="at a time, over HTTP")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--http", metavar="URL", help="a server that runs, without API keys")
    where.add_argument("--serve", action="store_true", help="start one for the run")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="ask a failed request again")
    return parser.parse_args()


def _failed(path: Path) -> Failure:
    return msgspec.json.decode(path.read_bytes(), type=Failure)


async def _run(target: Target, memory: Memory, options: argparse.Namespace, url: str | None) -> int:
    got = await target.send(Made(-1, "GET", "/openapi.json", "", [], b""))
    document = msgspec.json.decode(got.body)
    oracle = Oracle(document)
    if options.replay:
        return await _replay(target, oracle, _failed(options.replay))
    maker = Maker(options.seed, document, BUNDLED, *((None,) if url else (KEY, OPERATOR_KEY)))
    if url:
        maker.after = with_wire
    run = Run(target, maker, oracle, memory, clients=options.clients if url else 1)
    numbers = range(options.first, options.first + options.requests)
    print(f"seed {options.seed}, requests {numbers.start} to {numbers.stop - 1}")
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[failed]}")) as progress:
        task = progress.add_task("requests", total=len(numbers), failed="")

        def step() -> None:
            count = run.report.sent
            if count % 100 == 0:
                failed = f"{len(run.report.failures)} failed"
                progress.update(task, completed=count, failed=failed)

        report = await run.all(numbers, step)
        progress.update(task, completed=report.sent)
    await target.close()
    return _show(report, options.failures)


async def _replay(target: Target, oracle: Oracle, failure: Failure) -> int:
    answer = await target.send(failure.request)
    reason = oracle.verdict(failure.request, answer)
    print(f"status {answer.status} after {answer.duration_s:.3f} s: {reason or 'as it should be'}")
    print(answer.body[:2000].decode("utf-8", "replace"))
    return 1 if reason else 0


def _show(report: Report, folder: Path) -> int:
    statuses = ", ".join(
        f"{status}: {count:,}" for status, count in sorted(report.statuses.items())
    )
    print(
        f"{report.sent:,} requests and {report.probes:,} probes in {report.seconds:.0f} s,"
        f" {report.sent / max(report.seconds, 1e-9):.0f} requests/s"
    )
    print(f"status {statuses}")
    print(
        f"slowest {report.slowest_s:.2f} s; resident memory {report.rss_start_bytes >> 20} MiB at"
        f" the start, {report.rss_most_bytes >> 20} MiB at most"
    )
    for path, failure in zip(write_failures(report.failures, folder), report.failures, strict=True):
        print(f"FAILED {path}: {failure.request.path}: {failure.reason.splitlines()[-1]}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
