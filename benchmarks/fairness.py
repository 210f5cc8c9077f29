"""Small requests of others beside the largest single one that the limits allow.

    python -m benchmarks.fairness

`tandem serve` with both pipelines and two API keys. Small requests (a classification of one text,
a completion of four tokens) arrive at random times, of both keys: first alone, then beside one
large request of the first key. The large one is as large as the server takes: it is halved until it
is not refused. It is left before its end: what counts is what the others met meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Result, write_result
from benchmarks.server import ServerProcess

KEYS = ("first-key", "second-key")
CONFIG = """
groups: {attention_ranks: 1, expert_ranks: 1, prefill_ranks: 1}
http: {api_keys: [first-key, second-key]}
"""
TEXT = "WINNER! Claim your free 1000 pound prize now, call before midnight and quote your code."
ROWS, LABELS, PROMPTS, CHOICES, TOKENS = 4096, 256, 32, 128, 200
QUEUED = 64  # sequences: the large request is under way
DEPTH = "tandem_requests_waiting{"
TIMEOUT_S = 120.0
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "classify": ("/v1/classify", {"input": TEXT, "labels": ["spam", "ham"]}),
    "complete": (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 4, "temperature": 0, "ignore_eos": True},
    ),
}


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """kind: of SMALL. status 0: no answer."""

    kind: str
    key: int
    status: int
    seconds: float


def large(kind: str, halvings: int) -> tuple[str, dict[str, Any]]:
    """A request of thousands of passes or sequences, halved that often."""
    if kind == "classify":
        rows = [f"{TEXT} ({row})" for row in range(max(1, ROWS >> halvings))]
        return "/v1/classify", {"input": rows, "labels": _labels(LABELS)}
    prompts = [f"{TEXT} ({row})" for row in range(max(1, PROMPTS >> halvings))]
    body = {"prompt": prompts, "n": CHOICES, "max_tokens": TOKENS, "ignore_eos": True}
    return "/v1/completions", body


def _labels(count: int) -> list[str]:
    """Of several tokens each, so that each takes passes of its own."""
    return [f"{number} class {number * 7919 % 1000}" for number in range(count)]


async def _ask(http: httpx.AsyncClient, path: str, body: dict[str, Any], key: int) -> int:
    headers = {"authorization": f"Bearer {KEYS[key]}"}
    try:
        return (await http.post(path, json=body, headers=headers)).status_code
    except httpx.HTTPError:
        return 0


async def _small(http: httpx.AsyncClient, model: str, options: argparse.Namespace) -> list[Sample]:
    """The answers to `options.requests` requests at Poisson times."""
    draw = random.Random(options.seed)

    async def one(number: int, delay_s: float) -> Sample:
        await asyncio.sleep(delay_s)
        kind, key = list(SMALL)[number % 2], number // 2 % 2
        path, body = SMALL[kind]
        sent_s = time.monotonic()
        status = await _ask(http, path, {"model": model, **body}, key)
        return Sample(kind, key, status, time.monotonic() - sent_s)

    at_s, tasks = 0.0, []
    for number in range(options.requests):
        at_s += draw.expovariate(options.rate)
        tasks.append(asyncio.create_task(one(number, at_s)))
    return await asyncio.gather(*tasks)


async def _begins(http: httpx.AsyncClient, task: asyncio.Task[int]) -> bool:
    """Whether its sequences fill the queues before it ends: to check and tokenise it takes time."""
    while not task.done():
        text = (await http.get("/metrics", headers={"authorization": f"Bearer {KEYS[1]}"})).text
        depths = [line.split()[-1] for line in text.splitlines() if line.startswith(DEPTH)]
        if sum(map(float, depths)) >= QUEUED:
            return True
        await asyncio.wait([task], timeout=0.5)
    return False


@contextlib.asynccontextmanager
async def _beside(http: httpx.AsyncClient, model: str, kind: str) -> AsyncIterator[dict[str, Any]]:
    """A large request that has been let in, and is under way: what is asked for in it."""
    for halvings in range(13):
        path, body = large(kind, halvings)
        task = asyncio.create_task(_ask(http, path, {"model": model, **body}, 0))
        if await _begins(http, task):
            break
        print(f"large {kind} halved {halvings} times: status {task.result()}")
    told: dict[str, Any] = {"kind": kind, "halvings": halvings, "lasted": True}
    try:
        yield told
    finally:
        told["lasted"] = not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure(url: str, options: argparse.Namespace) -> dict[str, list[Sample]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
        answer = await http.get("/v1/models", headers={"authorization": f"Bearer {KEYS[0]}"})
        model = answer.json()["data"][0]["id"]
        await _small(http, model, options)  # warm
        samples = {"alone": await _small(http, model, options)}
        for kind in SMALL:
            async with _beside(http, model, kind) as told:
                samples[f"beside {kind}"] = await _small(http, model, options)
            print(told)
            await _quiet(http, model)
            samples[f"alone after {kind}"] = await _small(http, model, options)
    return samples


async def _quiet(http: httpx.AsyncClient, model: str) -> None:
    """Returns once a small request takes no longer than usual."""
    path, body = SMALL["complete"]
    for _ in range(100):
        sent_s = time.monotonic()
        await _ask(http, path, {"model": model, **body}, 1)
        if time.monotonic() - sent_s < 0.2:
            return
        await asyncio.sleep(0.2)


def summary(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, listed in samples.items():
        for kind in ("all", *SMALL):
            some = [s for s in listed if kind in ("all", s.kind)]
            cuts = statistics.quantiles([s.seconds for s in some], n=100, method="inclusive")
            found[f"{name}, {kind}"] = {
                "p50_ms": 1e3 * cuts[49],
                "p95_ms": 1e3 * cuts[94],
                "statuses": dict(Counter(str(s.status) for s in some)),
            }
    for kind in SMALL:
        for which in ("all", *SMALL):
            alone = found[f"alone after {kind}, {which}"]["p95_ms"]
            row = found[f"beside {kind}, {which}"]
            row["p95_times_alone"] = row["p95_ms"] / alone
    return found


def show(found: dict[str, Any]) -> None:
    table = Table("small requests", "p50 ms", "p95 ms", "p95 of alone", "statuses")
    for name, row in found.items():
        times = f"{row['p95_times_alone']:.1f}x" if "p95_times_alone" in row else ""
        table.add_row(
            name, f"{row['p50_ms']:.1f}", f"{row['p95_ms']:.1f}", times, str(row["statuses"])
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=8.0, help="small requests per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkout", type=Path, default=None, help="whose server; default: ours")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tandem.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        with ServerProcess("--config", str(config), checkout=options.checkout) as server:
            server.wait_healthy()
            samples = asyncio.run(measure(server.url, options))
    found = summary(samples)
    show(found)
    settings = {"requests": options.requests, "rate": options.rate, "seed": options.seed}
    result = Result(
        name="fairness",
        kind="measured",
        settings={**settings, "large": [ROWS, LABELS, PROMPTS, CHOICES, TOKENS]},
        samples=msgspec.to_builtins(samples),
        summary=found,
    )
    print(f"written: {write_result(result, options.output)}")


if __name__ == "__main__":
    main()
