"""Round trips and bandwidth of the channel backends between two processes, beside memcpy.

One core for each process; memcpy on both cores at once.

    python -m benchmarks channels

Bandwidth is from private memory of one process to private memory of the other: with shared memory
two copies, one on either core.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from actors.channels.base import PeerJoined
from actors.channels.factory import make_endpoint
from actors.channels.handshake import new_token
from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.wires import MAX_BYTES, POLL_S, ChannelWire, MemcpyWire, Mover, Wire
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError

BACKENDS = ("shm", "tcp", "ipc", "nccl")
PING_BYTES = (256, 4 << 10, 64 << 10)
FLOW_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, MAX_BYTES)
PINGS = 200  # per round
FLOW_TOTAL_BYTES, MAX_FLOW_COUNT, MIN_FLOW_COUNT = 128 << 20, 2000, 4
SILENCE_S = 20.0  # a long copy may delay the heartbeat of a pinned process
ANSWER_TIMEOUT_S = 120.0


def _device(backend: str, rank: int) -> torch.device:
    if backend in ("shm", "tcp"):
        return torch.device("cpu")
    return torch.device("cuda", rank % max(1, torch.cuda.device_count()))


class Side:
    """The wires of one process by name. rank 0 is the main process."""

    def __init__(self, rank: int, token: bytes) -> None:
        self._rank = rank
        self._token = token
        self.wires: dict[str, Mover] = {"memcpy": MemcpyWire()}

    def listen(self, backend: str, control: Connection) -> None:
        """Make the wire of rank 0 and wait for the other. Raises ChannelError."""
        if backend == "nccl" and torch.cuda.device_count() < 2:
            raise ChannelError("nccl needs two GPUs")
        end = self._endpoint(backend)
        control.send((backend, end.listen()))
        while not any(isinstance(channel_event, PeerJoined) for channel_event in end.poll(POLL_S)):
            continue
        self.wires[backend] = ChannelWire(end, "bench-1", _device(backend, self._rank))

    def connect(self, backend: str, address: str) -> None:
        end = self._endpoint(backend)
        end.connect("bench-0", address)
        self.wires[backend] = ChannelWire(end, "bench-0", _device(backend, self._rank))

    def _endpoint(self, backend: str) -> Any:
        return make_endpoint(
            name=f"bench-{self._rank}",
            token=self._token,
            epoch=1,
            config=ChannelConfig(backend=backend, heartbeat_timeout_s=SILENCE_S),  # type: ignore[arg-type]
            clock=monotonic_s,
            device=_device(backend, self._rank),
        )

    def close(self) -> None:
        for wire in self.wires.values():
            wire.close()


def _other_side(core: int, token: bytes, control: Connection) -> None:
    """Run rank 1: connect to each endpoint of rank 0, then do its half of each call."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    side = Side(1, token)
    while True:
        call, *arguments = control.recv()
        if call == "end":
            side.close()
            return
        if call in BACKENDS:
            side.connect(call, *arguments)
        else:
            name, *numbers = arguments
            control.send("ready")
            getattr(side.wires[name], call)(*numbers)
        control.send("done")


class Pair:
    """Drives both sides. skipped: reason by backend that this machine lacks."""

    def __init__(self, cores: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        token = new_token()
        self._control, theirs = context.Pipe()
        arguments = (cores[1], token, theirs)
        self._process = context.Process(target=_other_side, args=arguments, daemon=True)
        self._process.start()
        os.sched_setaffinity(0, {cores[0]})
        torch.set_num_threads(1)
        self._side = Side(0, token)
        self.skipped: dict[str, str] = {}
        for backend in BACKENDS:
            try:
                self._side.listen(backend, self._control)
                self._expect("done")
            except ChannelError as error:
                self.skipped[backend] = error.message

    @property
    def movers(self) -> list[str]:
        return list(self._side.wires)

    @property
    def wires(self) -> dict[str, Wire]:
        return {n: w for n, w in self._side.wires.items() if not isinstance(w, MemcpyWire)}  # type: ignore[misc]

    def round_trips(self, name: str, num_bytes: int) -> list[float]:
        """Seconds of each of PINGS round trips."""
        self._control.send(("pong", name, num_bytes, PINGS))
        self._expect("ready")
        seconds = self.wires[name].ping(num_bytes, PINGS)
        self._expect("done")
        return seconds

    def bytes_per_s(self, name: str, num_bytes: int, *, both_ways: bool) -> float:
        """Return the rate of one direction."""
        count = max(MIN_FLOW_COUNT, min(MAX_FLOW_COUNT, FLOW_TOTAL_BYTES // num_bytes))
        back = count if both_ways else 0
        self._control.send(("flow", name, num_bytes, back, count))
        self._expect("ready")
        started_s = time.perf_counter()
        self._side.wires[name].flow(num_bytes, count, back)
        self._expect("done")
        return count * num_bytes / (time.perf_counter() - started_s)

    def close(self) -> None:
        self._control.send(("end",))
        self._process.join(ANSWER_TIMEOUT_S)
        self._side.close()

    def _expect(self, word: str) -> None:
        if not self._control.poll(ANSWER_TIMEOUT_S) or self._control.recv() != word:
            raise RuntimeError(f"the other process did not send {word!r}")


Samples = dict[str, dict[str, list[float]]]


def _rounds(pair: Pair, rounds: int) -> tuple[Samples, Samples]:
    """Return round trips in seconds, and bytes/s, by case and wire: one per round."""
    trips: Samples = {f"{size} B": {w: [] for w in pair.wires} for size in PING_BYTES}
    flows: Samples = {}
    for number in range(rounds + 1):  # the first round warms up
        for size in PING_BYTES:
            for wire in pair.wires:
                median_s = statistics.median(pair.round_trips(wire, size))
                if number:
                    trips[f"{size} B"][wire].append(median_s)
        for size in FLOW_BYTES:
            for way in ("one way", "both ways"):
                case = flows.setdefault(f"{size >> 10} KiB, {way}", {w: [] for w in pair.movers})
                for wire in case:
                    rate = pair.bytes_per_s(wire, size, both_ways=way == "both ways")
                    if number:
                        case[wire].append(rate)
    return trips, flows


def measure(options: argparse.Namespace) -> Measured:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"{len(cores)} core: two are needed, one for each process")
    pair = Pair(cores)
    try:
        trips, flows = _rounds(pair, options.rounds)
    finally:
        pair.close()
    samples = {"round_trip_s": trips, "bytes_per_s": flows}
    summary = {
        kind: {case: {w: statistics.median(v) for w, v in by.items()} for case, by in of.items()}
        for kind, of in samples.items()
    }
    return Measured(samples, summary, {"pings_per_round": PINGS, "skipped": pair.skipped})


def tables(summary: dict[str, Any]) -> list[Table]:
    return [
        _table("Round trip, us", summary["round_trip_s"], 1e6, 0),
        _table("GB/s of each direction", _shown(summary["bytes_per_s"]), 1e-9, 2),
    ]


def _shown(medians: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        case: row for case, row in medians.items() if case.startswith(("64 ", "1024 ", "65536"))
    }


def _table(title: str, medians: dict[str, dict[str, float]], scale: float, digits: int) -> Table:
    wires = list(next(iter(medians.values())))
    wires += [wire for row in medians.values() for wire in row if wire not in wires]
    rows = [
        [case, *(f"{scale * row[w]:.{digits}f}" if w in row else "" for w in wires)]
        for case, row in medians.items()
    ]
    return Table(title, ["median of rounds", *wires], rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)


CASE = documented_case(__doc__, "Channels", measure, tables, add_options)
