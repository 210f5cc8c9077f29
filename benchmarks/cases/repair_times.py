"""How long a fault of an attention/expert group is noticed, and streamed tokens stand still.

    python -m benchmarks repair_times                         20 kills of each kind
    python -m benchmarks repair_times --kills 3 --kind stands_in

Ranks are processes of this machine, without Ray; who supervises is this process, which looks four
times a second, as `cluster/fleet/supervisor.py` does, and puts others in the places of lost ranks.
A stream on each attention rank goes on all the time; every one is held against the tokens of an
undisturbed run.

    stands_in   an expert rank of two gets SIGKILL
    hangs       the same, SIGSTOP: nobody closes its connections
    only        the only expert rank gets SIGKILL; the time that its replacement takes to be loaded
                and joined is told beside
    attention   an attention rank of two gets SIGKILL: until another in its place gives a token
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.channels.handshake import Identity, initiate
from benchmarks.harness import Case, Measured, Table, table_of
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from contracts.errors import LaunchError
from contracts.loading import config_from
from contracts.messages import Events, Finished, Submit, Tokens
from contracts.requests import Sampling
from tests.support.local_group import LocalGroup

KINDS = {
    "stands_in": (2, 2, "expert-1", signal.SIGKILL),
    "hangs": (2, 2, "expert-1", signal.SIGSTOP),
    "only": (1, 1, "expert-0", signal.SIGKILL),
    "attention": (2, 2, "attention-0", signal.SIGKILL),
}
LOOK_S = 0.25  # how often the supervisor looks
END_S = 60.0
PROMPT = list(range(5, 69))
TOKENS = 96
MODEL = {**MEDIUM, "num_hidden_layers": 6, "vocab_size": 1024}
# Made here: where two threads make the first one of a type at once, msgspec crashes.
_decode = msgspec.msgpack.Decoder(Events).decode


class Stream(threading.Thread):
    """Generations one after the other on one rank, until it is lost or `ended` is set. at_s: when
    each token came. wrong: generations that were not as the first one."""

    def __init__(self, name: str, address: str, token: bytes) -> None:
        super().__init__(name=f"stream-{name}", daemon=True)
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=END_S)
        me = Identity(name="bench", token=token, epoch=None)
        initiate(self._socket, me, purpose="client", to=name, deadline_s=END_S)
        self._socket.settimeout(END_S)
        self.at_s: list[float] = []
        self.first: list[int] = []
        self.wrong = self.whole = 0
        self.ended = threading.Event()
        self.lost_s = 0.0

    def run(self) -> None:
        with contextlib.suppress(ConnectionError, EOFError, OSError), self._socket:
            while not self.ended.is_set():
                self._generate()
        self.lost_s = time.monotonic()

    def _generate(self) -> None:
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        body = msgspec.msgpack.encode(Submit(request_id=1, token_ids=PROMPT, sampling=sampling))
        self._socket.sendall(len(body).to_bytes(4, "little") + body)
        ids: list[int] = []
        while True:
            size = int.from_bytes(self._exactly(4), "little")
            for event in _decode(self._exactly(size)).items:
                if isinstance(event, Tokens):
                    ids += event.token_ids
                    self.at_s.append(time.monotonic())
                elif isinstance(event, Finished):
                    self.first = self.first or ids
                    self.wrong += ids != self.first
                    self.whole += 1
                    return

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def first_after_s(self, fault_s: float) -> float:
        """When the longest pause ended of those that ended after the fault, from the fault on."""
        times = [at_s for at_s in self.at_s if at_s > fault_s - 1.0]
        pauses = [
            (later - max(before, fault_s), later)
            for before, later in itertools.pairwise(times)
            if later > fault_s
        ]
        return max(pauses)[1] - fault_s if pauses else END_S


def wait_until(holds: Any, period_s: float = 0.005) -> float:
    """When it did."""
    end_s = time.monotonic() + END_S
    while not holds():
        if time.monotonic() > end_s:
            raise LaunchError(f"nothing happened within {END_S:g} s")
        time.sleep(period_s)
    return time.monotonic()


def status_of(group: LocalGroup, name: str) -> Any:
    return group.processes[name].call("status").result(END_S)


def stream(group: LocalGroup, name: str) -> Stream:
    made = Stream(name, group.client_addresses[name], group.token)
    made.start()
    wait_until(lambda: len(made.at_s) > 8)
    return made


def one_loss(group: LocalGroup, kind: str) -> dict[str, float]:
    """Seconds from the fault on: an attention rank says so; a token comes. replaced_s: how long
    another took to be started, loaded and joined."""
    _, _, victim, fault = KINDS[kind]
    live = stream(group, "attention-1" if kind == "stands_in" or kind == "hangs" else "attention-0")
    fault_s = time.monotonic()
    group.processes[victim].send_signal(fault)
    told: dict[str, float] = {}
    if kind == "attention":
        live.join(END_S)
        told["noticed_s"] = live.lost_s - fault_s
        elsewhere = stream(group, "attention-1")
        told["first_token_s"] = elsewhere.at_s[0] - fault_s
        elsewhere.ended.set()
        elsewhere.join(END_S)
    else:
        noticed_s = wait_until(lambda: "lost" in status_of(group, live.name[7:]).sections)
        told["noticed_s"] = noticed_s - fault_s
    if kind in ("stands_in", "hangs"):
        wait_until(lambda: live.at_s[-1] > noticed_s + 0.5)
        told["first_token_s"] = live.first_after_s(fault_s)
    time.sleep(LOOK_S)  # at the latest then a supervisor sees it
    start_s = time.monotonic()
    group.replace(victim)
    told["replaced_s"] = time.monotonic() - start_s
    if kind == "attention":
        again = stream(group, victim)
        again.ended.set()
        again.join(END_S)
        told["in_its_place_s"] = again.at_s[0] - fault_s
        return told
    wait_until(lambda: "lost" not in status_of(group, live.name[7:]).sections)
    back_s = time.monotonic()
    wait_until(lambda: live.at_s[-1] > back_s + 0.2)
    if kind == "only":
        told["first_token_s"] = live.first_after_s(fault_s)
        told["beyond_replacing_s"] = told["first_token_s"] - told["replaced_s"]
    live.ended.set()
    live.join(END_S)
    if live.wrong or not live.whole:
        raise LaunchError(f"{kind}: {live.wrong} of {live.whole} generations were not as the first")
    return told


def losses_of(folder: Path, kind: str, kills: int) -> list[dict[str, float]]:
    attention, experts, _, _ = KINDS[kind]
    groups = {"attention_ranks": attention, "expert_ranks": experts}
    tree = {"model": {"dtype": "float32"}, "groups": groups, "kv": {"pool_tokens": 16 * 512}}
    found = []
    with LocalGroup(str(folder), config_from(tree, source="benchmark")) as group:
        for _ in range(kills):
            found.append(one_loss(group, kind))
            print(kind, {name: round(value, 3) for name, value in found[-1].items()}, flush=True)
    return found


def summary_of(losses: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in losses[0]:
        values = [loss[name] for loss in losses]
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
        found[name] = {"p50": p50, "p90": p90, "p99": p99, "max": max(values)}
    return found


def measure(options: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_checkpoint(Path(folder), MODEL)
        samples = {kind: losses_of(model, kind, options.kills) for kind in options.kind}
    summary = {kind: summary_of(losses) for kind, losses in samples.items()}
    return Measured(samples, summary, {"tokens": TOKENS, "model": MODEL, "poll_s": LOOK_S})


def tables(summary: dict[str, Any]) -> list[Table]:
    return [table_of(by_name, kind, "seconds") for kind, by_name in summary.items()]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))


CASES = [
    Case(
        "repair_times",
        "Recovery times",
        "How soon a lost rank is noticed, and for how long streamed tokens stop.",
        measure,
        tables,
        add_options,
    )
]
