"""The handshake on sockets and asyncio streams, and its refusals."""

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from actors.channels import handshake
from actors.channels import listener as listening
from actors.channels.factory import make_endpoint
from actors.channels.handshake import Identity, Remote
from actors.channels.link import LinkSockets
from actors.channels.link_setup import _DATA, _HEARTBEAT, LinkSetup, _Extra
from actors.channels.listener import MAX_PER_ADDRESS, MAX_UNPROVEN, PendingHandshakes, dial
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, HandshakeError
from tests.support.channels_support import (
    TOKEN,
    closed,
    endpoint,
    nothing_leaks,  # noqa: F401
)

LEFT = Identity(name="left", token=TOKEN, epoch=3)
RIGHT = Identity(name="right", token=TOKEN, epoch=3)


def greet(
    left: Identity = LEFT,
    right: Identity = RIGHT,
    *,
    to: str | None = "right",
    answer: handshake.AcceptHandler | None = None,
) -> tuple[Remote | HandshakeError, Remote | HandshakeError]:
    """Run both sides; return their results or errors."""
    a, b = socket.socketpair()
    with a, b:
        got: list[Remote | HandshakeError] = []

        def accept() -> None:
            got.append(outcome(lambda: handshake.accept(b, right, answer=answer, deadline_s=5.0)))
            b.close()

        thread = threading.Thread(target=accept)
        thread.start()
        initiator_result = outcome(
            lambda: handshake.initiate(
                a, left, purpose="test", to=to, extra=b"\x00more", deadline_s=5.0
            )
        )
        a.close()
        thread.join(10)
        return initiator_result, got[0]


def outcome(call: Callable[[], Remote]) -> Remote | HandshakeError:
    try:
        return call()
    except HandshakeError as error:
        return error


def test_both_sides_receive_the_identity_and_extra_of_the_other() -> None:
    initiator_result, acceptor_result = greet(answer=lambda remote: b"for " + remote.name.encode())
    assert initiator_result == Remote(name="right", epoch=3, purpose="test", extra=b"for left")
    assert acceptor_result == Remote(name="left", epoch=3, purpose="test", extra=b"\x00more")


def full(remote: Remote) -> bytes:
    raise HandshakeError(f"no room for {remote.name}")


@pytest.mark.parametrize(
    ("left", "options", "at_initiator", "at_acceptor"),
    [
        (Identity(name="left", token=b"guess", epoch=3), {}, "", "wrong token"),
        (Identity(name="left", token=TOKEN, epoch=None), {}, "epoch None, right is at epoch 3", ""),
        (LEFT, {"to": "attention-7"}, "expects attention-7, this is right", ""),
        (LEFT, {"answer": full}, "no room for left", "no room for left"),
    ],
    ids=["token", "epoch", "name", "reason"],
)
def test_refusal_reaches_both_sides(
    left: Identity, options: dict[str, Any], at_initiator: str, at_acceptor: str
) -> None:
    for result, words in zip(greet(left, **options), (at_initiator, at_acceptor), strict=True):
        assert isinstance(result, HandshakeError)
        assert words in str(result)


def test_reflected_proof_is_rejected() -> None:
    a, b = socket.socketpair()
    with a, b:
        b.sendall(handshake._frame(handshake._Challenge(handshake.PROTOCOL, bytes(32))))
        thread = threading.Thread(target=_reflect, args=(b,))
        thread.start()
        with pytest.raises(HandshakeError, match="does not hold this cluster's token"):
            handshake.initiate(a, LEFT, purpose="test", to="right", deadline_s=5.0)
        thread.join(5)


def _reflect(sock: socket.socket) -> None:
    hello = msgspec.msgpack.decode(sock.recv(4096)[4:], type=handshake._Message)
    assert isinstance(hello, handshake._Hello)
    sock.sendall(handshake._frame(handshake._Welcome("right", b"", hello.proof)))


FIRST_FRAMES = {
    "garbage": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "oversized": struct.pack("<I", 1 << 30) + b"x" * 64,
    "empty": struct.pack("<I", 0),
    "not a message": struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
    "nested": struct.pack("<I", 4015) + b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 4000 + b"\xc0",
    "wrong message": handshake._frame(handshake._Refused("no")),
}


@pytest.mark.parametrize("first", FIRST_FRAMES.values(), ids=FIRST_FRAMES.keys())
def test_first_frame_that_is_no_handshake_is_refused(first: bytes) -> None:
    sides: list[Callable[[socket.socket], Remote]] = [
        lambda s: handshake.accept(s, RIGHT, deadline_s=5.0),
        lambda s: handshake.initiate(s, LEFT, purpose="test", to=None, deadline_s=5.0),
    ]
    for side in sides:
        a, b = socket.socketpair()
        with a, b:
            a.sendall(first)
            with pytest.raises(HandshakeError):
                side(b)


def test_silence_and_disconnect_fail_within_the_deadline() -> None:
    a, b = socket.socketpair()
    with a, b:
        with pytest.raises(HandshakeError, match=r"no handshake within 0\.05 s"):
            handshake.accept(b, RIGHT, deadline_s=0.05)
        a.close()
        with pytest.raises(HandshakeError):
            handshake.accept(b, RIGHT, deadline_s=5.0)


def test_hello_is_bound_to_one_challenge() -> None:
    """A recorded hello cannot be replayed."""
    a, b = socket.socketpair()
    c, d = socket.socketpair()
    with a, b, c, d:
        thread = threading.Thread(
            target=lambda: outcome(lambda: handshake.accept(b, RIGHT, deadline_s=5.0))
        )
        thread.start()
        steps = handshake._initiator(LEFT, purpose="test", to="right", extra=b"")
        next(steps)
        challenge = a.recv(4096)
        steps.send(challenge[:4])
        hello = steps.send(challenge[4:])
        assert isinstance(hello, bytes)
        a.sendall(hello)
        thread.join(5)
        c.sendall(hello)
        with pytest.raises(HandshakeError, match="wrong token"):
            handshake.accept(d, RIGHT, deadline_s=5.0)


@pytest.mark.parametrize(
    ("right", "left", "message"),
    [
        (
            {"backend": "tcp", "placement": "1a2b"},
            {"backend": "tcp", "placement": "3c4d"},
            "right refused left: it has its experts placed as 3c4d, here they are as 1a2b: launch",
        ),
        ({"backend": "tcp"}, {"backend": "shm"}, "backend shm, right uses tcp"),
    ],
    ids=["placement", "backend"],
)
def test_mismatch_is_refused_with_both_values(
    right: dict[str, Any], left: dict[str, Any], message: str
) -> None:
    ends = endpoint("right", **right), endpoint("left", **left)
    with closed(*ends), pytest.raises(HandshakeError, match=message):
        ends[1].connect("right", ends[0].listen())


def test_close_does_not_wait_for_silent_strangers() -> None:
    right = endpoint("right", "tcp")
    address = right.listen()
    with dial(address, 5.0), dial(address, 5.0):
        started_s = monotonic_s()
        right.close()
        assert monotonic_s() - started_s < listening.HANDSHAKE_S


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("auto", "cpu", "choose shm, tcp, nccl or ipc"),
        ("shm", "cuda", "use nccl or ipc"),
        ("nccl", "cpu", "use shm or tcp"),
    ],
)
def test_unfit_backend_error_is_one_line(backend: str, device: str, message: str) -> None:
    with pytest.raises(ChannelError, match=message):
        make_endpoint(
            name="one",
            token=TOKEN,
            epoch=1,
            config=ChannelConfig(backend=backend),  # type: ignore[arg-type]
            clock=monotonic_s,
            device=torch.device(device),
        )


class Crowd:
    """Connections by name; `cut` has the evicted ones."""

    def __init__(self) -> None:
        self.gate = PendingHandshakes("rank")
        self.cut: list[str] = []
        self.socks: dict[str, Mock] = {}

    def enter(self, address: str, name: str) -> None:
        sock = self.socks[name] = Mock(shutdown=lambda how: self.cut.append(name))
        self.gate.enter(sock, address)

    def fill(self, address: str, count: int) -> None:
        for number in range(count):
            self.enter(address, f"{address} {number}")


def test_address_at_its_limit_loses_its_own_oldest() -> None:
    crowd = Crowd()
    crowd.enter("10.0.0.2", "other")
    crowd.fill("10.0.0.1", MAX_PER_ADDRESS)
    assert crowd.cut == []
    crowd.enter("10.0.0.1", "newest")
    assert crowd.cut == ["10.0.0.1 0"]
    assert len(crowd.gate._addresses) == MAX_PER_ADDRESS + 1


def test_address_with_the_most_loses_one_when_all_slots_are_used() -> None:
    crowd = Crowd()
    crowd.enter("10.0.0.9", "early")
    crowd.fill("10.0.0.1", MAX_PER_ADDRESS)
    for number in range(MAX_UNPROVEN - MAX_PER_ADDRESS - 1):
        crowd.enter(f"10.1.0.{number}", f"one of {number}")
    assert crowd.cut == []
    crowd.enter("10.0.0.2", "newest")
    assert crowd.cut == ["10.0.0.1 0"]
    assert len(crowd.gate._addresses) == MAX_UNPROVEN


def test_authenticated_peer_is_kept_and_evicted_peer_is_refused() -> None:
    crowd = Crowd()
    crowd.enter("10.0.0.1", "peer")
    assert crowd.gate.leave(crowd.socks["peer"])
    crowd.fill("10.0.0.1", MAX_PER_ADDRESS + 1)
    assert crowd.cut == ["10.0.0.1 0"]
    assert not crowd.gate.leave(crowd.socks["10.0.0.1 0"])
    assert crowd.gate.leave(crowd.socks["10.0.0.1 1"])
    assert len(crowd.gate._addresses) == MAX_PER_ADDRESS - 1


@pytest.fixture
def joined() -> list[LinkSockets]:
    return []


@pytest.fixture
def joiner(joined: list[LinkSockets]) -> Iterator[LinkSetup]:
    me = Identity(name="expert-0", token=secrets.token_bytes(16), epoch=1)
    made = LinkSetup(
        me, "shm", 5.0, monotonic_s, linked=lambda name, epoch: False, joined=joined.append
    )
    yield made
    made.close()


def half(purpose: str, link_id: bytes, name: str = "attention-0") -> tuple[socket.socket, Remote]:
    extra = msgspec.msgpack.encode(_Extra("shm", link_id, b"offer"))
    return socket.socketpair()[0], Remote(name=name, epoch=1, purpose=purpose, extra=extra)


@pytest.mark.parametrize(
    ("second", "name"),
    [(_DATA, "attention-0"), (_HEARTBEAT, "attention-1")],
    ids=["same kind", "another peer"],
)
def test_unfit_second_socket_does_not_join(
    joiner: LinkSetup, joined: list[LinkSockets], second: str, name: str
) -> None:
    link_id = secrets.token_bytes(16)
    halves = [half(_DATA, link_id), half(second, link_id, name)]
    for sock, remote in halves:
        joiner._on_accepted(sock, remote)
    assert joined == []
    assert [sock.fileno() for sock, _ in halves] == [-1, -1], "both are closed"
