"""The handshake on sockets and asyncio streams, and its refusals."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import pytest
import torch

from actors.channels import handshake, pending_handshakes
from actors.channels.base import Endpoint, PeerJoined
from actors.channels.factory import make_endpoint
from actors.channels.handshake import Identity, Remote
from actors.channels.listener import dial
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, HandshakeError
from tests.support.channels_support import (
    BACKENDS,
    TOKEN,
    endpoint,
    first_packet,
    header,
    nothing_leaks,  # noqa: F401
    send,
    wait_for,
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


def test_wrong_token_is_refused_by_both_sides() -> None:
    initiator_result, acceptor_result = greet(Identity(name="left", token=b"guess", epoch=3))
    assert isinstance(initiator_result, HandshakeError)
    assert isinstance(acceptor_result, HandshakeError)
    assert "wrong token" in str(acceptor_result)


def test_rank_refuses_peer_without_epoch() -> None:
    initiator_result, acceptor_result = greet(Identity(name="left", token=TOKEN, epoch=None))
    assert "epoch None, right is at epoch 3" in str(initiator_result)
    assert isinstance(acceptor_result, HandshakeError)


def test_answer_judges_the_epoch_of_the_peer() -> None:
    initiator_result, acceptor_result = greet(Identity(name="left", token=TOKEN, epoch=4))
    assert isinstance(initiator_result, Remote)
    assert isinstance(acceptor_result, Remote)
    assert acceptor_result.epoch == 4


def test_connections_without_epoch_are_accepted() -> None:
    initiator_result, acceptor_result = greet(
        Identity(name="ingress", token=TOKEN, epoch=None),
        Identity(name="right", token=TOKEN, epoch=None),
        to=None,
    )
    assert isinstance(initiator_result, Remote)
    assert isinstance(acceptor_result, Remote)


def test_unexpected_acceptor_name_is_refused() -> None:
    initiator_result, acceptor_result = greet(to="attention-7")
    assert "expects attention-7, this is right" in str(initiator_result)
    assert isinstance(acceptor_result, HandshakeError)


def test_acceptor_refuses_with_a_reason() -> None:
    def full(remote: Remote) -> bytes:
        raise HandshakeError(f"no room for {remote.name}")

    initiator_result, acceptor_result = greet(answer=full)
    assert "no room for left" in str(initiator_result)
    assert "no room for left" in str(acceptor_result)


def test_acceptor_without_token_is_rejected() -> None:
    """It can skip its own check, but cannot produce the proof."""
    a, b = socket.socketpair()
    with a, b:
        fake = Identity(name="right", token=b"other", epoch=3)
        frames = [
            handshake._frame(handshake._Challenge(handshake.PROTOCOL, bytes(32))),
            handshake._frame(handshake._Welcome("right", b"", handshake._proof(fake, "acceptor"))),
        ]
        b.sendall(b"".join(frames))
        with pytest.raises(HandshakeError, match="does not hold this cluster's token"):
            handshake.initiate(a, LEFT, purpose="test", to="right", deadline_s=5.0)


def test_reflected_proof_is_rejected() -> None:
    a, b = socket.socketpair()
    with a, b:
        b.sendall(handshake._frame(handshake._Challenge(handshake.PROTOCOL, bytes(32))))
        thread = threading.Thread(target=_reflect, args=(b,))
        thread.start()
        with pytest.raises(HandshakeError, match="does not hold"):
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


def test_asyncio_initiator_runs_the_same_handshake() -> None:
    a, b = socket.socketpair()
    accepted: list[Remote] = []

    def accept() -> None:
        accepted.append(handshake.accept(b, RIGHT, deadline_s=5.0))

    async def initiate() -> Remote:
        reader, writer = await asyncio.open_connection(sock=a)
        try:
            return await handshake.initiate_async(
                reader, writer, LEFT, purpose="requests", to="right", deadline_s=5.0
            )
        finally:
            writer.close()
            await writer.wait_closed()

    thread = threading.Thread(target=accept)
    thread.start()
    assert asyncio.run(initiate()).name == "right"
    thread.join(5)
    b.close()
    assert (accepted[0].name, accepted[0].purpose) == ("left", "requests")


@pytest.mark.parametrize("backend", BACKENDS)
def test_peer_with_wrong_token_is_refused_during_traffic(backend: str) -> None:
    right, left = endpoint("right", backend), endpoint("left", backend)
    stranger = endpoint("stranger", backend, token=b"not the token")
    try:
        address = right.listen()
        left.connect("right", address)
        wait_for(right, PeerJoined)
        with pytest.raises(HandshakeError):
            stranger.connect("right", address)
        exchange(left, right)
        assert right.peers() == ("left",)
    finally:
        for end in (left, right, stranger):
            end.close()


def test_placement_mismatch_is_refused_with_both_digests() -> None:
    right = endpoint("right", "tcp", placement="1a2b")
    left = endpoint("left", "tcp", placement="3c4d")
    refusal = "right refused left: it has its experts placed as 3c4d, here they are as 1a2b: launch"
    try:
        with pytest.raises(HandshakeError, match=refusal):
            left.connect("right", right.listen())
    finally:
        left.close()
        right.close()


def test_backend_mismatch_is_refused_with_both_names() -> None:
    right, left = endpoint("right", "tcp"), endpoint("left", "shm")
    try:
        with pytest.raises(HandshakeError, match="backend shm, right uses tcp"):
            left.connect("right", right.listen())
    finally:
        left.close()
        right.close()


def test_close_does_not_wait_for_silent_strangers() -> None:
    right = endpoint("right", "tcp")
    address = right.listen()
    with dial(address, 5.0), dial(address, 5.0):
        started_s = monotonic_s()
        right.close()
        assert monotonic_s() - started_s < pending_handshakes.HANDSHAKE_S


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


def exchange(left: Endpoint, right: Endpoint) -> None:
    send(left, "right", [torch.ones(3)], header())
    first_packet(right).release()
