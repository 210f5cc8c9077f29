"""Connection of an attention rank to the expert ranks."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from actors.batching.observer import LoopControl
from actors.channels.base import Endpoint
from actors.ranks import lifecycle
from actors.ranks.lifecycle import IN_TRANSIT_S, SETTLING_S, PeerConnector, RankDrain
from contracts.errors import ChannelError, HandshakeError
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


def test_pending_link_is_not_dialled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(lifecycle, "monotonic_s", lambda: now_s)
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
def test_unexpected_error_leaves_no_rank_undialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
