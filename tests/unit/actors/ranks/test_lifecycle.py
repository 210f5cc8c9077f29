"""Connection of an attention rank to the expert ranks."""

import ctypes
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from actors.batching.observer import LoopControl
from actors.channels.endpoint import Endpoint
from actors.ranks import expert_resize, rank
from actors.ranks.expert_resize import RunningRank, place_experts
from actors.ranks.rank import IN_TRANSIT_S, SETTLING_S, PeerConnector, RankDrain
from contracts.config import PlacementConfig, TandemConfig
from contracts.errors import ChannelError, HandshakeError, LaunchError
from contracts.placement import PlacementState, PlacementUpdate
from contracts.ranks import RankReady
from planner.placement.slots import contiguous
from tests.support.group_harness import until

TIMEOUT_S = 20.0


class Links:
    """A fake `Endpoint` that rejects a second dial."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.linked: list[str] = []
        self.mended = threading.Event()

    def peers(self) -> list[str]:
        return self.linked

    def join(self, peer: str, address: str) -> None:
        if address == "silent":
            self.mended.wait(TIMEOUT_S)
        if address in self.dialled:
            raise HandshakeError(f"attention-0 is linked to {peer} already")
        self.dialled.append(address)


def test_pending_link_is_not_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(rank, "monotonic_s", lambda: now_s)
    links = Links()
    join = PeerConnector(cast(Endpoint, links), TIMEOUT_S)
    join({"expert-0": "tcp:a"})
    join({"expert-0": "tcp:a", "expert-1": "tcp:b"})
    assert links.dialled == ["tcp:a", "tcp:b"]
    links.linked = ["expert-0"]
    now_s += 2 * SETTLING_S
    with pytest.raises(HandshakeError, match="cannot join expert-1"):
        join({"expert-0": "tcp:a", "expert-1": "tcp:b"})
    join({"expert-1": "tcp:elsewhere"})
    assert links.dialled == ["tcp:a", "tcp:b", "tcp:elsewhere"]


def test_silent_peer_delays_no_other_and_is_dialled_once() -> None:
    links = Links()
    join = PeerConnector(cast(Endpoint, links), 0.05)
    for _ in range(2):
        with pytest.raises(ChannelError, match="cannot join expert-0: it has not answered"):
            join({"expert-0": "silent", "expert-1": "tcp:b"})
        assert links.dialled == ["tcp:b"]
    links.mended.set()
    until(lambda: links.dialled == ["tcp:b", "silent"])
    join({"expert-0": "silent", "expert-1": "tcp:b"})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_unexpected_error_leaves_no_rank_undialled(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    join = PeerConnector(cast(Endpoint, links), TIMEOUT_S)
    with monkeypatch.context() as planted:
        planted.setattr(links, "join", lambda *_: 1 / 0)
        with pytest.raises(ChannelError, match="cannot join expert-0: see this rank's log"):
            join({"expert-0": "tcp:a"})
    join({"expert-0": "tcp:a"})
    assert links.dialled == ["tcp:a"]


class Loop:
    """has: number of sequences. done: calls received."""

    def __init__(self, has: int) -> None:
        self.has, self.done = has, list[str]()

    @property
    def load(self) -> tuple[int, int]:
        return self.has, 0

    def announce_drain(self) -> None:
        self.done.append("says so")

    def hand_over(self) -> None:
        self.done.append("hands over")
        self.has = 0


class Rig:
    def __init__(self, has: int = 2) -> None:
        self.now_s = 100.0
        self.loop = Loop(has)
        self.rank_drain = RankDrain("attention-0", lambda: self.now_s)
        self.rank_drain.begin(cast(LoopControl, self.loop))

    def at(self, now_s: float) -> bool:
        """Return True if the rank is drained at that time."""
        self.now_s = now_s
        self.rank_drain.stepped()
        return self.rank_drain.drained.is_set()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_drain_hands_over_remaining_and_late_sequences(rig: Rig) -> None:
    rig.rank_drain.drain(0.0)
    assert not rig.at(100.0)
    assert rig.loop.done == ["says so", "hands over"], "in this order"
    rig.loop.has = 1
    assert not rig.at(100.0 + IN_TRANSIT_S / 2)
    assert rig.at(100.0 + IN_TRANSIT_S + 0.01)
    assert rig.loop.done == ["says so", "hands over", "hands over"]


def test_drain_deadline_can_only_shrink(rig: Rig) -> None:
    rig.rank_drain.drain(10.0)
    rig.rank_drain.drain(2.0)
    rig.rank_drain.drain(30.0)
    assert rig.rank_drain.notes() == {"leaving": "within 2 s"}
    rig.at(101.9)
    assert "hands over" not in rig.loop.done
    rig.at(102.0)
    assert "hands over" in rig.loop.done


ROUNDS_UNDER_WAY = 3


class Expert:
    """Accepts a placement after a poll and aborts it some polls later."""

    def __init__(self, name: str) -> None:
        placement = contiguous(4, 2, num_layers=1, moe_layers=[0])
        self.ready = RankReady(name=name, channel_address="", pid=id(self))
        self.report = PlacementState(placement=placement, newest=0, links=1)
        self.rounds = 0
        self.received: list[int] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self, method)(*arguments))
        return answer

    def connect(self, addresses: dict[str, str]) -> None:
        pass

    def place(self, wanted: PlacementUpdate) -> None:
        self.received.append(wanted.placement.generation)

    def placed(self) -> PlacementState:
        report = self.report
        if self.received:
            new = self.received.pop()
            self.report = msgspec.structs.replace(report, newest=new, under_way=new)
            return report
        if self.report.under_way is not None:
            self.rounds += 1
            if self.rounds > ROUNDS_UNDER_WAY:
                self.report = msgspec.structs.replace(self.report, under_way=None)
        return self.report


class Unlinked(Expert):
    """Without an attention rank for some polls, as a rank that has just started."""

    def placed(self) -> PlacementState:
        self.rounds += 1
        links = int(self.rounds > ROUNDS_UNDER_WAY)
        return msgspec.structs.replace(self.report, links=links)

    def place(self, wanted: PlacementUpdate) -> None:
        assert self.rounds > ROUNDS_UNDER_WAY
        self.report = msgspec.structs.replace(
            self.report, placement=wanted.placement, newest=wanted.placement.generation
        )


class Silent(Expert):
    """Accepts a placement without an answer."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer = super().call(method, *arguments)
        return Future() if method == "place" else answer


def test_rank_that_does_not_acknowledge_is_named_in_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_resize, "POLL_S", 0.001)
    monkeypatch.setattr(expert_resize, "ANSWER_S", 0.05)
    ranks = [Silent("expert-0"), Expert("expert-1")]
    with pytest.raises(LaunchError, match=r"^1 expert ranks: expert-0 did not receive its experts"):
        place_experts(lambda: [RunningRank(e.ready, e) for e in ranks], 1, TandemConfig())
    assert all(e.report.newest == 1 and e.rounds > ROUNDS_UNDER_WAY for e in ranks)


def test_lost_rank_is_named_although_another_saw_a_concurrent_proposal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_resize, "POLL_S", 0.001)
    ranks = [Expert("expert-0"), Expert("expert-1")]
    for each, reason in zip(ranks, ("attention-0 has refused generation 1", "lost"), strict=True):
        each.report = msgspec.structs.replace(each.report, failures={1: reason})
    with pytest.raises(LaunchError, match=r"^1 expert ranks: lost"):
        place_experts(lambda: [RunningRank(e.ready, e) for e in ranks], 1, TandemConfig())


def test_resize_waits_until_each_rank_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_resize, "POLL_S", 0.001)
    ranks = [Unlinked("expert-0"), Unlinked("expert-1")]
    found = place_experts(lambda: [RunningRank(e.ready, e) for e in ranks], 1, TandemConfig())
    assert found.ranks == 1
    brief = TandemConfig(placement=PlacementConfig(move_timeout_s=0.1))
    never = Expert("expert-0")
    never.report = msgspec.structs.replace(never.report, links=0)
    both = [never, Expert("expert-1")]
    with pytest.raises(LaunchError, match="expert-0: no attention rank is linked: try again later"):
        place_experts(lambda: [RunningRank(e.ready, e) for e in both], 1, brief)


HOLES = """
import time
from pathlib import Path
import torch
from actors.ranks import serving_rank

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

serving_rank._TRIM_INTERVAL_S = 0.2
serving_rank.bound_memory()
blocks = [torch.ones(25_000) for _ in range(2000)]  # 100 kB each
full = resident_bytes()
del blocks[::4], blocks[::3], blocks[::2]
deadline_s = time.monotonic() + 20
while full - resident_bytes() < 100e6 and time.monotonic() < deadline_s:
    time.sleep(0.05)
print(full - resident_bytes())
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="malloc is not glibc's")
def test_fragmented_memory_is_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) > 100e6


PRODUCTS = """
import ctypes, random, sys
import torch
from actors.ranks.serving_rank import bound_memory
from kernels.linear import linear

class Held(ctypes.Structure):
    _fields_ = [(f"f{number}", ctypes.c_size_t) for number in range(10)]

def held_bytes():
    libc.mallinfo2.restype = Held
    found = libc.mallinfo2()
    return found.f7 + found.f4  # in use, in the heap and in mappings

libc = ctypes.CDLL(None)
torch.set_num_threads(1)
if sys.argv[1] == "few":
    bound_memory()
linear(torch.zeros(8, 32), torch.zeros(8, 32))
before, sizes = held_bytes(), random.Random(1)
for _ in range(700):
    linear(torch.zeros(sizes.randrange(64, 384), 32), torch.zeros(sizes.randrange(128, 512), 32))
print(held_bytes() - before)
"""
NAMES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def held_bytes(which: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", PRODUCTS, which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc is not glibc's")
def test_compiled_products_are_bounded() -> None:
    few, all_of_them = held_bytes("few"), held_bytes("all")
    assert few < all_of_them / 2
    assert few < 160 << 20
