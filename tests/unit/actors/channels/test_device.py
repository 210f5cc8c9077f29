"""Parts of the GPU backends that need no GPU: order of events, frames, flags, memory."""

import contextlib
import importlib
import itertools
import queue
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.channels import cuda, ipc, nccl
from actors.channels.base import Packet, PeerJoined, PeerLost, TensorSpec
from actors.channels.endpoint import Endpoint
from actors.channels.ipc import IpcEndpoint
from actors.channels.link import lay_out
from actors.channels.local_process import LocalProcess
from actors.channels.nccl import NcclEndpoint, open_lanes
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerDeadError, PeerError, PeerHungError
from contracts.requests import Priority
from tests.support.channels_support import (
    TOKEN,
    first_packet,
    header,
    joined,
    nothing_leaks,  # noqa: F401
    random_tensor,
    raw_bytes,
    send,
    wait_for,
)
from tests.support.cuda_model import FreeModel, Nccl, Runtime, Stream, installed
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def free_model() -> Iterator[FreeModel]:
    with installed():
        yield FreeModel()


def pair_of(kind: type[Endpoint]) -> AbstractContextManager[tuple[Endpoint, Endpoint]]:
    return joined(made(kind, "left"), made(kind, "right"))


def made(kind: type[Endpoint], name: str, epoch: int = 1) -> Endpoint:
    return kind(
        name=name,
        token=TOKEN,
        epoch=epoch,
        config=ChannelConfig(segment_bytes=64 << 10),
        clock=monotonic_s,
        device=torch.device("cpu"),
    )


@pytest.fixture
def ipc_pair() -> Iterator[tuple[Endpoint, Endpoint]]:
    with pair_of(IpcEndpoint) as pair:
        yield pair


@pytest.fixture(params=[bytes, tuple])
def fake_nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Nccl:
    fake = Nccl(request.param)
    monkeypatch.setattr(nccl, "require_nccl", lambda: fake)
    return fake


PAYLOAD = [("bfloat16", (33, 8)), ("int32", (0, 4)), ("float32", (5,))]


def payload(seed: int) -> list[torch.Tensor]:
    return [random_tensor(dtype, shape, seed) for dtype, shape in PAYLOAD]


@pytest.mark.parametrize("is_one_gpu", [True, False])
def test_ipc_packets_cross_in_memory_of_one_gpu_or_by_copies(
    ipc_pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch, is_one_gpu: bool
) -> None:
    gpus = itertools.count()
    monkeypatch.setattr(ipc, "device_identity", lambda device: str(is_one_gpu or next(gpus)))
    left, right = ipc_pair
    for number in range(50):
        sent = payload(number)
        send(left, "right", sent, header(number))
        packet = first_packet(right)
        assert [raw_bytes(t) for t in packet.tensors] == [raw_bytes(t) for t in sent]
        packet.release()
    assert left.bytes_moved() == (right.bytes_moved()[1], 0)


def test_copy_from_a_process_that_is_ending_is_no_packet(
    ipc_pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = itertools.count()
    monkeypatch.setattr(ipc, "device_identity", lambda device: str(next(gpus)))
    left, right = ipc_pair
    send(left, "right", payload(0), header())
    first_packet(right).release()
    monkeypatch.setattr(LocalProcess, "is_ending", True)
    send(left, "right", payload(1), header(1))
    assert isinstance(wait_for(right, PeerLost)[0].error, PeerDeadError)


def test_process_is_ending_from_its_exit_until_it_is_reaped() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = LocalProcess(child.pid)
    assert not process.is_ending
    child.kill()
    wait_until(lambda: process.is_ending, "no exit", 10.0, 0.001)
    child.wait()
    assert process.is_ending
    process.close()


def test_nccl_packets_cross_in_exact_sizes(fake_nccl: Nccl) -> None:
    with pair_of(NcclEndpoint) as (left, right):
        for number in range(10):
            for source, target in ((left, right), (right, left)):
                sent = payload(number)
                send(source, target.name, sent, header(number))
                (packet,) = poll_both(target, source)
                assert [raw_bytes(t) for t in packet.tensors] == [raw_bytes(t) for t in sent]
                packet.release()
        assert left.bytes_moved() == right.bytes_moved()
    assert fake_nccl.aborts == 8


def poll_both(target: Endpoint, source: Endpoint, count: int = 1) -> list[Packet]:
    """The next packets of `target`. The sender's loop runs too."""
    found: list[Any] = []

    def is_complete() -> bool:
        assert not source.poll(0)
        found.extend(target.poll(0))
        return len(found) == count

    wait_until(is_complete, "no packet", 10.0, 0.001)
    assert all(isinstance(packet, Packet) for packet in found)
    return found


def test_packet_leaves_once_filled_and_waits_for_no_other_class(
    fake_nccl: Nccl, free_model: FreeModel
) -> None:
    with pair_of(NcclEndpoint) as (left, right):
        compute = free_model.host.current
        free_model.held = True
        free_model.host.launch("attention", 1.0)
        for number in range(2):
            send(left, "right", payload(number), header(number, priority=Priority.BE))
        free_model.host.current = Stream()
        send(left, "right", payload(2), header(2))
        free_model.held = False
        (packet,) = poll_both(right, left)
        assert packet.header.batch == 2
        packet.release()
        assert not left.poll(0)
        assert not right.poll(0.05)
        free_model.host.current = compute
        free_model.end_held()
        for number, packet in enumerate(poll_both(right, left, 2)):
            sent = [raw_bytes(t) for t in payload(number)]
            assert [raw_bytes(t) for t in packet.tensors] == sent
            packet.release()
        link: Any = right._links["left"]
        assert not link.needs_polling


def test_half_sent_payload_of_lost_peer_is_no_packet(
    fake_nccl: Nccl, free_model: FreeModel
) -> None:
    """`abort` completes the transfer as if all of it had arrived."""
    with pair_of(NcclEndpoint) as (left, right):
        free_model.host.current = Stream()
        send(left, "right", payload(0), header(0))
        free_model.held = True  # the transfer
        assert not left.poll(0)
        link: Any = right._links["left"]
        wait_until(lambda: not right.poll(0) and link.needs_polling, "no header", 10.0, 0.002)
        assert not link.has_progress
        left.close()
        free_model.held = False
        wait_for(right, PeerLost)
        assert not right.poll(0.01)


def test_replacement_rank_creates_its_own_communicators(fake_nccl: Nccl) -> None:
    """Communicators between the remaining ranks stay."""
    left, right = made(NcclEndpoint, "left"), made(NcclEndpoint, "right")
    other, again = made(NcclEndpoint, "other"), made(NcclEndpoint, "left", epoch=2)
    address = right.listen()
    with contextlib.ExitStack() as stack:
        for end in (right, left, other, again):
            stack.callback(end.close)
        left.connect("right", address)
        wait_for(right, PeerJoined)
        other.connect("right", address)
        wait_for(right, PeerJoined)
        first = set(fake_nccl.ids)
        left.close()
        wait_for(right, PeerLost)
        gone = fake_nccl.aborts
        again.connect("right", address)
        wait_for(right, PeerJoined)
        assert len(set(fake_nccl.ids) - first) == 4
        for number, source in enumerate((again, other)):
            sent = payload(number)
            send(source, "right", sent, header(number, epoch=2))
            packet = first_packet(right)
            assert packet.peer == source.name
            assert [raw_bytes(t) for t in packet.tensors] == [raw_bytes(t) for t in sent]
            packet.release()
        assert fake_nccl.aborts == gone == 8, "of the lost one, on both sides"


def test_nccl_failure_on_the_device_loses_the_peer(fake_nccl: Nccl) -> None:
    with pair_of(NcclEndpoint) as (left, _):
        Nccl.broken = True
        left._maintained_s = float("-inf")  # type: ignore[attr-defined]
        (lost,) = left.poll(0)
        assert isinstance(lost, PeerLost)
        assert "unhandled system error" in str(lost.error)
        assert lost.peer == "right"


def test_communicator_timeout_names_the_peer() -> None:
    def fail() -> Any:
        raise RuntimeError("no route")

    with pytest.raises(ChannelError, match="expert-1: no NCCL communicator: no route"):
        open_lanes(fail, "expert-1", 5.0)
    gate: queue.Queue[Any] = queue.Queue()
    with pytest.raises(PeerHungError, match=r"expert-1: no NCCL communicator within 0\.05 s"):
        open_lanes(gate.get, "expert-1", 0.05)
    gate.put(None)


def test_missing_cupy_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", without)
    for require in (cuda.require_nccl, lambda: cuda.require_cupy("ipc")):
        with pytest.raises(ChannelError, match=r"pip install -e '\.\[cuda1[23]\]'"):
            require()


@pytest.mark.parametrize(
    ("broken", "what"), [("is_available", "cupy finds none"), ("available", "the NCCL library")]
)
def test_an_unfit_machine_is_named(broken: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "cupy": SimpleNamespace(is_available=lambda: broken != "is_available"),
        "cupy.cuda.nccl": SimpleNamespace(available=broken != "available"),
    }
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    with pytest.raises(ChannelError, match=what):
        cuda.require_nccl()
    modules["cupy.cuda.nccl"].available = True
    if broken == "available":
        assert cuda.require_nccl() is modules["cupy.cuda.nccl"]


def test_a_device_is_known_by_its_index_and_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert cuda.with_device_index(torch.device("cuda")) == torch.device("cuda", 3)
    assert cuda.device_identity(torch.device("cuda", 3)) == "GPU-1"


def test_work_that_does_not_end_is_an_error(free_model: FreeModel) -> None:
    stream: Any = Stream()
    free_model.held = True
    free_model.host.current = stream
    free_model.host.launch("copy", 1.0)
    with pytest.raises(ChannelError, match=r"a layer: the GPU has not completed it in 0\.01 s"):
        cuda.wait_for_stream(stream, 0.01, "a layer")


def refuse(*_: object) -> Any:
    raise RuntimeError("out of memory")


def test_full_device_memory_fails_the_payload(
    ipc_pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, _ = ipc_pair
    monkeypatch.setattr(Runtime, "malloc", refuse)
    with pytest.raises(ChannelError, match=r"no device memory for .*: out of memory"):
        send(left, "right", payload(0), header())
    cpu, stream = torch.device("cpu"), cuda.new_stream(torch.device("cpu"))
    buffers = cuda.DeviceBuffers(4096, cpu, stream)
    monkeypatch.setattr(cuda, "empty_bytes", refuse)
    parts = [TensorSpec("uint8", (8,))]
    with pytest.raises(ChannelError, match="no device memory"):
        buffers.allocate(parts, lay_out(parts))


def test_memory_that_torch_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "as_tensor", lambda raw, device: torch.zeros(8))
    with pytest.raises(ChannelError, match="torch copied device memory"):
        ipc.device_bytes(64, 8, lambda pointer: None)


@pytest.mark.parametrize("what", ["cannot open GPU memory of left", "sent an invalid segment"])
def test_memory_that_cannot_be_opened_loses_the_peer(
    ipc_pair: tuple[Endpoint, Endpoint], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = ipc_pair
    if what.startswith("cannot"):
        monkeypatch.setattr(Runtime, "ipcOpenMemHandle", refuse)
    else:
        monkeypatch.setattr(ipc, "check_memfd", lambda fd, size: False)
    send(left, "right", payload(0), header())
    assert what in str(wait_for(right, PeerLost)[0].error)


def test_false_messages_of_a_peer_are_errors(fake_nccl: Nccl) -> None:
    sockets: Any = SimpleNamespace(offer=b"\xff", peer="left")
    alone = made(NcclEndpoint, "alone")
    with contextlib.closing(alone), pytest.raises(ChannelError, match="left sent no NCCL ids"):
        alone._join(sockets)
    with pair_of(NcclEndpoint) as (_, right):
        link: Any = right._links["left"]
        with pytest.raises(PeerError, match="posted a receive of no payload"):
            link._handle(nccl._Posted(Priority.LS))
