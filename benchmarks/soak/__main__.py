"""Mixed traffic of good, bad, huge, slow and vanishing clients against a server under limits.

    python -m benchmarks.soak --minutes 60

The server is one of each rank with the bundled model, both pipelines, three API keys. Traffic is an
open loop of a few requests a second. It ends by itself; exit status 1: a check has failed, and the
reason is told. How memory is judged: `verdict.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from benchmarks.fuzz.requests import Maker
from benchmarks.harness import RESULTS, Result, write_result
from benchmarks.soak import report, served, verdict
from benchmarks.soak.clients import Clients
from benchmarks.soak.traffic import Tally, Traffic
from benchmarks.soak.watch import Told, Watch
from benchmarks.support.server import ServerProcess
from contracts.config import BUNDLED

SAMPLE_EVERY_S = 5.0
SCRAPE_EVERY = 3  # samples
WARM_S = 20.0
DRAIN_S = 170.0  # longer than the server's limit for a request
MOST_FAULTS = 10  # while it runs
QUIET_S = 100.0  # until descriptors, threads and blocks are back: keep-alive ends after 75 s
PICTURE = Path("docs/images/soak.png")


def main() -> int:
    options = _options()
    with served.limited_server(options.log) as server:
        started = psutil.Process(server.pid).children(recursive=True)
        soak = Soak(server, options)
        asyncio.run(soak.run(60.0 * options.minutes))
    _, left = psutil.wait_procs(started, timeout=15.0)
    soak.faults += [f"process {process.pid} is left" for process in left if process.is_running()]
    return soak.show()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2.0, help="honest requests per second")
    parser.add_argument("--kinds", help="of clients, with commas between; default: all")
    parser.add_argument(
        "--log", type=Path, default=Path("soak.log"), help="the server's own output"
    )
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/soak.json")
    parser.add_argument("--table", type=Path, help="default: benchmarks/results/soak.md")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    return parser.parse_args()


class Soak:
    """One run against a server that answers. faults: why it has failed."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self.faults: list[str] = []
        self._server = server
        self._options = options
        self._tally = Tally()
        document = httpx.get(f"{server.url}/openapi.json").raise_for_status().content
        maker = Maker(options.seed, msgspec.json.decode(document), BUNDLED, None)
        self._clients = Clients(("127.0.0.1", server.port), maker, self._tally)

    async def run(self, seconds: float) -> None:
        left_out = await self._warm_up()
        for what in left_out:
            print(f"left out, not known here: {what}")
        ours = served.processes(self._server)
        self._pids = {role: process.pid for role, process in ours.items()}
        self._watch = watch = Watch(ours, served.others(self._server, ours), self._server.url)
        watch.look()
        self._first = {role: samples[-1] for role, samples in watch.samples.items()}
        start = await asyncio.to_thread(watch.scrape)
        traffic = self._traffic(self._tally, self._options.seed)
        self._started_s = time.monotonic()
        watching = asyncio.create_task(self._look_again_and_again(traffic))
        running = asyncio.create_task(traffic.run(seconds))
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        self._total_s = watch.now_s
        running.cancel()
        watching.cancel()
        await traffic.drain(DRAIN_S)
        end = await self._quiet(start)
        await self._judge(start, end)
        self._told = start, end
        watch.close()

    async def _warm_up(self) -> list[str]:
        """Reference answers, alone; then some traffic, so that pools and lazy parts are there."""
        left_out = await self._clients.learn()
        self._look_for_sockets()
        traffic = self._traffic(Tally(), self._options.seed + 1, without=("idle",))
        await traffic.run(WARM_S)
        await traffic.drain(DRAIN_S)
        self._tally.honest.clear()  # those of the warm-up
        return left_out

    def _traffic(self, tally: Tally, seed: int, without: tuple[str, ...] = ()) -> Traffic:
        kinds = self._clients.kinds(self._options.rate)
        kinds = [kind for kind in kinds if kind.name not in without]
        if self._options.kinds:
            kinds = [kind for kind in kinds if kind.name in self._options.kinds.split(",")]
        return Traffic(kinds, tally, seed)

    def _look_for_sockets(self) -> None:
        ours = served.processes(self._server)
        self._clients.ports = served.listening_ports(ours, self._server.port)
        self._clients.unix = served.abstract_sockets(ours)
        print(
            f"processes: {', '.join(ours)}; strangers come to {len(self._clients.ports)} ports and"
            f" {len(self._clients.unix)} Unix sockets"
        )

    async def _look_again_and_again(self, traffic: Traffic) -> None:
        """Ends if the server does no longer answer: nothing can be learned from it any more."""
        number = 0
        while len(self.faults) < MOST_FAULTS:
            await asyncio.sleep(SAMPLE_EVERY_S)
            number += 1
            await asyncio.to_thread(self._look, scrape=number % SCRAPE_EVERY == 0)
            if number % 12 == 0:
                print(self._line(traffic), flush=True)

    def _look(self, *, scrape: bool) -> None:
        self._watch.look()
        total = self._watch.total_bytes()
        if total > served.MEMORY_BYTES:
            self.faults.append(f"{total >> 20} MiB are resident, over {served.MEMORY_BYTES >> 20}")
        try:
            if scrape:
                self._watch.scrape()
                if (status := self._watch.health()) != 200:
                    self.faults.append(f"/health was {status} after {self._watch.now_s:.0f} s")
        except httpx.HTTPError as error:
            self.faults.append(f"no metrics or health after {self._watch.now_s:.0f} s: {error!r}")

    def _line(self, traffic: Traffic) -> str:
        came = sum(sum(outcomes.values()) for outcomes in self._tally.outcomes.values())
        return (
            f"minute {self._watch.now_s / 60:.0f}: {came:,} clients came, {traffic.under_way} are"
            f" there; {len(self._tally.honest):,} honest answers;"
            f" {self._watch.total_bytes() >> 20} MiB; {len(self._tally.fatal)} failed"
        )

    async def _quiet(self, start: Told) -> Told:
        """What is told once nobody is there: when all is as at the start, or after QUIET_S."""
        end_s = time.monotonic() + QUIET_S
        while True:
            await asyncio.sleep(2.0)
            await asyncio.to_thread(self._watch.look)
            try:
                told = await asyncio.to_thread(self._watch.scrape)
            except httpx.HTTPError as error:
                self.faults.append(f"no metrics after the end: {error!r}")
                return start
            problems = self._leftovers() + verdict.block_faults(start, told)
            if not problems or time.monotonic() > end_s:
                return told

    def _leftovers(self) -> list[str]:
        last = {role: samples[-1] for role, samples in self._watch.samples.items()}
        return verdict.leftover_faults(self._first, last)

    async def _judge(self, start: Told, end: Told) -> None:
        watch = self._watch
        self.faults += self._tally.fatal[:20]
        self.faults += [f"{role} is gone" for role in watch.lost]
        self.faults += self._leftovers() + verdict.block_faults(start, end)
        self.faults += verdict.memory_faults(watch.samples, self._total_s)
        again = Clients(("127.0.0.1", self._server.port), self._clients.maker, Tally())
        with contextlib.suppress(OSError, EOFError, TimeoutError):  # told by what is missing
            await again.learn()
        if len(again.expected) != len(self._clients.expected):
            self.faults.append("at the end not every known request is answered")
        for (path, body, expected), (_, _, got) in zip(
            self._clients.expected, again.expected, strict=False
        ):
            if got != expected:
                self.faults.append(f"{path} {body}: {got} at the end, {expected} at the start")
        now = {role: process.pid for role, process in served.processes(self._server).items()}
        for role, pid in self._pids.items():
            if now.get(role) != pid:
                self.faults.append(f"{role} was process {pid}, is {now.get(role)}")

    def show(self) -> int:
        text = report.table(self._watch, self._first, self._tally, self._total_s, self._told)
        print(text)
        (self._options.table or RESULTS / "soak.md").write_text(text, encoding="utf-8")
        report.picture(self._watch, self._tally, self._started_s, self._options.picture)
        print(f"written: {write_result(self._result(), self._options.output)}")
        for fault in self.faults:
            print(f"FAILED: {fault}")
        return 1 if self.faults else 0

    def _result(self) -> Result:
        grown = {
            role: round(verdict.growth_fraction(samples, self._total_s), 4)
            for role, samples in self._watch.samples.items()
        }
        settings: dict[str, Any] = {
            "minutes": self._options.minutes,
            "honest_per_s": self._options.rate,
            "seed": self._options.seed,
            "descriptors": served.DESCRIPTORS,
            "data_bytes": served.DATA_BYTES,
            "memory_bytes": served.MEMORY_BYTES,
            "config": served.CONFIG,
        }
        return Result(
            name="soak",
            kind="measured",
            settings=settings,
            samples=report.samples_of(self._watch, self._tally, self._started_s),
            summary={
                "failed": self.faults,
                "memory_growth_fraction": grown,
                "clients": self._tally.outcomes,
            },
        )


if __name__ == "__main__":
    sys.exit(main())
