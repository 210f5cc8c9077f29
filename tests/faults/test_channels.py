"""Links when this process lacks memory or descriptors, and when clocks differ."""

import errno
import os
from typing import Any

import msgspec
import pytest
import torch

from actors.channels import link_setup, local_process
from actors.channels.base import Packet, PeerJoined, PeerLost, TensorSpec, transfers
from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from tests.support.channels_support import (
    endpoint,
    first_packet,
    header,
    linked,
    nothing_leaks,  # noqa: F401
    send,
    wait_for,
)

BIG = [TensorSpec("float32", (4 << 20,))]  # more than the first segment


def fail(*_: object, **__: object) -> Any:
    raise MemoryError("no room")


def no_descriptors(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("backend", "side", "attribute", "message"),
    [
        ("tcp", "right", "_pool.acquire", "cannot receive from left: MemoryError: no room"),
        ("shm", "right", "_map", "cannot receive from left: MemoryError"),
        ("tcp", "left", "_send_some", "cannot send to right: MemoryError"),
    ],
)
def test_lack_of_memory_loses_peer_by_name(
    monkeypatch: pytest.MonkeyPatch, backend: str, side: str, attribute: str, message: str
) -> None:
    with linked(backend) as (left, right):
        end, peer = (left, "right") if side == "left" else (right, "left")
        target: Any = end._links[peer]  # type: ignore[attr-defined]
        *path, name = attribute.split(".")
        for part in path:
            target = getattr(target, part)
        monkeypatch.setattr(target, name, fail)
        send(left, "right", [torch.ones(1 << 20)], header())
        (lost,) = wait_for(end, PeerLost)
        assert lost.peer == peer
        assert message in str(lost.error)


@pytest.mark.parametrize("what", ["contracts.machine._meminfo", "os.memfd_create", "mmap.mmap"])
def test_lack_of_descriptors_fails_the_payload_and_keeps_the_link(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked("shm") as (left, right):
        with monkeypatch.context() as patch:
            patch.setattr(what, no_descriptors)
            with pytest.raises(ChannelError, match=r"right|segment"):
                left.reserve("right", BIG)
        send(left, "right", [torch.ones(3)], header())
        first_packet(right).release()


def test_peer_state_is_known_without_free_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = local_process.LocalProcess(os.getpid())
    monkeypatch.setattr(os, "open", no_descriptors)
    monkeypatch.setattr("builtins.open", no_descriptors)
    assert watched.is_running
    watched.close()
    assert not watched.is_running


def test_peer_without_answer_is_dropped_by_name() -> None:
    with linked("tcp") as (left, right):
        right.drop("left", "left got no answer: no memory")
        (lost,) = wait_for(right, PeerLost)
        assert (lost.peer, str(lost.error)) == ("left", "left got no answer: no memory")
        (seen,) = wait_for(left, PeerLost)
        assert seen.peer == "right"
        right.drop("left", "twice is nothing")


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0])
def test_transfer_times_between_machines_use_one_clock(
    ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            transfer_s = monotonic_s() - start_s
            assert (
                abs(arrived_s - sent_s) <= transfer_s + 5.0
            )  # clock error of a handshake on a busy machine
            packet.release()
    finally:
        left.close()
        right.close()


def test_clocks_of_one_machine_are_not_compared() -> None:
    with linked("tcp") as (left, right):
        send(left, "right", [torch.ones(3)], _sent(header(), 12.5))
        packet = first_packet(right)
        assert isinstance(packet, Packet)
        assert packet.sent_s == 12.5
        packet.release()


def _sent(head: Any, sent_s: float) -> Any:
    return msgspec.structs.replace(head, sent_s=sent_s)
