"""What a small LS packet waits for on a TCP link that BE packets keep full, with a lane per class
and with one lane for both.

    python -m benchmarks.lanes                      # a link of 1 Gbit/s between two namespaces

The two variants, and LS alone, take turns. "One lane" is the same code with every packet in BE's
lane, where packets go in the order of their `commit`: what a link without lanes does. Needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from actors.channels.base import (
    Endpoint,
    Header,
    Packet,
    PacketKind,
    PeerJoined,
    PeerLost,
    TensorSpec,
)
from actors.channels.factory import make_endpoint
from benchmarks.harness import record
from benchmarks.two_nodes import ENVIRONMENT, HEAD, two_namespaces
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.requests import Priority

TOKEN = b"a benchmark's token, of 32 bytes"
VARIANTS = ("LS alone", "one lane", "a lane per class")
BE_UNDER_WAY = 4  # packets that BE keeps committed: of as many micro-batches
POLL_S = 0.002
LS_BATCH, BE_BATCH = 1, 2


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    if options.side == "receiver":
        _receive(_endpoint("receiver"))
        return
    if options.side == "sender":
        samples = _send(_endpoint("sender"), options)
        print(json.dumps(samples))
        return
    with two_namespaces() as nodes:
        nodes.limit_rate(options.megabits)
        command = [sys.executable, "-m", "benchmarks.lanes", *sys.argv[1:], "--side"]
        receiver = subprocess.Popen(
            [*nodes.inside(0), *command, "receiver"],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
        )
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        done = subprocess.run(
            [*nodes.inside(1), *command, "sender", "--address", address],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            check=True,
        )
    samples = json.loads(done.stdout.splitlines()[-1])
    summary = {name: _summary(some) for name, some in samples.items()}
    _show(summary, options)
    record("lanes", options, samples, summary, {})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabits", type=float, default=1000, help="the link's rate, per second")
    parser.add_argument("--ls-bytes", type=int, default=16 << 10, help="of an LS packet")
    parser.add_argument("--be-bytes", type=int, default=2 << 20, help="of a BE packet")
    parser.add_argument("--every-ms", type=float, default=20, help="between LS packets")
    parser.add_argument("--seconds", type=float, default=3, help="of a variant, in each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    parser.add_argument("--side", choices=("sender", "receiver"), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _endpoint(name: str) -> Endpoint:
    return make_endpoint(
        name=name,
        token=TOKEN,
        epoch=1,
        config=ChannelConfig(backend="tcp", heartbeat_timeout_s=20.0),
        clock=monotonic_s,
        device=torch.device("cpu"),
    )


def _receive(end: Endpoint) -> None:
    """Answers every packet with the microseconds that it took, until the sender is gone."""
    print(end.listen(HEAD), flush=True)
    while True:
        for channel_event in end.poll(1.0):
            if isinstance(channel_event, PeerLost):
                end.close()
                return
            if isinstance(channel_event, PeerJoined):
                continue
            taken_us = 1e6 * (channel_event.arrived_s - channel_event.sent_s)
            answer = end.reserve("sender", [TensorSpec("int64", (1,))])
            answer.tensors[0][0] = round(taken_us)
            channel_event.release()
            end.commit(answer, channel_event.header)


class _Sender:
    """One variant: BE's packets kept under way, and an LS packet every so often."""

    def __init__(self, end: Endpoint, variant: str, options: argparse.Namespace) -> None:
        self._end = end
        self._be = variant != "LS alone"
        self._ls_lane = Priority.BE if variant == "one lane" else Priority.LS
        self._options = options
        self._under_way = {LS_BATCH: 0, BE_BATCH: 0}
        self.ls_ms: list[float] = []
        self.be_bytes = 0

    def run(self) -> float:
        """Seconds that it ran."""
        started_s = next_s = monotonic_s()
        while (now_s := monotonic_s()) < started_s + self._options.seconds:
            if now_s >= next_s:
                next_s += self._options.every_ms / 1e3
                self._commit(LS_BATCH, self._ls_lane, self._options.ls_bytes)
            while self._be and self._under_way[BE_BATCH] < BE_UNDER_WAY:
                self._commit(BE_BATCH, Priority.BE, self._options.be_bytes)
            self._take(min(POLL_S, max(0.0, next_s - monotonic_s())))
        ran_s, be_bytes = monotonic_s() - started_s, self.be_bytes
        while any(self._under_way.values()):
            self._take(POLL_S)
        self.be_bytes = be_bytes
        return ran_s

    def _commit(self, batch: int, lane: Priority, num_bytes: int) -> None:
        reservation = self._end.reserve("receiver", [TensorSpec("uint8", (num_bytes,))])
        self._under_way[batch] += 1
        self._end.commit(
            reservation, Header(PacketKind.A2E, 1, batch, 0, 0, 0, lane, monotonic_s())
        )

    def _take(self, timeout_s: float) -> None:
        for packet in self._end.poll(timeout_s):
            if isinstance(packet, PeerLost):
                raise packet.error
            assert isinstance(packet, Packet)
            batch = packet.header.batch
            self._under_way[batch] -= 1
            if batch == LS_BATCH:
                self.ls_ms.append(int(packet.tensors[0][0]) / 1e3)
            else:
                self.be_bytes += self._options.be_bytes
            packet.release()


def _send(end: Endpoint, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    end.connect("receiver", options.address)
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in VARIANTS}
    for number in range(options.rounds + 1):
        for variant in VARIANTS:
            sender = _Sender(end, variant, options)
            ran_s = sender.run()
            if number == 0:
                continue  # connections find the link's rate
            samples[variant]["ls_ms"] += sender.ls_ms
            samples[variant]["be_megabits_per_s"].append(8e-6 * sender.be_bytes / ran_s)
    end.close()
    return samples


def _summary(samples: dict[str, list[float]]) -> dict[str, float]:
    ls_ms = samples["ls_ms"]
    return {
        "ls_p50_ms": statistics.median(ls_ms),
        "ls_p99_ms": statistics.quantiles(ls_ms, n=100)[98],
        "ls_max_ms": max(ls_ms),
        "be_megabits_per_s": statistics.median(samples["be_megabits_per_s"]),
    }


def _show(summary: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    title = f"LS packets of {options.ls_bytes >> 10} KiB beside BE packets of "
    title += f"{options.be_bytes >> 10} KiB, {options.megabits:g} Mbit/s"
    table = Table("", "LS p50 ms", "p99 ms", "max ms", "BE Mbit/s", title=title)
    for name, figures in summary.items():
        table.add_row(name, *(f"{figures[key]:.2f}" for key in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
