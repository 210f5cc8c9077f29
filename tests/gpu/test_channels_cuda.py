"""NCCL from a GPU to itself, and CUDA IPC between two processes on one GPU."""

from __future__ import annotations

import pytest
import torch

from actors.channels.base import PeerLost, TensorSpec
from actors.channels.cuda import require_cupy, require_nccl
from actors.channels.nccl import transfer
from contracts.errors import ChannelError, PeerDeadError
from tests.support.channels_support import (
    first_packet,
    header,
    random_tensor,
    raw_bytes,
    send,
    wait_for,
    with_peer,
)


def missing(what: object) -> str:
    """Why this machine cannot run a test; empty: it can."""
    try:
        require_nccl() if what == "nccl" else require_cupy("ipc")
    except ChannelError as error:
        return str(error)
    return ""


needs_nccl = pytest.mark.skipif(bool(missing("nccl")), reason=missing("nccl"))
needs_ipc = pytest.mark.skipif(bool(missing("ipc")), reason=missing("ipc"))
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forked_processes")]


@needs_nccl
def test_one_gpu_sends_to_itself_in_exact_sizes() -> None:
    """NCCL refuses two ranks on one GPU, so the one rank is both ends, within one group."""
    nccl = require_nccl()
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    shapes = [("bfloat16", (513, 64)), ("int32", (513, 4)), ("float32", (0, 7)), ("uint8", (1,))]
    sent = [random_tensor(dtype, shape, n).cuda() for n, (dtype, shape) in enumerate(shapes)]
    received = [torch.empty_like(tensor) for tensor in sent]
    calls = [(communicator.send, 0, tensor) for tensor in sent]
    calls += [(communicator.recv, 0, tensor) for tensor in received]
    done = transfer(nccl, stream, calls)
    torch.cuda.current_stream().wait_event(done)
    for a, b in zip(sent, received, strict=True):
        assert raw_bytes(a.cpu()) == raw_bytes(b.cpu())
    communicator.abort()


@needs_nccl
def test_a_send_waits_for_the_work_that_fills_its_tensor() -> None:
    nccl = require_nccl()
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    source, target = torch.zeros(1 << 22, device="cuda"), torch.zeros(1 << 22, device="cuda")
    work = torch.rand(4096, 4096, device="cuda")
    for _ in range(20):
        work = (work @ work).clamp(0, 1)
    source.copy_(work.flatten()[: 1 << 22]).add_(1.0)
    calls = [(communicator.send, 0, source), (communicator.recv, 0, target)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.current_stream().wait_event(transfer(nccl, stream, calls))
    assert torch.equal(source, target)
    assert float(target.min()) >= 1.0
    communicator.abort()


@needs_ipc
def test_another_process_on_this_gpu_echoes_packets_of_all_sizes() -> None:
    with with_peer("ipc", "echo") as (main, _):
        for number, rows in enumerate((1, 0, 17, 512, 5000)):
            sent = [
                random_tensor("bfloat16", (rows, 512), number),
                random_tensor("int32", (rows, 4), number),
            ]
            send(main, "peer", sent, header(number))
            packet = first_packet(main)
            assert all(tensor.is_cuda for tensor in packet.tensors)
            assert [raw_bytes(t.cpu()) for t in packet.tensors] == [raw_bytes(t) for t in sent]
            packet.release()


@needs_ipc
def test_a_payload_is_read_only_after_the_kernels_that_fill_it() -> None:
    with with_peer("ipc", "echo") as (main, _):
        for number in range(10):
            reservation = main.reserve("peer", [TensorSpec("float32", (1 << 20,))])
            work = torch.rand(2048, 2048, device="cuda")
            for _ in range(20):
                work = (work @ work).clamp(0, 1)
            reservation.tensors[0].copy_(work.flatten()[: 1 << 20] * 0 + number)
            main.commit(reservation, header(number))  # the kernels are still running
            packet = first_packet(main)
            assert bool((packet.tensors[0] == number).all())
            packet.release()


@needs_ipc
def test_memory_is_used_again_only_after_the_kernels_that_read_it() -> None:
    with with_peer("ipc", "echo", segment_bytes=8 << 20) as (main, _):
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        for number in range(200):
            send(main, "peer", [torch.full((1 << 20,), float(number))], header(number))
            packet = first_packet(main)
            total += packet.tensors[0].double().mean()
            packet.release()
        assert float(total) == sum(range(200))


@needs_ipc
def test_a_killed_peer_on_this_gpu_is_dead_by_name() -> None:
    with with_peer("ipc", "echo") as (main, peer):
        send(main, "peer", [torch.ones(1 << 20)], header())
        first_packet(main).release()
        peer.process.kill()
        lost = wait_for(main, PeerLost, deadline_s=2.0)[0]
        assert (lost.peer, type(lost.error)) == ("peer", PeerDeadError)
