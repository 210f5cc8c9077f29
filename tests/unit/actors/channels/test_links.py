"""Requirements of every CPU backend."""

import contextlib
import random
import socket
import threading
from typing import Any

import msgspec
import pytest
import torch

from actors.channels.base import (
    ChannelEvent,
    Header,
    Packet,
    PacketKind,
    PeerJoined,
    PeerLost,
    TensorSpec,
)
from actors.channels.endpoint import Endpoint
from contracts.errors import ChannelError, HandshakeError, PeerDeadError, PeerError
from contracts.requests import Priority
from tests.support.channels_support import (
    ALL_DTYPES,
    BACKENDS,
    closed,
    endpoint,
    first_packet,
    header,
    linked,
    nothing_leaks,  # noqa: F401
    random_tensor,
    raw_bytes,
    raw_frame,
    send,
    wait_for,
)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def test_header_and_every_dtype_and_shape_arrive_bit_for_bit(backend: str) -> None:
    head = Header(PacketKind.E2A, 1, 2**40, 61, 3, 5, Priority.BE, 123.25, 2**33)
    shapes = [(3, 5), (0, 7), (1,), (), (2, 3, 4), (0,), (129, 3)]
    tensors = [
        random_tensor(dtype, shape, seed)
        for seed, (dtype, shape) in enumerate((d, s) for d in ALL_DTYPES for s in shapes)
    ]
    with linked(backend) as (left, right):
        send(left, "right", [], header(7))
        send(left, "right", tensors, head)
        bare, packet = wait_for(right, Packet, 2)
        assert (bare.header.batch, len(bare.tensors)) == (7, 0)
        assert (packet.peer, packet.header) == ("left", head)
        assert [t.dtype for t in packet.tensors] == [t.dtype for t in tensors]
        assert [t.shape for t in packet.tensors] == [t.shape for t in tensors]
        assert [raw_bytes(t) for t in packet.tensors] == [raw_bytes(t) for t in tensors]
        bare.release()
        packet.release()


def test_packets_keep_their_bytes_while_others_are_released(backend: str) -> None:
    order = random.Random(3)
    with linked(backend, segment_bytes=64 << 10) as (left, right):
        held: list[tuple[Packet, torch.Tensor]] = []
        for number in range(300):
            sent = random_tensor("int32", (order.randrange(1, 4000),), number)
            send(left, "right", [sent], header(number))
            held.append((first_packet(right), sent))
            order.shuffle(held)
            while len(held) > 12:
                packet, expected = held.pop()
                assert torch.equal(packet.tensors[0], expected)
                packet.release()
        for packet, expected in held:
            assert torch.equal(packet.tensors[0], expected)
            packet.release()
        assert left.bytes_moved()[0] == right.bytes_moved()[1] > 0


def test_packet_can_be_released_on_another_thread(backend: str) -> None:
    with linked(backend) as (left, right):
        for number in range(20):
            send(left, "right", [torch.full((1000,), float(number))], header(number))
            packet = first_packet(right)
            thread = threading.Thread(target=packet.release)
            thread.start()
            thread.join(5)
            assert packet.tensors == ()


def test_packet_stays_readable_after_its_endpoint_closes(backend: str) -> None:
    with linked(backend) as (left, right):
        send(left, "right", [torch.arange(1000)], header())
        packet = first_packet(right)
        left.close()
        right.close()
        assert torch.equal(packet.tensors[0], torch.arange(1000))
        packet.release()


def test_sends_to_a_peer_that_does_not_read_do_not_block(backend: str) -> None:
    with linked(backend) as (left, right):
        for number in range(3000):
            send(left, "right", [torch.tensor([number])], header(number))
        received = 0
        while received < 3000:
            left.poll(0)
            for packet in right.poll(1.0):
                assert isinstance(packet, Packet)
                assert packet.header.batch == int(packet.tensors[0]) == received
                packet.release()
                received += 1


def test_closed_peer_is_lost_after_its_last_packet(backend: str) -> None:
    with linked(backend) as (left, right):
        for number in range(10):
            send(left, "right", [torch.full((100,), number)], header(number))
        left.close()
        channel_events: list[ChannelEvent] = []
        while not channel_events or not isinstance(channel_events[-1], PeerLost):
            channel_events += right.poll(5.0)
        *packets, lost = channel_events
        assert [p.header.batch for p in packets if isinstance(p, Packet)] == list(range(10))
        assert isinstance(lost, PeerLost)
        assert isinstance(lost.error, PeerDeadError)


def test_packets_of_an_older_epoch_are_dropped(backend: str) -> None:
    with linked(backend, epoch=4) as (left, right):
        send(left, "right", [torch.ones(3)], header(1, epoch=3))
        send(left, "right", [torch.ones(3)], header(2, epoch=4))
        packet = first_packet(right)
        assert packet.header.batch == 2
        packet.release()


def test_later_epoch_replaces_the_link_and_older_ones_are_refused(backend: str) -> None:
    right = endpoint("right", backend, epoch=1)
    lefts = [endpoint("left", backend, epoch=epoch) for epoch in (1, 2)]
    with closed(*lefts, right):
        address = right.listen()
        lefts[0].connect("right", address)
        assert wait_for(right, PeerJoined) == [PeerJoined("left")]
        lefts[1].connect("right", address)
        channel_events: list[ChannelEvent] = []
        while len(channel_events) < 2:
            channel_events += right.poll(10.0)
        lost, joined = channel_events
        assert isinstance(lost, PeerLost)
        assert (lost.epoch, "replaced" in lost.error.message) == (1, True)
        assert joined == PeerJoined("left")
        with contextlib.suppress(ChannelError):  # it has seen that, or sees it now
            lefts[0].drop("right", "")
        lefts[0].poll(1.0)
        with pytest.raises(HandshakeError, match="epoch 1, which has been replaced by 2"):
            lefts[0].connect("right", address)
        send(lefts[1], "right", [torch.ones(3)], header(1, epoch=2))
        first_packet(right).release()
        send(right, "left", [torch.ones(3)], header(2, epoch=2))
        first_packet(lefts[1]).release()


def test_replaced_acceptor_is_not_joined(backend: str) -> None:
    left = endpoint("left", backend, epoch=1)
    rights = [endpoint("right", backend, epoch=epoch) for epoch in (2, 1)]
    with closed(left, *rights):
        addresses = [right.listen() for right in rights]
        left.connect("right", addresses[0])
        with pytest.raises(HandshakeError, match="right is at epoch 1, which has been replaced"):
            left.join("right", addresses[1])
        assert left.peers() == ("right",)


def test_linked_name_is_refused(backend: str) -> None:
    with linked(backend) as (left, right):
        with (
            contextlib.closing(endpoint("left", backend)) as impostor,
            pytest.raises(HandshakeError, match="linked to right already"),
        ):
            impostor.connect("right", _address(right))
        send(left, "right", [torch.ones(1)], header())
        first_packet(right).release()


def test_connect_to_unused_address_fails_within_the_deadline(backend: str) -> None:
    gone = endpoint("gone", backend)
    address = gone.listen()
    gone.close()
    left = endpoint("left", backend, connect_timeout_s=2.0)
    with closed(left):
        with pytest.raises(ChannelError, match="cannot connect"):
            left.connect("gone", address)
        with pytest.raises(ChannelError, match="has no link to gone"):
            left.reserve("gone", [])
        with pytest.raises(ChannelError, match="expected unix:"):
            left.connect("gone", "nonsense")


def test_wake_ends_a_poll_in_another_thread(backend: str) -> None:
    end = endpoint("one", backend)
    thread = threading.Thread(target=end.poll, args=(30.0,))
    thread.start()
    end.wake()
    thread.join(10)
    assert not thread.is_alive()
    end.close()
    end.wake()  # harmless


@pytest.mark.parametrize("body", [b"hello", b"\x92" + b"\x91" * 4000 + b"\xc0\xc0"])
def test_malformed_frame_loses_that_peer_only(backend: str, body: bytes) -> None:
    with linked(backend) as (left, right):
        third = endpoint("third", backend)
        third.connect("right", _address(right))
        wait_for(right, PeerJoined)
        socket_of(left).sendall(raw_frame(backend, body))
        lost = wait_for(right, PeerLost)[0]
        assert lost.peer == "left"
        assert isinstance(lost.error, PeerError)
        assert "left sent a bad" in str(lost.error)
        send(third, "right", [torch.ones(2)], header())
        first_packet(right).release()
        third.close()


def test_unknown_dtype_loses_that_peer(backend: str) -> None:
    with linked(backend) as (left, right):
        reservation = left.reserve("right", [TensorSpec("int32", (4,))])
        parts = tuple(msgspec.structs.replace(p, dtype="Tensor") for p in reservation.parts)  # type: ignore[attr-defined]
        reservation.parts = parts  # type: ignore[attr-defined]
        left.commit(reservation, header())
        assert "not a dtype" in str(wait_for(right, PeerLost)[0].error)


def _address(end: Endpoint) -> str:
    """Return the address of a listening endpoint."""
    listener = end._link_setup._listener
    assert listener is not None
    name = listener._sock.getsockname()
    if isinstance(name, bytes):
        return "unix:@" + name[1:].decode()
    return f"tcp:{name[0]}:{name[1]}"


def socket_of(end: Any) -> socket.socket:
    (link,) = end._links.values()
    sock: socket.socket = link._sock if hasattr(link, "_sock") else link._frames.sock
    return sock
