"""Shared memory: no copies, growth, idle segments, nothing left behind."""

from __future__ import annotations

import os

import pytest
import torch

from actors.channels.base import Packet, TensorSpec
from actors.channels.segments import IDLE_S, check_memfd, create_memfd
from contracts.errors import ChannelError
from tests.support.channels_support import (
    first_packet,
    header,
    linked,
    nothing_leaks,  # noqa: F401
    send,
    wait_for,
)
from tests.support.manual_clock import ManualClock

SEGMENT_BYTES = 64 << 10


def segments() -> int:
    """Mappings of segments in this process."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:tandem-segment" in line for line in maps)


def test_sender_and_receiver_see_the_same_pages() -> None:
    with linked("shm") as (left, right):
        reservation = left.reserve("right", [TensorSpec("int64", (1000,))])
        written = reservation.tensors[0]
        written.fill_(1)
        left.commit(reservation, header())
        packet = first_packet(right)
        written[0] = 77  # not for users: shows that nothing was copied
        assert packet.tensors[0][:2].tolist() == [77, 1]
        packet.release()


def test_full_segment_adds_another_and_large_payload_gets_its_own() -> None:
    before = segments()
    with linked("shm", segment_bytes=SEGMENT_BYTES) as (left, right):
        for number in range(10):  # nobody releases: 10 x 40 KiB in segments of 64 KiB
            send(left, "right", [torch.full((10 << 10,), float(number))], header(number))
        send(left, "right", [torch.ones(1 << 20)], header(10))
        packets = wait_for(right, Packet, 11)
        assert segments() - before == 2 * 11  # both ends of the link are in this process
        for packet in packets[:10]:
            assert bool((packet.tensors[0] == packet.header.batch).all())
        for packet in reversed(packets):
            packet.release()


def test_empty_tensor_can_follow_the_end_of_the_segment() -> None:
    with linked("shm", segment_bytes=5000) as (left, right):
        send(left, "right", [torch.ones(79 * 64 // 8, dtype=torch.int64), torch.ones(0)], header())
        packet = first_packet(right)
        assert [t.numel() for t in packet.tensors] == [632, 0]
        packet.release()


def test_held_packet_holds_its_own_bytes_only() -> None:
    before = segments()
    with linked("shm", segment_bytes=SEGMENT_BYTES) as (left, right):
        send(left, "right", [torch.full((1 << 10,), 5.0)], header(0))
        parked = first_packet(right)
        for number in range(100):
            send(left, "right", [torch.full((12 << 10,), float(number))], header(number))
            first_packet(right).release()
        assert segments() - before == 2
        assert bool((parked.tensors[0] == 5.0).all())
        parked.release()


def test_idle_segments_are_freed_by_both_sides() -> None:
    before, clock = segments(), ManualClock()
    with linked("shm", segment_bytes=SEGMENT_BYTES, clock=clock) as (left, right):
        for number in range(5):
            send(left, "right", [torch.ones(1 << 18)], header(number))
        for packet in wait_for(right, Packet, 5):
            packet.release()
        del packet
        clock.advance(1.5)
        assert left.poll(0) == []
        clock.advance(IDLE_S)
        assert left.poll(0) == []
        assert right.poll(1.0) == []
        assert segments() - before == 2
        send(left, "right", [torch.full((1 << 18,), 3.0)], header(9))
        packet = first_packet(right)
        assert bool((packet.tensors[0] == 3.0).all())
        packet.release()


def test_lack_of_memory_is_an_error_with_both_numbers() -> None:
    with (
        linked("shm") as (left, _),
        pytest.raises(ChannelError, match=r"segment of \d+ bytes exceeds .*segment_bytes"),
    ):
        left.reserve("right", [TensorSpec("uint8", (1 << 50,))])


def test_segment_cannot_shrink() -> None:
    fd = create_memfd(4096)
    try:
        assert check_memfd(fd, 4096)
        assert not check_memfd(fd, 8192)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    try:
        os.ftruncate(plain, 8192)
        assert not check_memfd(plain, 4096)
    finally:
        os.close(plain)
