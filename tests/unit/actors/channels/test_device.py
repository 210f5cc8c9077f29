"""Parts of the GPU backends that need no GPU: order of events, frames, flags, memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import queue
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
import torch

from actors.channels import cuda, ipc, nccl
from actors.channels.base import Packet, PeerJoined, PeerLost
from actors.channels.endpoint import Endpoint
from actors.channels.ipc import IpcEndpoint
from actors.channels.link import Views
from actors.channels.nccl import NcclEndpoint, UniqueId, open_lanes
from actors.channels.segments import FLAG_BYTES
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerHungError
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
from tests.support.waiting import wait_until


class FakeStream:
    cuda_stream = 7
    device = torch.device("cpu")

    def __init__(self, *_: object, priority: int = 0) -> None:
        self.priority = priority
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: object) -> None:
        self.waited.append(stream)


class FakeEvent:
    made: ClassVar[list[FakeEvent]] = []
    reached = True  # whether events are reached at once

    def __init__(self, interprocess: bool = False) -> None:
        self.number = len(self.made)
        self.interprocess = interprocess
        self.recorded = 0
        self.made.append(self)

    def record(self, stream: object) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return FakeEvent.reached

    def synchronize(self) -> None: ...

    def ipc_handle(self) -> bytes:
        assert self.recorded, "a handle of an event that was never recorded"
        return self.number.to_bytes(4, "little")

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> FakeEvent:
        return cls.made[int.from_bytes(handle, "little")]


STREAM = FakeStream()


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: STREAM)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    yield
    FakeEvent.made.clear()
    FakeEvent.reached = True
    STREAM.waited.clear()


class FakeRuntime:
    """Device memory as blocks of this process."""

    def __init__(self) -> None:
        self.blocks: dict[int, torch.Tensor] = {}

    def malloc(self, num_bytes: int) -> int:
        block = torch.zeros(num_bytes, dtype=torch.uint8)
        self.blocks[block.data_ptr()] = block
        return block.data_ptr()

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        return pointer.to_bytes(8, "little")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def free(self, pointer: int) -> None: ...

    def ipcCloseMemHandle(self, pointer: int) -> None: ...


class FakeNcclError(RuntimeError):
    pass


class FakeNccl:
    """Communicators whose sends wait in queues."""

    NCCL_UINT8 = 1

    def __init__(self, id_type: type) -> None:
        self.id_type = id_type
        self.queues: dict[UniqueId, queue.Queue[bytes]] = {}
        self.aborted = 0
        self.broken = False

    def get_unique_id(self) -> UniqueId:
        id_: UniqueId = self.id_type([len(self.queues) + 100] * 128)
        self.queues[id_] = queue.Queue()
        return id_

    def groupStart(self) -> None: ...

    def groupEnd(self) -> None: ...

    def NcclCommunicator(self, ranks: int, id_: UniqueId, rank: int) -> FakeCommunicator:
        assert isinstance(id_, self.id_type)
        return FakeCommunicator(self, self.queues[id_])


class FakeCommunicator:
    def __init__(self, nccl: FakeNccl, bytes_: queue.Queue[bytes]) -> None:
        self._nccl = nccl
        self._bytes = bytes_

    def send(self, pointer: int, count: int, dtype: int, rank: int, stream: int) -> None:
        self._bytes.put(ctypes.string_at(pointer, count))

    def recv(self, pointer: int, count: int, dtype: int, rank: int, stream: int) -> None:
        data = self._bytes.get(timeout=10)
        assert len(data) == count, "sizes differ on the two sides"
        ctypes.memmove(pointer, data, count)

    def check_async_error(self) -> None:
        if self._nccl.broken:
            raise FakeNcclError("unhandled system error")

    def abort(self) -> None:
        self._nccl.aborted += 1


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
def ipc_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Endpoint, Endpoint]]:
    runtime = FakeRuntime()

    class HostBlock:
        def __init__(self, fd: int, pointer: int, num_bytes: int, free: object) -> None:
            self.flags = mmap.mmap(fd, FLAG_BYTES)
            self.views = Views(runtime.blocks[pointer])

        def close(self) -> None: ...

    class FakeCupy:
        class cuda:  # noqa: N801
            pass

    FakeCupy.cuda.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setattr(ipc, "require_cupy", lambda backend: FakeCupy)
    monkeypatch.setattr(ipc, "DeviceMemory", HostBlock)
    with pair_of(IpcEndpoint) as pair:
        yield pair


@pytest.fixture(params=[bytes, tuple])
def fake_nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl(request.param)
    monkeypatch.setattr(nccl, "require_nccl", lambda: fake)
    return fake


PAYLOAD = [("bfloat16", (33, 8)), ("int32", (0, 4)), ("float32", (5,))]


def payload(seed: int) -> list[torch.Tensor]:
    return [random_tensor(dtype, shape, seed) for dtype, shape in PAYLOAD]


def test_ipc_packets_cross_in_shared_device_memory(ipc_pair: tuple[Endpoint, Endpoint]) -> None:
    left, right = ipc_pair
    for number in range(50):
        sent = payload(number)
        send(left, "right", sent, header(number))
        packet = first_packet(right)
        assert [raw_bytes(t) for t in packet.tensors] == [raw_bytes(t) for t in sent]
        packet.release()
    events = [event for event in FakeEvent.made if event.interprocess]
    assert len(events) == 1  # one slot, used again
    assert events[0].recorded == 50
    assert STREAM.waited == events * 50


def test_ipc_memory_is_not_reused_before_the_readers_event(
    ipc_pair: tuple[Endpoint, Endpoint],
) -> None:
    left, right = ipc_pair
    FakeEvent.reached = False
    seen = []
    for number in range(3):
        send(left, "right", [torch.full((100,), float(number))], header(number))
        packet = first_packet(right)
        seen.append(packet.tensors[0])
        packet.release()
    assert [float(t[0]) for t in seen] == [0.0, 1.0, 2.0]
    assert len({t.data_ptr() for t in seen}) == 3
    FakeEvent.reached = True
    send(right, "left", [torch.ones(1)], header())  # any call of the receiver sets the flags
    first_packet(left).release()
    send(left, "right", [torch.full((100,), 9.0)], header(9))
    packet = first_packet(right)
    assert packet.tensors[0].data_ptr() == seen[0].data_ptr()
    packet.release()


def test_nccl_packets_cross_in_exact_sizes(fake_nccl: FakeNccl) -> None:
    with pair_of(NcclEndpoint) as (left, right):
        for number in range(10):
            for source, target in ((left, right), (right, left)):
                sent = payload(number)
                send(source, target.name, sent, header(number))
                packet = first_packet(target)
                assert [raw_bytes(t) for t in packet.tensors] == [raw_bytes(t) for t in sent]
                packet.release()
        assert left.bytes_moved() == right.bytes_moved()
    assert fake_nccl.aborted == 8


def test_packet_is_delivered_when_complete_and_waits_for_no_other_class(
    fake_nccl: FakeNccl,
) -> None:
    with pair_of(NcclEndpoint) as (left, right):
        FakeEvent.reached = False
        for number in range(2):
            send(left, "right", payload(number), header(number, priority=Priority.BE))
        send(left, "right", payload(2), header(2))
        link: Any = right._links["left"]
        wait_until(
            lambda: not right.poll(0) and sum(map(len, link._receiving)) == 3,
            "no header",
            10.0,
            0.002,
        )
        assert not link.has_arrived
        assert not right.poll(0.01)
        FakeEvent.reached = True
        ls, *be = wait_for(right, Packet, 3)
        assert [packet.header.batch for packet in (ls, *be)] == [2, 0, 1]
        for packet in (ls, *be):
            sent = [raw_bytes(t) for t in payload(packet.header.batch)]
            assert [raw_bytes(t) for t in packet.tensors] == sent
            packet.release()
        assert not link.has_incoming


def test_half_sent_payload_of_lost_peer_is_no_packet(
    fake_nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`abort` completes the transfer as if all of it had arrived."""
    with pair_of(NcclEndpoint) as (left, right):
        FakeEvent.reached = False
        send(left, "right", payload(0), header(0))
        link: Any = right._links["left"]
        wait_until(lambda: not right.poll(0) and link.has_incoming, "no header", 10.0, 0.002)
        left.close()
        ends = lambda communicator: setattr(FakeEvent, "reached", True)  # noqa: E731
        monkeypatch.setattr(FakeCommunicator, "abort", ends)
        wait_for(right, PeerLost)
        assert FakeEvent.reached
        assert not right.poll(0.01)


def test_replacement_rank_creates_its_own_communicators(fake_nccl: FakeNccl) -> None:
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
        first = set(fake_nccl.queues)
        left.close()
        wait_for(right, PeerLost)
        gone = fake_nccl.aborted
        again.connect("right", address)
        wait_for(right, PeerJoined)
        assert len(set(fake_nccl.queues) - first) == 4
        for number, source in enumerate((again, other)):
            sent = payload(number)
            send(source, "right", sent, header(number, epoch=2))
            packet = first_packet(right)
            assert packet.peer == source.name
            assert [raw_bytes(t) for t in packet.tensors] == [raw_bytes(t) for t in sent]
            packet.release()
        assert fake_nccl.aborted == gone == 8, "of the lost one, on both sides"


def test_nccl_failure_on_the_device_loses_the_peer(fake_nccl: FakeNccl) -> None:
    with pair_of(NcclEndpoint) as (left, _):
        fake_nccl.broken = True
        left._maintained_s = float("-inf")  # type: ignore[attr-defined]
        (lost,) = left.poll(0)
        assert isinstance(lost, PeerLost)
        assert "unhandled system error" in str(lost.error)
        assert lost.peer == "right"


def test_communicator_timeout_names_the_peer() -> None:
    def fail() -> Any:
        raise FakeNcclError("no route")

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
        with pytest.raises(ChannelError, match=r"pip install -e '\.\[cuda\]'"):
            require()
