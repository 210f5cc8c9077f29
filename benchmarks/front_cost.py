"""What the HTTP front costs: the same small requests through it, and through uvicorn as it comes,
or through another checkout of this project.

    python -m benchmarks.front_cost
    python -m benchmarks.front_cost --other ../checkout

Two servers in processes of their own, with a backend that answers at once, so that all that is
measured is the front and the API. Blocks of requests in turns, A B and B A; the ratio pair by pair.
Beside the time that a client waits stands the processor time that the server took for it: on a
machine that does other things too, only that can be told apart by a few percent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.harness import Result, write_result
from benchmarks.http_line import HttpLine
from cluster.http.server import free_port

SERVER = Path(__file__).with_name("front_server.py")
ROOT = Path(__file__).parents[1]
BODY = {"model": "bundled", "prompt": "How are you?", "max_tokens": 1, "temperature": 0}
STREAM = {**BODY, "max_tokens": 24, "stream": True, "ignore_eos": True}
LINES = 8
CPU = ", processor"
START_S = 60.0

Samples = dict[str, dict[str, list[float]]]


class Server(NamedTuple):
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


async def one_at_a_time(port: int, requests: int) -> float:
    """Median seconds of a completion on a connection that stays."""
    line = await HttpLine.open("127.0.0.1", port)
    body, times = msgspec.json.encode(BODY), []
    for _ in range(requests):
        begun_s = time.perf_counter()
        await line.post("/v1/completions", body)
        times.append(time.perf_counter() - begun_s)
    line.close()
    return statistics.median(times)


async def many_at_once(port: int, requests: int) -> float:
    """Seconds per completion, LINES clients at once."""
    begun_s = time.perf_counter()
    await asyncio.gather(*(one_at_a_time(port, requests // LINES) for _ in range(LINES)))
    return (time.perf_counter() - begun_s) / requests


async def connections(port: int, requests: int) -> float:
    """Median seconds of a completion on a connection of its own."""
    return statistics.median([await one_at_a_time(port, 1) for _ in range(requests)])


async def streams(port: int, requests: int) -> float:
    """Median seconds of a stream of 24 tokens."""
    line = await HttpLine.open("127.0.0.1", port)
    body, times = msgspec.json.encode(STREAM), []
    for _ in range(requests):
        begun_s = time.perf_counter()
        async for _ in line.stream("/v1/completions", body):
            pass
        times.append(time.perf_counter() - begun_s)
    line.close()
    return statistics.median(times)


CASES: dict[str, Callable[[int, int], Any]] = {
    "p50, one client": one_at_a_time,
    "1 / (requests/s), 8 clients": many_at_once,
    "p50, a connection each": connections,
    "p50, streamed, 24 tokens": streams,
}


async def measure(servers: dict[str, Server], pairs: int, requests: int) -> Samples:
    """Seconds by case and server, a value for each block."""
    kinds = [f"{case}{kind}" for case in CASES for kind in ("", CPU)]
    samples: Samples = {kind: {name: [] for name in servers} for kind in kinds}
    for case, run in CASES.items():
        for server in servers.values():
            await run(server.port, requests)  # warms up
        for pair in range(pairs):
            for name in sorted(servers, reverse=bool(pair % 2)):
                begun_s = servers[name].cpu_s()
                samples[case][name].append(await run(servers[name].port, requests))
                spent_s = servers[name].cpu_s() - begun_s
                samples[f"{case}{CPU}"][name].append(spent_s / requests)
    return samples


@contextlib.contextmanager
def running(checkout: Path, kind: str) -> Iterator[Server]:
    """A server that runs the code of `checkout`."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port), kind], cwd=checkout, env=environment
    )
    try:
        asyncio.run(_wait(port))
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait()


async def _wait(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                line = await HttpLine.open("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                line.close()
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--other", type=Path, help="a checkout to compare with (default: uvicorn)")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--requests", type=int, default=200, help="in a block")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    other = (options.other.resolve(), "front") if options.other else (ROOT, "uvicorn")
    with running(ROOT, "front") as ours, running(*other) as theirs:
        servers = {"front": ours, "other": theirs}
        samples = asyncio.run(measure(servers, options.pairs, options.requests))
    summary = {}
    for case, by_server in samples.items():
        pairs = zip(by_server["front"], by_server["other"], strict=True)
        ratios = [one / another for one, another in pairs]
        low, _, high = statistics.quantiles(ratios, n=4)
        summary[case] = {
            "front_ms": 1e3 * statistics.median(by_server["front"]),
            "other_ms": 1e3 * statistics.median(by_server["other"]),
            "ratio": statistics.median(ratios),
            "quartiles": [low, high],
        }
        row = summary[case]
        print(
            f"{case:<40} front {row['front_ms']:.3f} ms, other {row['other_ms']:.3f} ms, "
            f"ratio {row['ratio']:.3f} ({low:.3f} to {high:.3f})"
        )
    settings = {"other": other[1] if options.other is None else "checkout", "lines": LINES}
    settings |= {"pairs": options.pairs, "requests": options.requests}
    result = Result(
        name="front_cost", kind="measured", settings=settings, samples=samples, summary=summary
    )
    print(f"written: {write_result(result, options.output)}")


if __name__ == "__main__":
    main()
