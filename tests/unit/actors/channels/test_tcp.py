"""TCP: payloads cut off in the middle, progress, buffers."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from actors.channels.base import Part, PeerLost
from actors.channels.buffers import BufferPool
from contracts.errors import ChannelError, PeerDeadError, PeerHungError
from tests.support.channels_support import (
    endpoint,
    first_packet,
    header,
    linked,
    nothing_leaks,  # noqa: F401
    send,
    wait_for,
    with_peer,
)

HALF = {"elements": 32 << 20}


def test_a_peer_killed_in_the_middle_of_a_payload_is_dead_by_name() -> None:
    with with_peer("tcp", "half", options=HALF) as (main, peer):
        assert peer.line() == "half"
        peer.signal(signal.SIGKILL)
        lost = wait_for(main, PeerLost, deadline_s=2.0)[0]
        assert (lost.peer, type(lost.error)) == ("peer", PeerDeadError)


def test_a_peer_stopped_in_the_middle_of_a_payload_is_hung_by_name() -> None:
    with with_peer("tcp", "half", options=HALF) as (main, peer):
        assert peer.line() == "half"
        peer.signal(signal.SIGSTOP)
        lost = wait_for(main, PeerLost, deadline_s=2.0)[0]
        assert (lost.peer, type(lost.error)) == ("peer", PeerHungError)


def test_a_peer_killed_while_a_payload_is_sent_to_it_is_dead_by_name() -> None:
    with with_peer("tcp", "echo", silence_s=30.0) as (main, peer):
        peer.signal(signal.SIGSTOP)  # so that the payload certainly stays under way
        for _ in range(3):
            send(main, "peer", [torch.ones(8 << 20)], header())
        peer.signal(signal.SIGKILL)
        lost = wait_for(main, PeerLost, deadline_s=2.0)[0]
        assert (lost.peer, type(lost.error)) == ("peer", PeerDeadError)


def test_a_send_without_progress_for_the_deadline_is_a_hung_peer() -> None:
    with with_peer("tcp", "echo", silence_s=30.0, deadline_s=2.0) as (main, peer):
        peer.signal(signal.SIGSTOP)
        for _ in range(3):
            send(main, "peer", [torch.ones(8 << 20)], header())
        lost = wait_for(main, PeerLost, deadline_s=10.0)[0]
        assert isinstance(lost.error, PeerHungError)
        assert "has taken nothing for 2 s" in str(lost.error)


def test_heartbeats_pass_while_a_large_payload_waits_to_be_read() -> None:
    with with_peer("tcp", "echo", silence_s=3.0, heartbeat_s=0.1) as (main, _):
        send(main, "peer", [torch.ones(64 << 20)], header())  # 256 MiB there and back
        time.sleep(4.0)  # longer than silence_s: the answer fills the sockets
        packet = first_packet(main)
        assert packet.tensors[0].numel() == 64 << 20
        packet.release()


def test_the_payload_is_received_straight_into_reused_memory() -> None:
    with linked("tcp") as (left, right):
        pointers = set()
        for number in range(20):
            send(left, "right", [torch.full((50_000,), float(number))], header(number))
            packet = first_packet(right)
            pointers.add(packet.tensors[0].data_ptr())
            assert bool((packet.tensors[0] == number).all())
            packet.release()
        assert len(pointers) == 1


def test_a_buffer_is_at_least_as_large_as_asked_and_at_most_a_third_larger() -> None:
    pool = BufferPool()
    for num_bytes in (0, 1, 4096, 4097, 6144, 6145, 100_000, 1 << 20, (1 << 20) + 1):
        size = pool.take(num_bytes).num_bytes
        assert max(num_bytes, 4096) <= size <= max(4096, num_bytes * 3 / 2)


def test_the_pool_keeps_a_bounded_number_of_idle_bytes() -> None:
    pool = BufferPool()
    buffers = [pool.take(48 << 20) for _ in range(3)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.take(48 << 20) is buffers[0]
    assert pool.take(48 << 20) not in buffers


def test_listening_on_a_foreign_address_is_an_error_that_names_it() -> None:
    end = endpoint("one", "tcp")
    try:
        with pytest.raises(ChannelError, match=r"cannot listen on 203\.0\.113\.7"):
            end.listen("203.0.113.7")
        assert end.listen("127.0.0.1").startswith("tcp:127.0.0.1:")
        with pytest.raises(ChannelError, match="listens already"):
            end.listen()
    finally:
        end.close()


def test_a_committed_reservation_may_not_be_used_any_more() -> None:
    with linked("tcp") as (left, right):
        reservation = left.reserve("right", [Part("int32", (4,))])
        left.commit(reservation, header())
        assert reservation.tensors == ()
        first_packet(right).release()
