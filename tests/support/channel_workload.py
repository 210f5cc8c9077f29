"""Attention and expert ranks that exchange packets on the model of the CUDA runtime."""

from __future__ import annotations

import ctypes
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from actors.channels import nccl
from actors.channels.base import Header, Packet, PacketKind, TensorSpec
from actors.channels.link import LinkSockets
from contracts.config import ChannelConfig
from contracts.plan import Order
from contracts.requests import Priority
from contracts.traces import TRANSFERS
from planner.schedule.schedule import GroupRun, MicroBatchTimes, Schedule, replay
from tests.support.cuda_model import CudaModel, Host, ModelError, Nccl, Socket, model, range_of
from tests.support.spans import length, union

CPU = torch.device("cpu")


class Workload(NamedTuple):
    """sync: chance that a process waits for its device at a step, as a lazy load does.
    two_classes: every other micro-batch is best-effort. empty: chance of a packet without bytes.
    shared_us: of the shared expert, which an attention rank computes while the others do theirs.
    """

    layers: int = 2
    micro_batches: int = 2
    groups: int = 1
    attention_ranks: int = 1
    expert_ranks: int = 1
    attention_us: float = 300.0
    shared_us: float = 0.0
    expert_us: float = 200.0
    payload_bytes: int = 4000
    sync: float = 0.0
    two_classes: bool = False
    empty: float = 0.0
    segment_bytes: int = 32 << 10


class _Task(NamedTuple):
    layer: int
    micro_batch: int


def priority_of(work: Workload, micro_batch: int) -> Priority:
    return Priority.BE if work.two_classes and micro_batch % 2 else Priority.LS


def _mark(header: Header, source: int) -> int:
    numbers = (header.layer, header.micro_batch, header.token_group, int(header.kind), source)
    return 1 + hash(numbers) % 250


def _fills(tensors: list[torch.Tensor], mark: int) -> Any:
    places = [range_of(tensor) for tensor in tensors]
    return lambda: [ctypes.memset(pointer, mark, size) for pointer, size in places if size]


def _reads(packet: Packet, source: int) -> Any:
    mark, places = _mark(packet.header, source), [range_of(t) for t in packet.tensors]

    def check() -> None:
        for pointer, size in places:
            if size and {
                *ctypes.string_at(pointer, 1),
                *ctypes.string_at(pointer + size - 1, 1),
            } != {mark}:
                raise ModelError("corrupt", f"{packet.header} has other bytes")

    return check


def parts_of(size: int) -> list[TensorSpec]:
    return [TensorSpec("uint8", (size,)), TensorSpec("int32", (size // 16, 2))]


def is_sending(link: Any) -> bool:
    lanes = (*link._lanes.outgoing, *link._lanes.incoming) if hasattr(link, "_lanes") else ()
    return link.needs_polling or any(lane.waiting or lane.under_way for lane in lanes)


def bytes_in_use(link: Any) -> int:
    used = 0
    for allocator in (link._buffers.segments, getattr(link, "_segments", link._buffers.segments)):
        for segment in allocator._segments.values():
            segment.reclaim()
            used += segment.allocator.used
    return used


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class _Rank:
    """Common parts of both kinds: links, sending, waiting."""

    def __init__(self, world: World, host: Host, peers: list[str]) -> None:
        self.world, self.host, self.work = world, host, world.work
        self.links: dict[str, Any] = {peer: world.join(host, peer) for peer in peers}

    def parts(self) -> list[TensorSpec]:
        is_empty = self.work.empty and self.host.model.dice.random() < self.work.empty
        return parts_of(0 if is_empty else self.work.payload_bytes)

    def step(self) -> None:
        """Let time pass, and sometimes wait for the device."""
        self._synchronize()
        self.host.pause(self.host.model.dice.uniform(*self.host.model.host_us))

    def _synchronize(self) -> None:
        if self.work.sync and self.host.model.dice.random() < self.work.sync:
            self.host.synchronize()

    def packets(self) -> Iterator[Packet]:
        """Packets of one poll of all links; waits for a change if there are none."""
        found: list[Packet] = []
        for link in self.links.values():
            found += link.receive()
        self._synchronize()
        if not found:
            self._idle()
        yield from found

    def _idle(self) -> None:
        """Wait as `Endpoint.poll` does."""
        pairs = [(link._frames.sock, link) for link in self.links.values()]
        self.host.block(
            lambda: any(
                sock.has_bytes or (link.needs_polling and link.has_progress) for sock, link in pairs
            ),
            "a message or an event",
            [self.host.device, *(sock for sock, _ in pairs)],
        )

    def finish(self) -> None:
        """Wait until all is sent and all memory is free."""
        while True:
            for link in self.links.values():
                if link.receive():
                    raise ModelError("corrupt", f"{self.host.name} got a packet too many")
            if not any(map(is_sending, self.links.values())):
                break
            self._idle()
        self.host.synchronize()  # the last packets' readers
        for link in self.links.values():
            link.maintain(0.0)


def attend(world: World, host: Host) -> None:
    """Program of an attention rank: its micro-batches through all layers."""
    work, me = world.work, _Rank(world, host, world.experts)
    own = world.attention.index(host.name)
    ready = [_Task(0, j) for j in range(work.micro_batches)]
    replies: defaultdict[_Task, list[Packet]] = defaultdict(list)
    left = work.layers * work.micro_batches
    while left:
        if not ready:
            for packet in me.packets():
                task = _Task(packet.header.layer, packet.header.micro_batch)
                replies[task].append(packet)
                if len(replies[task]) == work.groups * work.expert_ranks:
                    left -= 1
                    if task.layer + 1 < work.layers:
                        ready.append(_Task(task.layer + 1, task.micro_batch))
                    else:
                        for each in replies.pop(task):
                            host.launch("combine", 1.0, reads=[*map(range_of, each.tensors)])
                            each.release()
            continue
        ready.sort()
        task = ready.pop(0)
        _attention(me, own, task, replies.pop(_Task(task.layer - 1, task.micro_batch), []))
    me.finish()


def _attention(me: _Rank, own: int, task: _Task, previous: list[Packet]) -> None:
    host, work = me.host, me.work
    for number, group in enumerate(range(work.groups)):
        outgoing = []
        header = Header(
            PacketKind.A2E, 1, 0, task.layer, task.micro_batch, group,
            priority_of(work, task.micro_batch),
        )  # fmt: skip
        for link in me.links.values():
            outgoing.append((link, link.reserve(me.parts())))
        reads = [range_of(t) for packet in previous for t in packet.tensors]
        checks = [_reads(packet, me.world.experts.index(packet.peer)) for packet in previous]
        fills = [_fills(reserved.tensors, _mark(header, own)) for _, reserved in outgoing]
        host.launch(
            "attention",
            work.attention_us if number == 0 else 1.0,
            reads=reads,
            writes=[range_of(t) for _, reserved in outgoing for t in reserved.tensors],
            ends=partial(_call_all, (*checks, *fills)),
        )
        for packet in previous:
            packet.release()
        previous = []
        host.model.dice.shuffle(outgoing)
        for link, reserved in outgoing:
            link.commit(reserved, header)
        me.step()
    if work.shared_us:
        host.launch("shared", work.shared_us)


def serve(world: World, host: Host) -> None:
    """Program of an expert rank: one answer to each packet."""
    work, me = world.work, _Rank(world, host, world.attention)
    own = world.experts.index(host.name)
    left = work.layers * work.micro_batches * work.groups * work.attention_ranks
    while left:
        for packet in me.packets():
            left -= 1
            link = me.links[packet.peer]
            reserved = link.reserve(me.parts())
            header = Header(
                PacketKind.E2A, 1, 0, packet.header.layer, packet.header.micro_batch,
                packet.header.token_group, packet.header.priority,
            )  # fmt: skip
            check = _reads(packet, world.attention.index(packet.peer))
            fill = _fills(reserved.tensors, _mark(header, own))
            host.launch(
                "expert",
                work.expert_us,
                reads=[range_of(t) for t in packet.tensors],
                writes=[range_of(t) for t in reserved.tensors],
                ends=partial(_call_all, (check, fill)),
            )
            packet.release()
            link.commit(reserved, header)
            me.step()
    me.finish()


class World:
    """A run: ranks, their links and the module whose code is under test."""

    def __init__(self, work: Workload, module: ModuleType = nccl) -> None:
        self.work, self.module = work, module
        self.attention = [f"attention-{n}" for n in range(work.attention_ranks)]
        self.experts = [f"expert-{n}" for n in range(work.expert_ranks)]
        self.links: dict[tuple[str, str], Any] = {}
        self._streams: dict[str, Any] = {}
        self._sockets: dict[tuple[str, str], Socket] = {}

    def run(self, seed: int, **machine: Any) -> CudaModel:
        """Raises ModelError."""
        run = CudaModel(seed, **machine)
        programs = {name: lambda host: attend(self, host) for name in self.attention}
        programs |= {name: lambda host: serve(self, host) for name in self.experts}
        run.run(programs)
        for (name, peer), link in self.links.items():
            if bytes_in_use(link):
                raise ModelError("leak", f"memory of {name} for {peer} stays in use")
        return run

    def join(self, host: Host, peer: str) -> Any:
        self.links[host.name, peer] = link = self._link(host, peer)
        return link

    def _link(self, host: Host, peer: str) -> Any:
        sockets = self.link_sockets(host, peer)
        streams = self._streams.setdefault(host.name, self.module.TransferStreams(CPU))
        config = ChannelConfig(segment_bytes=self.work.segment_bytes)
        clock = lambda: 1e-6 * model().now_us  # noqa: E731
        if self.module.__name__.endswith("ipc"):
            return self.module.IpcLink(sockets, config, clock, CPU, streams)
        pair = min(host.name, peer), max(host.name, peer)
        offer = self.module._Offer(((pair, 0), (pair, 1)), ((pair, 2), (pair, 3)))
        lanes = self.module.Lanes(Nccl(), offer, streams, initiator=sockets.initiator, device=CPU)
        return self.module.NcclLink(
            sockets, config, clock, lanes, streams, CPU, leads=host.name < peer
        )

    def link_sockets(self, host: Host, peer: str) -> LinkSockets:
        key = (host.name, peer)
        if key not in self._sockets:
            family = socket.AF_UNIX if self.module.__name__.endswith("ipc") else socket.AF_INET
            self._sockets[key], self._sockets[peer, host.name] = Socket.pair(family)
        return LinkSockets(
            peer=peer,
            data=self._sockets[key],  # type: ignore[arg-type]
            heartbeat=Socket.pair()[0],  # type: ignore[arg-type]
            initiator=host.name < peer,
            offer=b"",
        )


class Overlap(NamedTuple):
    """Shares of the transfers' time in which a rank computes: FinDEP's overlapped communication."""

    model: float
    plan: float


PIPELINES = {
    "1 micro-batch, shared expert": Workload(
        6, 1, attention_us=600.0, shared_us=1500.0, expert_us=800.0, payload_bytes=20_000
    ),
    "2 micro-batches, shared expert": Workload(
        6, 2, attention_us=300.0, shared_us=900.0, expert_us=500.0, payload_bytes=20_000
    ),
    "4 micro-batches": Workload(
        6, 4, attention_us=1000.0, expert_us=900.0, payload_bytes=40_000
    ),
}  # fmt: skip
PROMPT = {"message_us": (5.0, 20.0), "host_us": (1.0, 5.0)}  # one node, processes that poll


def overlap(module: ModuleType, work: Workload, seed: int = 0) -> Overlap:
    """Compare a run with the planner's replay of the same stage times."""
    run = World(work, module).run(seed, **PROMPT)
    busy = [(start, end) for host in run.hosts.values() for _, start, end in host.device.busy]
    moved_ms = 1e-3 * run.transfer_us(sum(part.num_bytes for part in parts_of(work.payload_bytes)))
    group = GroupRun(1, moved_ms, work.expert_us / 1e3, moved_ms)
    times = MicroBatchTimes(work.attention_us / 1e3, work.shared_us / 1e3, (group,))
    schedule = Schedule((times,) * work.micro_batches, work.layers, Order.ASAS, 0)
    spans = replay(schedule).spans
    return Overlap(
        _overlapped([(start, end) for _, start, end in run.received], busy),
        _overlapped(
            [(s.start_s, s.end_s) for s in spans if s.stage in TRANSFERS],
            [(s.start_s, s.end_s) for s in spans if s.stage not in TRANSFERS],
        ),
    )


def _overlapped(transfers: list[tuple[float, float]], busy: list[tuple[float, float]]) -> float:
    exposed = length(union([*transfers, *busy])) - length(union(busy))
    return 1.0 - exposed / length(union(transfers))
