"""NCCL from a GPU to itself, and CUDA IPC between two processes on one GPU."""

import pytest
import torch

from actors.channels import ipc
from actors.channels.base import PeerLost, TensorSpec
from actors.channels.cuda import ReadyQueue, recorded, require_cupy, require_nccl
from contracts.errors import ChannelError, PeerDeadError
from contracts.requests import Priority
from tests.support.channels_support import (
    first_packet,
    header,
    random_tensor,
    raw_bytes,
    send,
    wait_for,
    with_peer,
)
from tests.support.waiting import wait_until


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


def send_to_itself(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
    """NCCL refuses two ranks on one GPU, so the one rank is both ends, within one group."""
    nccl = require_nccl()
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    nccl.groupStart()
    for call, tensors in ((communicator.send, sent), (communicator.recv, received)):
        for tensor in tensors:
            if tensor.numel():
                call(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, 0, stream.cuda_stream)
    nccl.groupEnd()
    recorded(stream).synchronize()  # type: ignore[no-untyped-call]
    communicator.abort()


@needs_nccl
def test_one_gpu_sends_to_itself_in_exact_sizes() -> None:
    shapes = [("bfloat16", (513, 64)), ("int32", (513, 4)), ("float32", (0, 7)), ("uint8", (1,))]
    sent = [random_tensor(dtype, shape, n).cuda() for n, (dtype, shape) in enumerate(shapes)]
    received = [torch.empty_like(tensor) for tensor in sent]
    torch.cuda.synchronize()
    send_to_itself(sent, received)
    for a, b in zip(sent, received, strict=True):
        assert raw_bytes(a.cpu()) == raw_bytes(b.cpu())


@needs_nccl
def test_a_payload_is_ready_once_the_work_that_fills_it_has_completed() -> None:
    source, target = torch.zeros(1 << 22, device="cuda"), torch.zeros(1 << 22, device="cuda")
    ready: ReadyQueue[torch.Tensor] = ReadyQueue(source.device)
    work = torch.rand(4096, 4096, device="cuda")
    for _ in range(50):
        work = (work @ work).clamp(0, 1)
    source.copy_(work.flatten()[: 1 << 22]).add_(1.0)
    ready.add(Priority.LS, source)
    assert not list(ready.take(Priority.LS)), "the products are still running"
    wait_until(lambda: ready.has_ready, "no event", 10.0, 0.001)
    send_to_itself(list(ready.take(Priority.LS)), [target])
    assert torch.equal(source, target)
    assert float(target.min()) >= 1.0


@needs_ipc
def test_copies_of_a_copy_engine_echo_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path between two GPUs, on one: each process takes the other's memory for a peer GPU's."""
    monkeypatch.setattr(ipc, "device_identity", lambda device: "another GPU")
    with with_peer("ipc", "echo") as (main, _):
        for number in range(20):
            sent = [random_tensor("bfloat16", (1 + 100 * number, 512), number)]
            send(main, "peer", sent, header(number))
            packet = first_packet(main)
            assert [raw_bytes(t.cpu()) for t in packet.tensors] == [raw_bytes(t) for t in sent]
            packet.release()


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
