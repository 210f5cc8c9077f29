"""TCP: reused buffers and reservations."""

from __future__ import annotations

import pytest
import torch

from actors.channels.base import TensorSpec
from actors.channels.buffers import BufferPool
from contracts.errors import ChannelError
from tests.support.channels_support import (
    endpoint,
    first_packet,
    header,
    linked,
    nothing_leaks,  # noqa: F401
    send,
)


def test_payload_is_received_into_reused_memory() -> None:
    with linked("tcp") as (left, right):
        pointers = set()
        for number in range(20):
            send(left, "right", [torch.full((50_000,), float(number))], header(number))
            packet = first_packet(right)
            pointers.add(packet.tensors[0].data_ptr())
            assert bool((packet.tensors[0] == number).all())
            packet.release()
        assert len(pointers) == 1


def test_buffer_is_at_least_the_requested_size_and_at_most_half_larger() -> None:
    pool = BufferPool()
    for num_bytes in (0, 1, 4096, 4097, 6144, 6145, 100_000, 1 << 20, (1 << 20) + 1):
        size = pool.acquire(num_bytes).num_bytes
        assert max(num_bytes, 4096) <= size <= max(4096, num_bytes * 3 / 2)


def test_pool_keeps_bounded_idle_bytes() -> None:
    pool = BufferPool()
    buffers = [pool.acquire(48 << 20) for _ in range(3)]
    for buffer in buffers:
        pool.release(buffer)
    assert pool.acquire(48 << 20) is buffers[0]
    assert pool.acquire(48 << 20) not in buffers


def test_listen_error_names_the_foreign_address() -> None:
    end = endpoint("one", "tcp")
    try:
        with pytest.raises(ChannelError, match=r"cannot listen on 203\.0\.113\.7"):
            end.listen("203.0.113.7")
        assert end.listen("127.0.0.1").startswith("tcp:127.0.0.1:")
        with pytest.raises(ChannelError, match="listens already"):
            end.listen()
    finally:
        end.close()


def test_committed_reservation_has_no_tensors() -> None:
    with linked("tcp") as (left, right):
        reservation = left.reserve("right", [TensorSpec("int32", (4,))])
        left.commit(reservation, header())
        assert reservation.tensors == ()
        first_packet(right).release()
