"""A trace over streaming HTTP, at 1.5 times what the server can do: who is let in, what those are
told who are not, and what is left when it is over."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.load.figures import figures
from benchmarks.priorities.group import MODELS, POOL_TOKENS
from benchmarks.robustness.processes import others, processes
from benchmarks.robustness.server_state import read_metrics
from benchmarks.support.random_checkpoint import write_random_checkpoint
from benchmarks.support.server import ServerProcess
from cluster.fleet.model_folder import resolve_model_folder
from cluster.tools.bench.load_generator import HttpLoadGenerator, LoadTarget
from cluster.tools.bench.outcome import RequestResult
from cluster.tools.bench.workload import Lengths, RequestArrival, fit_trace, from_trace, read_trace
from contracts.config import BUNDLED
from contracts.requests import Priority

OVERLOAD, CALM = 1.5, 0.4  # of the measured capacity
LS_PART = 0.2
DIVISOR = 10  # of the trace's lengths
CAPACITY_REQUESTS = 60
CALM_S, LOOK_EVERY_S, DRAINED_S = 60.0, 5.0, 120.0
LONGEST_S = 900.0  # of a request, waiting to be let in not counted


async def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.trace is None:
        raise SystemExit("http needs --trace FILE: a CSV of the Azure LLM inference traces")
    rows = read_trace(options.trace)
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = Path(folder)
        with _server(path, options) as server:
            server.wait_healthy()
            client = _Client(server, path)
            capacity = await client.capacity(rows)
            samples: dict[str, Any] = {"capacity_jobs_per_s": capacity}
            for name, factor, seconds in (
                ("calm", CALM, CALM_S),
                ("overload", OVERLOAD, options.seconds),
            ):
                samples[name] = await client.play(rows, factor * capacity, seconds)
                print(name, _told(samples[name]), flush=True)
            samples["blocks"] = await client.drained()
            return samples


def _server(folder: Path, options: argparse.Namespace) -> ServerProcess:
    """With random weights and the bundled checkpoint's tokenizer."""
    bundled = resolve_model_folder(BUNDLED)
    vocabulary = json.loads((bundled / "config.json").read_text())["vocab_size"]
    model = MODELS[options.model] | {"vocab_size": vocabulary}
    path = write_random_checkpoint(folder / "model", model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, path)
    config = {
        "model": {"path": str(path), "dtype": options.dtype, "max_context_tokens": 2048},
        "groups": {"attention_ranks": 1, "expert_ranks": 1, "prefill_ranks": 0},
        "kv": {"pool_tokens": POOL_TOKENS},
        "http": {"request_timeout_s": LONGEST_S},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return ServerProcess("--config", str(folder / "config.yaml"), log=folder / "log")


class _Client:
    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self._server = server
        self._ours = processes(server)
        self._others = others(server, self._ours)
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        self._target = LoadTarget(url=server.url, model=model, fields={"ignore_eos": True})

    async def capacity(self, rows: Sequence[tuple[float, Lengths]]) -> float:
        """Jobs per second while there are enough of them; the second time, when all is warm."""
        found = 0.0
        for seed in range(2):
            picked = fit_trace(
                rows[seed * CAPACITY_REQUESTS :], 0.1, CAPACITY_REQUESTS / 0.1, DIVISOR
            )
            outcomes = [
                RequestResult(RequestArrival(0.0, Priority.LS, lengths)) for _, lengths in picked
            ]
            generator = HttpLoadGenerator(self._target, seed)
            await generator.run(outcomes, LONGEST_S)
            ends_s = sorted(each.end_s for each in outcomes if not each.error)
            most = len(ends_s) * 3 // 4
            found = most / ends_s[most - 1]
        print(f"capacity: {found:.2f} jobs/s", flush=True)
        return found

    async def play(
        self, rows: Sequence[tuple[float, Lengths]], rate: float, seconds: float
    ) -> dict[str, Any]:
        arrivals = from_trace(fit_trace(rows, seconds, rate, DIVISOR), LS_PART, seed=7)
        outcomes = [RequestResult(arrival) for arrival in arrivals]
        generator = HttpLoadGenerator(self._target, 1, retries_refused=True)
        looks: list[dict[str, float]] = []
        looking = asyncio.create_task(self._look(looks))
        await generator.run(outcomes, LONGEST_S)
        looking.cancel()
        return {
            "sent": len(outcomes),
            "ls": figures(outcomes, Priority.LS, seconds),
            "be": figures(outcomes, Priority.BE, seconds),
            "errors": Counter(each.error for each in outcomes if each.error),
            "told_s": [each.retry_s for each in outcomes if each.retry_s is not None],
            "again": [_became(each) for each in generator.again],
            "looks": looks,
        }

    async def _look(self, looks: list[dict[str, float]]) -> None:
        while True:
            ours = {role: p.memory_info().rss / 1e6 for role, p in self._ours.items()}
            ray = sum(p.memory_info().rss for p in self._others if psutil.pid_exists(p.pid)) / 1e6
            looks.append({**ours, "ray": ray})
            await asyncio.sleep(LOOK_EVERY_S)

    async def drained(self) -> dict[str, dict[str, int]]:
        """KV blocks of every rank by state, once nobody waits."""
        async with httpx.AsyncClient(base_url=self._server.url, timeout=20.0) as http:
            for _ in range(int(DRAINED_S)):
                told = read_metrics((await http.get("/metrics")).text, 0.0)
                if not told.waiting and not any(b.get("used") for b in told.blocks.values()):
                    break
                await asyncio.sleep(1.0)
            return told.blocks


def _became(outcome: RequestResult) -> dict[str, Any]:
    return {
        "priority": outcome.arrival.priority.label,
        "error": outcome.error,
        "again_s": outcome.retry_s,
    }


def _told(played: dict[str, Any]) -> str:
    ls, be = played["ls"], played["be"]
    return (
        f"LS p99 {ls['ttft_p99_ms']:.0f} ms, refused {dict(played['errors'])} of {played['sent']}"
        f" (LS {ls['failed']}, BE {be['failed']})"
    )


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"capacity": round(samples["capacity_jobs_per_s"], 2)}
    for name in ("calm", "overload"):
        played = samples[name]
        again = played["again"]
        found[name] = {
            "sent": played["sent"],
            "refused": sum(played["errors"].values()),
            "errors": dict(played["errors"]),
            "ls_ttft_p99_ms": round(played["ls"]["ttft_p99_ms"], 1),
            "ls_ttft_ms": round(played["ls"]["ttft_ms"], 1),
            "be_turnaround_s": round(played["be"]["turnaround_s"], 1),
            "jobs_per_s": round(played["ls"]["jobs_per_s"] + played["be"]["jobs_per_s"], 2),
            "came_again": len(again),
            "let_in_then": sum(not each["error"] for each in again),
        }
    looks = samples["overload"]["looks"]
    half = looks[len(looks) // 2 :]
    found["memory_growth"] = {
        role: round(
            statistics.median(look[role] for look in half[-5:])
            / statistics.median(look[role] for look in looks[len(looks) // 4 :][:5]),
            3,
        )
        for role in looks[0]
    }
    found["blocks_after"] = samples["blocks"]
    return found
