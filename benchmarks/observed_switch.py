"""What it costs to be seen, by processor time: one server, whose metrics, spans, scrapes and access
log are switched on and off many times a second while it serves.

    python -m benchmarks.observed_switch [--pairs 24] [--slice 0.12] [--add]

Two servers of the same code differ by several percent from start to start, whatever is measured of
them (benchmarks/observed_cost.py); one does not differ from itself, and what others do on the
machine lasts longer than a slice. Clients ask in a closed loop all the while. A pair is slices with
the switch on and off in turn (ABBA), eight of each; after each comes one of a control, in which it
stays off under the same labels: what that shows is scatter. Counted are tokens that clients get,
and nanoseconds of processor time of all threads of the ingress and its ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import RESULTS, record
from benchmarks.http_line import HttpLine
from benchmarks.observed_cost import CLIENTS, PROMPT, Side, side
from benchmarks.switched_rank import SWITCH, Switch
from contracts.config import BUNDLED

Samples = dict[str, dict[str, list[float]]]  # by comparison and label, then by what was measured

WARM_S = 5.0
COMPARISONS = ("observed", "control")
LABELS = ("on", "off")
ORDERS = (("on", "off", "off", "on") * 4, ("off", "on", "on", "off") * 4)
CONFIDENT = 1.96  # standard errors


class Counted(NamedTuple):
    """So far."""

    seconds: float
    cpu_s: float
    tokens: float


class Load:
    """Clients that stream, one request after the other. tokens: that they have got."""

    def __init__(self, port: int, tokens: int) -> None:
        self.tokens = 0
        self._port, self._most, self._numbers = port, tokens, itertools.count()

    async def client(self) -> None:
        line = await HttpLine.open("127.0.0.1", self._port)
        while True:
            body = {
                "model": BUNDLED,
                "prompt": PROMPT.format(next(self._numbers)),
                "max_tokens": self._most,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            async for _ in line.stream("/v1/completions", json.dumps(body).encode()):
                self.tokens += 1


def cpu_s(server: Side) -> float:
    """Of all threads of it and its ranks, so far."""
    total_ns = 0
    for process in (server.process, *server.process.children(recursive=True)):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


async def measure(server: Side, switch: Switch, options: argparse.Namespace) -> Samples:
    load, loop = Load(server.port, options.tokens), asyncio.get_running_loop()

    def counted() -> Counted:
        return Counted(loop.time(), cpu_s(server), load.tokens)

    clients = [asyncio.ensure_future(load.client()) for _ in range(CLIENTS)]
    samples: Samples = {
        f"{comparison} {label}": {what: [] for what in Counted._fields}
        for comparison in COMPARISONS
        for label in LABELS
    }
    await asyncio.sleep(WARM_S)
    for pair, comparison in itertools.product(range(options.pairs), COMPARISONS):
        sums = {label: [0.0, 0.0, 0.0] for label in LABELS}
        for label in ORDERS[pair % 2]:
            switch.turn(on=label == "on" and comparison == "observed")
            before = counted()
            await asyncio.sleep(options.slice)
            after = counted()
            sums[label] = [s + a - b for s, a, b in zip(sums[label], after, before, strict=True)]
        for label, found in sums.items():
            for what, amount in zip(Counted._fields, found, strict=True):
                samples[f"{comparison} {label}"][what].append(amount)
    switch.turn(on=False)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return samples


def compared(samples: Samples, comparison: str, what: str) -> dict[str, float]:
    """What a token takes off over what it takes on, pair by pair: from 1 on, being seen costs
    nothing. The mean is of logarithms; bounds hold it in 19 of 20 such runs."""

    def per_token(label: str) -> list[float]:
        found = samples[f"{comparison} {label}"]
        return [
            amount / tokens for amount, tokens in zip(found[what], found["tokens"], strict=True)
        ]

    on, off = per_token("on"), per_token("off")
    logs = [math.log(without / with_) for with_, without in zip(on, off, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "mean": math.exp(mean),
        "low": math.exp(mean - CONFIDENT * error),
        "high": math.exp(mean + CONFIDENT * error),
        "median": math.exp(statistics.median(logs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--slice", type=float, default=0.12, help="seconds")
    parser.add_argument("--tokens", type=int, default=32, help="generated for each request")
    parser.add_argument("--add", action="store_true", help="go on from what is in the file")
    parser.add_argument("--output", type=Path, default=RESULTS / "observed_switch.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        flag = Path(name) / "switch"
        flag.write_bytes(b"\0")
        os.environ[SWITCH] = str(flag)
        with side("switched", Path(name)) as server:
            found = asyncio.run(measure(server, Switch(flag), options))
    if options.add and options.output.exists():
        before = json.loads(options.output.read_text(encoding="utf-8"))["samples"]
        found = {
            label: {what: before[label][what] + some for what, some in of_label.items()}
            for label, of_label in found.items()
        }
    summary: dict[str, Any] = {
        comparison: {
            "processor": compared(found, comparison, "cpu_s"),
            "throughput": compared(found, comparison, "seconds"),
        }
        for comparison in COMPARISONS
    }
    off = found["observed off"]
    summary["pairs"] = len(off["tokens"])
    summary["cpu_ms_per_token"] = 1e3 * sum(off["cpu_s"]) / sum(off["tokens"])
    print(json.dumps(summary, indent=1))
    record("observed_switch", options, found, summary, {"path": BUNDLED})


if __name__ == "__main__":
    main()
