"""Channels to another process that computes, is stopped, or is killed."""

import os
import signal
import tempfile
import time
from typing import Any

import pytest
import torch

from actors.channels.base import Packet, PeerLost, TensorSpec
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, PeerDeadError, PeerHungError
from tests.support.channels_support import (
    BACKENDS,
    first_packet,
    header,
    nothing_leaks,  # noqa: F401
    send,
    wait_for,
    with_peer,
)

pytestmark = pytest.mark.usefixtures("forked_processes")
# A peer is hung after 2 s of silence: after one timeout, or after four if it is known to run here.
TIMEOUTS_S = {"shm": 0.5, "tcp": 2.0}
ENOUGH_S = 2.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_saturated_directions_do_not_deadlock(backend: str) -> None:
    packets, elements = 40, 1 << 19  # 80 MiB each way before either side reads
    options = {"packets": packets, "elements": elements, "heartbeat_timeout_s": 20.0}
    with with_peer(backend, "flood", options=options, heartbeat_timeout_s=20.0) as (main, peer):
        for index in range(packets):
            reservation = main.reserve("peer", [TensorSpec("int32", (elements,))])
            reservation.tensors[0].fill_(index)
            main.commit(reservation, header(index))
        for packet in wait_for(main, Packet, packets, deadline_s=60.0):
            assert bool((packet.tensors[0] == packet.header.batch).all())
            packet.release()
        assert peer.line() == f"sound {packets}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_peer_is_dead_by_name(backend: str) -> None:
    with with_peer(backend, "hold", options={"elements": 1 << 20}) as (main, peer):
        send(main, "peer", [torch.ones(1 << 20)], header())
        packet = first_packet(main)
        assert peer.line() == "holding"
        peer.signal(signal.SIGKILL)
        lost = wait_for(main, PeerLost)[0]
        assert (lost.peer, type(lost.error), lost.error.peer) == ("peer", PeerDeadError, "peer")
        assert packet.tensors[0].numel() == 1 << 20
        packet.release()
        assert main.peers() == ()
        with pytest.raises(PeerDeadError, match="peer"):
            main.reserve("peer", [TensorSpec("int32", (1,))])


@pytest.mark.parametrize("payloads", [0, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_stopped_peer_is_hung_by_name(backend: str, payloads: int) -> None:
    with with_peer(backend, "hold", options={"elements": 4}) as (main, peer):
        peer.signal(signal.SIGSTOP)
        for number in range(payloads):
            send(main, "peer", [torch.ones(4 << 20)], header(number))
        lost = wait_for(main, PeerLost)[0]
        assert (lost.peer, type(lost.error), lost.error.peer) == ("peer", PeerHungError, "peer")
        assert main.poll(0) == []  # reported once
        with pytest.raises(PeerHungError):
            main.reserve("peer", [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_busy_receiver_reports_no_healthy_peer(backend: str) -> None:
    limits: dict[str, Any] = {
        "heartbeat_timeout_s": TIMEOUTS_S[backend],
        "heartbeat_interval_s": 0.1,
    }
    with with_peer(backend, "echo", **limits) as (main, _):
        end_s = monotonic_s() + ENOUGH_S
        matrix = torch.rand(400, 400)
        while monotonic_s() < end_s:
            matrix = torch.mm(matrix, matrix).clamp(0, 1)
        send(main, "peer", [torch.ones(4)], header(5))
        packet = first_packet(main)
        assert packet.header.batch == 5
        packet.release()


@pytest.mark.parametrize("backend", BACKENDS)
def test_resumed_process_reports_no_peer(backend: str) -> None:
    options = {"heartbeat_timeout_s": TIMEOUTS_S[backend], "heartbeat_interval_s": 0.1}
    with with_peer(backend, "echo", options=options, heartbeat_timeout_s=30.0) as (main, peer):
        peer.signal(signal.SIGSTOP)
        assert main.poll(ENOUGH_S) == []
        peer.signal(signal.SIGCONT)
        send(main, "peer", [torch.ones(4)], header(9))
        packet = first_packet(main)
        assert packet.header.batch == 9
        packet.release()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGKILL, PeerDeadError), (signal.SIGSTOP, PeerHungError)]
)
def test_peer_lost_during_payload_is_reported_by_name(
    number: signal.Signals, error: type[ChannelError]
) -> None:
    with with_peer("tcp", "half", options={"elements": 32 << 20}) as (main, peer):
        assert peer.line() == "half"
        peer.signal(number)
        lost = wait_for(main, PeerLost)[0]
        assert (lost.peer, type(lost.error)) == ("peer", error)


def test_peer_killed_while_receiving_is_dead_by_name() -> None:
    with with_peer("tcp", "echo", heartbeat_timeout_s=30.0) as (main, peer):
        peer.signal(signal.SIGSTOP)  # so that the payload certainly stays under way
        for _ in range(3):
            send(main, "peer", [torch.ones(8 << 20)], header())
        peer.signal(signal.SIGKILL)
        lost = wait_for(main, PeerLost)[0]
        assert (lost.peer, type(lost.error)) == ("peer", PeerDeadError)


def test_send_without_progress_at_the_deadline_is_a_hung_peer() -> None:
    with with_peer("tcp", "echo", heartbeat_timeout_s=30.0, connect_timeout_s=2.0) as (main, peer):
        peer.signal(signal.SIGSTOP)
        for _ in range(3):
            send(main, "peer", [torch.ones(8 << 20)], header())
        lost = wait_for(main, PeerLost, deadline_s=10.0)[0]
        assert isinstance(lost.error, PeerHungError)
        assert "has received nothing for 2 s" in str(lost.error)


def test_heartbeats_pass_while_a_large_payload_waits() -> None:
    with with_peer("tcp", "echo", heartbeat_timeout_s=2.0, heartbeat_interval_s=0.1) as (main, _):
        send(main, "peer", [torch.ones(64 << 20)], header())  # 256 MiB there and back
        time.sleep(ENOUGH_S)  # the answer fills the sockets
        packet = first_packet(main)
        assert packet.tensors[0].numel() == 64 << 20
        packet.release()


def test_killed_peer_leaves_nothing_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:  # ours alone; its name fits a socket's address
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with with_peer("shm", "echo") as (main, peer):
            send(main, "peer", [torch.ones(1 << 20)], header())
            first_packet(main).release()
            peer.signal(signal.SIGKILL)
            wait_for(main, PeerLost)
        assert os.listdir(folder) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - segments if "tandem" in name]
