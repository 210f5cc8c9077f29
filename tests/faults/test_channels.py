"""What a link does when this process runs out of memory or descriptors, and when two machines'
clocks differ: the peer is told of by name, and nobody waits for ever."""

from __future__ import annotations

import errno
import os
from typing import Any

import msgspec
import pytest
import torch

from actors.channels import link_setup, local_process
from actors.channels.base import Packet, PeerJoined, PeerLost, TensorSpec, transfers
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, PeerError
from tests.support.channels_support import (
    BACKENDS,
    endpoint,
    first_packet,
    header,
    linked,
    nothing_leaks,  # noqa: F401
    raw_frame,
    send,
    wait_for,
)

NESTED = b"\x92" + b"\x91" * 4000 + b"\xc0\xc0"
BIG = [TensorSpec("float32", (4 << 20,))]  # more than the first segment


def fail(*_: object, **__: object) -> Any:
    raise MemoryError("no room")


def no_descriptors(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_receiving_thread_that_cannot_go_on_is_a_lost_peer_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FINDINGS B3: it died, and nobody was told."""
    with linked("tcp") as (left, right):
        link: Any = right._links["left"]  # type: ignore[attr-defined]
        monkeypatch.setattr(link._pool, "acquire", fail)
        send(left, "right", [torch.ones(3)], header())
        (lost,) = wait_for(right, PeerLost)
        assert lost.peer == "left"
        assert "cannot receive from left: MemoryError: no room" in str(lost.error)


def test_a_sending_thread_that_cannot_go_on_is_a_lost_peer_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FINDINGS B3."""
    with linked("tcp") as (left, _):
        link: Any = left._links["right"]  # type: ignore[attr-defined]
        monkeypatch.setattr(link, "_send_some", fail)
        send(left, "right", [torch.ones(1 << 20)], header())
        (lost,) = wait_for(left, PeerLost)
        assert "cannot send to right: MemoryError" in str(lost.error)


def test_a_frame_whose_segment_cannot_be_mapped_is_a_lost_peer_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FINDINGS B3: whatever is raised while a frame is taken."""
    with linked("shm") as (left, right):
        link: Any = right._links["left"]  # type: ignore[attr-defined]
        monkeypatch.setattr(link, "_map", fail)
        send(left, "right", [torch.ones(3)], header())
        (lost,) = wait_for(right, PeerLost)
        assert "cannot receive from left: MemoryError" in str(lost.error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nested_frame_of_a_peer_is_a_bad_frame(backend: str) -> None:
    """FINDINGS A8."""
    with linked(backend) as (left, right):
        link: Any = left._links["right"]  # type: ignore[attr-defined]
        sock = link._sock if backend == "tcp" else link._frames.sock
        sock.sendall(raw_frame(backend, NESTED))
        (lost,) = wait_for(right, PeerLost)
        assert isinstance(lost.error, PeerError)
        assert "left sent a bad" in str(lost.error)


@pytest.mark.parametrize("what", ["contracts.machine._meminfo", "os.memfd_create", "mmap.mmap"])
def test_a_payload_for_which_there_are_no_descriptors_is_refused_by_name_and_the_link_stays(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FINDINGS A8: reading /proc/meminfo was the end of the rank."""
    with linked("shm") as (left, right):
        with monkeypatch.context() as patch:
            patch.setattr(what, no_descriptors)
            with pytest.raises(ChannelError, match=r"right|segment"):
                left.reserve("right", BIG)
        send(left, "right", [torch.ones(3)], header())
        first_packet(right).release()


def test_how_a_peer_fares_is_known_without_a_free_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FINDINGS A8: it was read from /proc at every look."""
    watched = local_process.LocalProcess(os.getpid())
    monkeypatch.setattr(os, "open", no_descriptors)
    monkeypatch.setattr("builtins.open", no_descriptors)
    assert watched.is_running
    watched.close()
    assert not watched.is_running


def test_a_peer_that_gets_no_answer_is_let_go_by_name() -> None:
    """FINDINGS B3: an attention rank would wait for it."""
    with linked("tcp") as (left, right):
        right.drop("left", "left got no answer: no memory")
        (lost,) = wait_for(right, PeerLost)
        assert (lost.peer, str(lost.error)) == ("left", "left got no answer: no memory")
        (seen,) = wait_for(left, PeerLost)
        assert seen.peer == "right"
        right.drop("left", "twice is nothing")


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0])
def test_a_transfer_between_machines_lasts_as_long_as_on_one_clock(
    ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FINDINGS B14: two clocks were subtracted."""
    boots = iter(("one", "other", "one", "other"))  # each side looks once per socket
    monkeypatch.setattr(link_setup, "boot_id", lambda: next(boots, "other still"))
    left = endpoint("left", "tcp", clock=lambda: monotonic_s() + ahead_s)
    right = endpoint("right", "tcp")
    try:
        left.connect("right", right.listen())
        wait_for(right, PeerJoined)
        for sender, receiver in ((left, right), (right, left)):
            clock = sender.clock  # type: ignore[attr-defined]
            head = header()
            start_s = monotonic_s()
            send(sender, receiver.name, [torch.ones(3)], _sent(head, clock()))
            packet = first_packet(receiver)
            ((sent_s, arrived_s),) = transfers([packet])
            took_s = monotonic_s() - start_s
            assert abs(arrived_s - sent_s) <= took_s + 5.0  # of a handshake, on a busy machine
            packet.release()
    finally:
        left.close()
        right.close()


def test_on_one_machine_clocks_are_not_compared() -> None:
    """FINDINGS B14."""
    with linked("tcp") as (left, right):
        send(left, "right", [torch.ones(3)], _sent(header(), 12.5))
        packet = first_packet(right)
        assert isinstance(packet, Packet)
        assert packet.sent_s == 12.5
        packet.release()


def _sent(head: Any, sent_s: float) -> Any:
    return msgspec.structs.replace(head, sent_s=sent_s)
