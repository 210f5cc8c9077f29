"""Dialing of weight peers, with failing ones."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import actors.gather.peer_source
from actors.channels.handshake import Identity
from actors.channels.listener import ADDRESS_SEPARATOR
from actors.gather import peer_dialer
from actors.gather.peer_dialer import PeerDialer
from actors.gather.peer_source import PeerSource
from actors.gather.protocol import Terms
from actors.gather.weight_link import WeightLink, join
from contracts.config import ChannelConfig
from contracts.errors import HandshakeError, PeerDeadError
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.group_harness import group_config
from tests.support.prefill_workers import assert_layer, make_source, new_buffer, worker_spec

Checkpoints = Callable[..., Path]
TIMEOUT_S = 20.0
ME = Identity(name="prefill-0", token=b"", epoch=None)
TERMS = Terms(1, b"", b"")


def wait_until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@contextlib.contextmanager
def mute(*, hangs_up: bool) -> Iterator[str]:
    """Address of a peer that is silent or disconnects at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed below
                while True:
                    taken.append(server.accept()[0])
                    if hangs_up:
                        taken[-1].close()

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"tcp:127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT_S)
        for sock in taken:
            sock.close()


@contextlib.contextmanager
def sources(folder: Path, count: int, **spec: Any) -> Iterator[list[PeerSource]]:
    spec.setdefault("backend", "tcp")
    made = [make_source(worker_spec(folder, rank, count, **spec)) for rank in range(count)]
    try:
        yield made
    finally:
        for source in made:
            source.close()


@pytest.mark.long
@pytest.mark.parametrize("hangs_up", [False, True])
def test_unresponsive_peer_is_skipped_and_others_are_joined(
    tiny_checkpoint: Checkpoints, hangs_up: bool
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    config = group_config(
        prefill={"experts": "gathered"},
        channel={"heartbeat_timeout_s": 1.0, "heartbeat_interval_s": 0.2, "connect_timeout_s": 3.0},
    )
    with mute(hangs_up=hangs_up) as address, sources(folder, 3, config=config) as made:
        first, _, third = made
        first.connect({"prefill-1": address, "prefill-2": third.listen("127.0.0.1")})
        buffer = new_buffer(folder)
        first.copy(1, buffer)
        assert_layer(folder, buffer, 1)
        assert list(first.lost) == ["prefill-1"]
        assert first.fallbacks == 1


def test_failed_peer_is_joined_once_it_answers(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_dialer, "REDIAL_S", 0.05)
    failures = [PeerDeadError("not yet", "prefill-1")] * 3

    def fail_first(*arguments: Any) -> WeightLink:
        if failures:
            raise failures.pop()
        return join(*arguments)

    monkeypatch.setattr(peer_dialer, "join", fail_first)
    folder = tiny_checkpoint("qwen3_moe")
    with sources(folder, 2) as (first, second):
        first.connect({"prefill-1": second.listen("127.0.0.1")})
        assert first.lost == {"prefill-1": "cannot join prefill-1: not yet"}
        wait_until(lambda: not failures)
        buffer = new_buffer(folder)

        def joined() -> bool:
            first.copy(1, buffer)
            return not first.lost

        wait_until(joined)
        assert_layer(folder, buffer, 1)


def test_refusing_peer_is_reported_after_all_others_were_tried(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    with sources(folder, 3) as (first, _, third):
        other = make_source(worker_spec(folder, 1, 3, backend="tcp", token=b"another" * 5))
        try:
            addresses = {n.name: n.listen("127.0.0.1") for n in (other, third)}
            with pytest.raises(HandshakeError, match=r"cannot join prefill-1: .*wrong token"):
                first.connect(addresses)
            first.copy(1, new_buffer(folder))
            assert list(first.lost) == ["prefill-1"]
        finally:
            other.close()


def test_at_most_one_thread_dials_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_dialer, "REDIAL_S", 0.001)
    dialling = threading.Lock()
    tried: list[str] = []

    def join(peer: str, address: str, *_: Any) -> WeightLink:
        assert dialling.acquire(blocking=False), "two dial at once"
        try:
            tried.append(address)
            time.sleep(0.002)
            if address != "tcp:2":
                raise PeerDeadError("nobody is there", peer)
            return WeightLink(peer, socket.socketpair()[0], 1, None)
        finally:
            dialling.release()

    monkeypatch.setattr(peer_dialer, "join", join)
    dialer = PeerDialer(ME, TERMS, ChannelConfig())
    try:
        dialer.introduce({"prefill-1": "tcp:1"}, TIMEOUT_S)
        assert "nobody is there" in dialer.problem("prefill-1")
        wait_until(lambda: len(tried) > 5)  # it is being redialled
        dialer.introduce({"prefill-1": "tcp:2"}, TIMEOUT_S)
        assert dialer.problem("prefill-1") == ""
        assert tried.count("tcp:2") == 1
        (link,) = dialer.take().values()
        link.close()
        dialer.reconnect("prefill-1")
        wait_until(lambda: tried.count("tcp:2") == 2)
        wait_until(lambda: not dialer._threads)
    finally:
        dialer.close()


def test_worker_moved_to_another_node_uses_tcp(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.gather.peer_source, "_is_far", lambda host: True)
    folder = tiny_checkpoint("qwen3_moe")
    with sources(folder, 2, backend="shm") as (stayed, moved):
        for source in (stayed, moved):
            source.listen("127.0.0.1")
        stayed.connect({"prefill-1": elsewhere(moved.address)})
        moved.connect({"prefill-0": elsewhere(stayed.address)})
        for source in (stayed, moved):
            buffer = new_buffer(folder)
            source.copy(1, buffer)
            assert_layer(folder, buffer, 1)
            assert not source.lost
            assert source.fallbacks == 0
        (link,) = stayed._links.values()
        assert link._sock.family == socket.AF_INET


def elsewhere(address: str) -> str:
    """The address as seen from another node, without the Unix socket."""
    unix, tcp = address.split(ADDRESS_SEPARATOR)
    assert unix.startswith("unix:@")
    return ADDRESS_SEPARATOR.join((unix + "-gone", tcp))


def test_running_local_peer_is_lost_after_four_timeouts(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    with sources(folder, 2) as (source, _):
        ours, theirs = socket.socketpair()  # the process behind it is this one: it runs
        link = WeightLink("prefill-1", ours, 1, None)
        source._links["prefill-1"] = link
        heartbeat_timeout_s = source._config.heartbeat_timeout_s
        link.progress_s = time.monotonic() - 2 * heartbeat_timeout_s
        assert not source._advance(link, overdue=True)
        assert "prefill-1" in source._links
        link.progress_s = time.monotonic() - 4 * heartbeat_timeout_s
        assert source._advance(link, overdue=True)
        assert "sent nothing" in source.lost["prefill-1"]
        theirs.close()
