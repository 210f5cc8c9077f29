"""What it costs to be seen: the same load on a server whose metrics, spans and logs are on, and on
one that has none of them.

    python -m benchmarks.observed_cost [--pairs 24] [--idle 20] [--add]

Both run all the while, each an ingress, an attention and an expert rank (observed_side.py), and are
asked in turn, ABBA: clients in a closed loop, each request streamed over HTTP, 8 at a time.
Throughput is generated tokens a second; what counts is the ratio of each pair. Beside it the
processor time of a side's processes: others on the machine change that less. `--add` goes on from
what is in the file: pairs may be measured in pieces. The texts of both sides are compared.

Pairs differ by more than what is looked for. So the parts are measured as well, which are steadier:
processor time of both sides while nobody asks them for `--idle` seconds (scrapes), and what a span
costs a rank's loop, kept and told to its metric or not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from actors.telemetry.rank_metrics import RankMetrics
from actors.telemetry.timeline import Timeline
from benchmarks.harness import RESULTS, record
from benchmarks.http_line import HttpLine
from cluster.http.server import free_port
from contracts.config import BUNDLED
from contracts.import_path import module_command
from contracts.ranks import Group, RankSpec
from contracts.traces import Stage, TaskSpan

Samples = dict[str, dict[str, list[float]]]  # by side, then by what was measured

SIDES = ("on", "off")
CLIENTS = 8
READY_S = 90.0
STOP_S = 20.0
WARM_UPS = 2
SPANS, SPAN_ROUNDS = 20_000, 40
PROMPT = "Message: WINNER! Claim your free prize now, call before midnight and quote {}.\nSpam:"


class Side(NamedTuple):
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Of it and its ranks, so far."""
        times = [one.cpu_times() for one in (self.process, *self.process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


class Sample(NamedTuple):
    seconds: float
    cpu_s: float


@contextlib.contextmanager
def side(kind: str, folder: Path) -> Iterator[Side]:
    """A server that answers."""
    port = free_port()
    command = [*module_command("benchmarks.observed_side"), str(port), kind, str(folder / kind)]
    with (folder / f"{kind}.err").open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
    try:
        end_s = time.monotonic() + READY_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit((folder / f"{kind}.err").read_text()[-2000:])
            time.sleep(0.1)
        yield Side(port, psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


async def load(port: int, requests: int, tokens: int) -> tuple[float, list[str]]:
    """Seconds that so many requests of each client took, and all texts, in order."""
    lines = [await HttpLine.open("127.0.0.1", port) for _ in range(CLIENTS)]

    async def client(number: int) -> list[str]:
        texts = []
        for each in range(requests):
            body = {
                "model": BUNDLED,
                "prompt": PROMPT.format(number * requests + each),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            chunks = lines[number].stream("/v1/completions", json.dumps(body).encode())
            texts.append("".join([_text(data) async for _, data in chunks]))
        return texts

    started_s = time.perf_counter()
    texts = await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    took_s = time.perf_counter() - started_s
    for line in lines:
        line.close()
    return took_s, [text for some in texts for text in some]


def _text(event: bytes) -> str:
    data = event.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        return ""
    return "".join(choice["text"] for choice in json.loads(data)["choices"])


async def measure(sides: dict[str, Side], options: argparse.Namespace) -> Samples:
    """Pair by pair; a pair is each side twice: on, off, off, on, or the other way round."""
    samples: Samples = {kind: {"seconds": [], "cpu_s": []} for kind in SIDES}
    for pair in range(-WARM_UPS, options.pairs):
        first, other = SIDES if pair % 2 else SIDES[::-1]
        found: dict[str, list[Sample]] = {kind: [] for kind in SIDES}
        texts: dict[str, list[str]] = {}
        for kind in (first, other, other, first):
            cpu_s = sides[kind].cpu_s()
            took_s, texts[kind] = await load(sides[kind].port, options.requests, options.tokens)
            found[kind].append(Sample(took_s, sides[kind].cpu_s() - cpu_s))
        if texts["on"] != texts["off"]:
            raise SystemExit("the two sides have not answered alike")
        if pair >= 0:
            for kind in SIDES:
                samples[kind]["seconds"].append(sum(one.seconds for one in found[kind]))
                samples[kind]["cpu_s"].append(sum(one.cpu_s for one in found[kind]))
    return samples


def idle_fractions(sides: dict[str, Side], seconds: float) -> dict[str, float]:
    """Of one core, by side, while nobody asks."""
    before_s = {kind: each.cpu_s() for kind, each in sides.items()}
    time.sleep(seconds)
    return {kind: (each.cpu_s() - before_s[kind]) / seconds for kind, each in sides.items()}


def span_us() -> dict[str, float]:
    """Of one core, by side: adding a span to a rank's timeline, the best of many rounds."""
    spec = RankSpec(
        group=Group.ATTENTION,
        rank=0,
        attention_ranks=1,
        expert_ranks=1,
        model_folder="",
        token=b"",
        epoch=1,
        device="cpu",
        backend="shm",
    )
    span = TaskSpan(spec.name, Stage.ATTENTION, 1.0, 1.0003, 3, 2, 1, 0, 40)
    telling = RankMetrics(spec, time.monotonic)
    timelines = {"on": Timeline(20_000, telling.span), "off": Timeline(0, lambda _: None)}
    found = {}
    for kind, timeline in timelines.items():
        rounds = []
        for _ in range(SPAN_ROUNDS):
            begun_s = time.perf_counter()
            for _ in range(SPANS):
                timeline.add(span)
            rounds.append((time.perf_counter() - begun_s) / SPANS)
        found[kind] = 1e6 * min(rounds)
    return found


def summary_of(samples: Samples, tokens: int) -> dict[str, Any]:
    """throughput, processor: on over off, of each pair; of the second, what a token takes off over
    what it takes on, so that both are better the larger. tokens: of a side in a pair."""
    medians = {kind: statistics.median(samples[kind]["seconds"]) for kind in SIDES}
    return {
        "pairs": len(samples["on"]["seconds"]),
        "tokens_per_s": {kind: tokens / medians[kind] for kind in SIDES},
        "throughput": _ratios(samples, "seconds"),
        "processor": _ratios(samples, "cpu_s"),
    }


def _ratios(samples: Samples, what: str) -> dict[str, float]:
    on, off = (samples[kind][what] for kind in SIDES)
    ratios = [without / with_ for with_, without in zip(on, off, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "median": middle,
        "p25": low,
        "p75": high,
        "mean": statistics.fmean(ratios),
        "of_sums": sum(off) / sum(on),
        "least": min(ratios),
        "most": max(ratios),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--requests", type=int, default=1, help="of each client in a sample")
    parser.add_argument("--tokens", type=int, default=32, help="generated for each request")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds; 0: leave the parts out")
    parser.add_argument("--add", action="store_true", help="go on from what is in the file")
    parser.add_argument("--output", type=Path, default=RESULTS / "observed_cost.json")
    options = parser.parse_args(arguments)
    before: Samples = {kind: {"seconds": [], "cpu_s": []} for kind in SIDES}
    if options.add and options.output.exists():
        before = json.loads(options.output.read_text(encoding="utf-8"))["samples"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sides = {kind: stack.enter_context(side(kind, Path(folder))) for kind in SIDES}
        found = asyncio.run(measure(sides, options))
        idle = idle_fractions(sides, options.idle) if options.idle else {}
    samples = {
        kind: {what: before[kind][what] + some for what, some in found[kind].items()}
        for kind in SIDES
    }
    summary = summary_of(samples, 2 * CLIENTS * options.requests * options.tokens)
    if options.idle:
        summary |= {"idle_cpu_fraction": idle, "span_us": span_us()}
    print(json.dumps(summary, indent=1))
    record("observed_cost", options, samples, summary, {"path": BUNDLED})


if __name__ == "__main__":
    main(sys.argv[1:])
