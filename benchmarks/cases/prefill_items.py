"""Items per second of /v1/score and /v1/classify, with an engine that answers at once.

    python -m benchmarks prefill_items

`tandem serve` with stub prefill workers (prefill.engine=stub): HTTP, tokenizer, router, sockets,
batches and logs are real, only the model is not. Then how long a request of one item takes while
one of thousands runs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import msgspec
import psutil

from benchmarks.harness import Case, Measured, Table
from benchmarks.support.http_line import HttpLine
from cluster.http.server import free_port
from cluster.serving.server import serving
from contracts.config import BUNDLED
from contracts.loading import load_config

CONTEXT = "You read reviews of kitchen tools and decide what their authors felt about them. " * 2
TEXT = "Review {number}: it arrived on day {day}, and after that the handle never sat straight."
LABELS = (" negative", " positive")
LABEL_IDS = (300, 301)
INGRESS = "ray::ServeReplica:tandem:Ingress"
HOST = "127.0.0.1"


def body(path: str, items: int, request: int) -> bytes:
    """`items` rows that share a context and nothing else, with any other request neither."""
    numbers = range(request * items, (request + 1) * items)
    texts = [TEXT.format(number=number, day=number % 31) for number in numbers]
    if path == "/v1/score":
        asked: dict[str, Any] = {"query": CONTEXT, "items": texts, "label_token_ids": LABEL_IDS}
    else:
        asked = {"input": texts, "prefix": CONTEXT, "labels": LABELS}
    return msgspec.json.encode({"model": BUNDLED, **asked})


def count(path: str, answer: bytes) -> int:
    return len(msgspec.json.decode(answer)["scores" if path == "/v1/score" else "data"])


class Load:
    """So many clients, each with one request after the other. No two requests are equal."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._requests = 0

    async def run(self, path: str, items: int, clients: int, total: int) -> float:
        """Items per second. Raises RuntimeError for an answer that is none."""
        left = max(clients, total // items)
        bodies = [body(path, items, self._requests + number) for number in range(left)]
        self._requests += left
        waiting = iter(bodies)

        async def client() -> int:
            line = await HttpLine.open(HOST, self._port)
            answers = [count(path, await line.post(path, each)) for each in waiting]
            line.close()
            return sum(answers)

        started_s = time.perf_counter()
        answered = sum(await asyncio.gather(*(client() for _ in range(clients))))
        if answered != left * items:
            raise RuntimeError(f"{path}: {answered} answers to {left * items} items")
        return answered / (time.perf_counter() - started_s)

    async def beside(self, items: int, pause_s: float) -> tuple[float, list[float]]:
        """Seconds of a request of `items`, and of each of those of one item sent meanwhile."""
        path, large, small = "/v1/classify", *[await self._line() for _ in range(2)]
        started_s, done = time.perf_counter(), asyncio.Event()

        async def run_large() -> float:
            await large.post(path, body(path, items, self._next()))
            done.set()
            return time.perf_counter() - started_s

        running, latencies = asyncio.create_task(run_large()), []
        while not done.is_set():
            asked_s = time.perf_counter()
            await small.post(path, body(path, 1, self._next()))
            latencies.append(time.perf_counter() - asked_s)
            await asyncio.sleep(pause_s)
        return await running, latencies

    async def _line(self) -> HttpLine:
        return await HttpLine.open(HOST, self._port)

    def _next(self) -> int:
        self._requests += 1
        return 1_000_000 + self._requests


class IngressTime:
    """CPU seconds of the ingress process."""

    def __init__(self) -> None:
        children = psutil.Process().children(recursive=True)
        (self._process,) = [child for child in children if INGRESS in " ".join(child.cmdline())]

    def read_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


async def _measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    load, ingress = Load(port), IngressTime()
    samples: dict[str, Any] = {}
    for _ in range(options.rounds):
        for path in ("/v1/score", "/v1/classify"):
            for items in options.items:
                cpu_s = ingress.read_s()
                per_s = await load.run(path, items, options.clients, options.total)
                done = max(options.clients, options.total // items) * items
                sample = {"per_s": per_s, "cpu_us": 1e6 * (ingress.read_s() - cpu_s) / done}
                samples.setdefault(f"{path} {items}", []).append(sample)
    large_s, small_s = await load.beside(options.large, pause_s=0.02)
    samples["beside"] = {"large_s": large_s, "small_s": small_s}
    return samples


def summarise(samples: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, runs in samples.items():
        if name == "beside":
            found["large request, s"] = runs["large_s"]
            found["small request meanwhile, median ms"] = 1e3 * statistics.median(runs["small_s"])
            found["small request meanwhile, longest ms"] = 1e3 * max(runs["small_s"])
            continue
        rates = [run["per_s"] for run in runs]
        found[name] = {
            "median_per_s": statistics.median(rates),
            "range_per_s": [min(rates), max(rates)],
            "ingress_cpu_us": statistics.median(run["cpu_us"] for run in runs),
        }
    return found


def measure(options: argparse.Namespace) -> Measured:
    port = free_port()
    overrides = [
        "groups.attention_ranks=0",
        "groups.expert_ranks=0",
        f"groups.prefill_ranks={options.workers}",
        "prefill.engine=stub",
        f"http.port={port}",
    ]
    with serving(load_config(None, overrides)):
        samples = asyncio.run(_measure(port, options))
    return Measured(samples, summarise(samples))


def tables(summary: dict[str, Any]) -> list[Table]:
    rates, beside = [], []
    for name, row in summary.items():
        if isinstance(row, dict):
            low, high = row["range_per_s"]
            cpu = f"{row['ingress_cpu_us']:.0f}"
            rates.append([name, f"{row['median_per_s']:.0f}", f"{low:.0f} to {high:.0f}", cpu])
        else:
            beside.append([name, f"{row:.2f}"])
    columns = ["endpoint, items per request", "items/s", "range", "ingress CPU us per item"]
    return [Table("", columns, rates), Table("", ["", "value"], beside)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="stub prefill workers")
    parser.add_argument("--clients", type=int, default=8, help="concurrent requests")
    parser.add_argument(
        "--items", type=int, nargs="+", default=[1, 16, 100, 1000], help="per request"
    )
    parser.add_argument("--total", type=int, default=8000, help="items of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", type=int, default=4000, help="items of the large request")


CASES = [
    Case(
        "prefill_items",
        "Items per second",
        "Items per second of /v1/score and /v1/classify with stub prefill workers: everything "
        "but the model is real.",
        measure,
        tables,
        add_options,
    )
]
