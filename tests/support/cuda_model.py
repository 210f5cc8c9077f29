"""A model of the CUDA runtime and NCCL: real channel code runs on it, on a clock of events.

Every process (`Host`) has a device and runs its program on a greenlet; a seed decides which runs
until it waits. Streams are queues that share hardware queues. Kernels need SMs and
time. A NCCL call occupies SMs from the moment it starts, and ends when its counterpart on the other
device has started too. Copy engines need no SMs. Times are in microseconds.

A run fails with the name of a bug, whatever the timing of this run has been:
- race: two accesses to device memory, one of them a write, that no event, wait or message orders;
- deadlock: no process and no device can go on;
- mismatch: counterparts of NCCL that differ in size, direction or number, or a group left open;
- corrupt: a kernel that reads other bytes than those sent;
- spin: a NCCL call that waited for its counterpart for longer than `spin_limit_us`, or a host that
  looks at events without sleeping;
- leak: device memory of a link that stays in use.

All figures that come from it are simulated.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import heapq
import itertools
import os
import random
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from greenlet import getcurrent, greenlet

from actors.channels import cuda, ipc, nccl
from tests.support.waiting import wait_until

Range = tuple[int, int]  # address and bytes
Group = dict[Any, list[tuple[str, Range]]]


MOST_QUERIES = 1000  # of events by hosts, at one time


class ModelError(AssertionError):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        model().failure = model().failure or self  # whatever catches it


class Stopped(BaseException):
    """Unwinds the greenlet of a program that cannot go on."""


Stamp = tuple["Clock", int, "dict[Clock, int]"]
"""A point in the work of a clock's owner: its number, and the latest points of others before it."""


class Clock:
    """A vector clock of a host or stream. number: of its latest point."""

    __slots__ = ("_is_shared", "_known", "_latest", "number")

    def __init__(self) -> None:
        self.number = 0
        self._known: dict[Clock, int] = {}
        self._is_shared = False  # with a stamp, so that it has to be copied before a change
        self._latest: dict[Clock, dict[Clock, int]] = {}  # merged from each

    def stamp(self) -> Stamp:
        self._is_shared = True
        return self, self.number, self._known

    def tick(self) -> Stamp:
        self.number += 1
        self._is_shared = True
        return self, self.number, self._known

    def knows(self, by: Clock, number: int) -> bool:
        return (self.number if by is self else self._known.get(by, 0)) >= number

    def learn(self, stamp: Stamp) -> None:
        """Merge a stamp: who knows its number knows all of it."""
        by, number, others = stamp
        if by is self or self._known.get(by, 0) >= number:
            return
        if self._is_shared:
            self._known, self._is_shared = self._known.copy(), False
        known = self._known
        known[by] = number
        if self._latest.get(by) is not others:
            self._latest[by] = others
            for each, latest in others.items():
                if known.get(each, 0) < latest:
                    known[each] = latest


class Order(dict[Clock, Stamp]):
    """Stamps that a reader of an object is ordered after: the latest of each writer."""

    def add(self, stamp: Stamp) -> None:
        self[stamp[0]] = stamp

    def order(self, clock: Clock) -> None:
        for stamp in self.values():
            clock.learn(stamp)


@dataclass(eq=False, slots=True)
class Operation:
    """Work in a stream. need: SMs. after: of a wait. order: at its queueing; then at its end."""

    name: str
    duration_us: float = 0.0
    need: int = 0
    engine: bool = False
    reads: Sequence[Range] = ()
    writes: Sequence[Range] = ()
    ends: Callable[[], None] = lambda: None
    after: Operation | None = None
    communicator: Communicator | None = None
    calls: Sequence[tuple[str, Range]] = ()
    done: bool = False
    start_us: float = 0.0
    order: Stamp = field(init=False)
    stream: Stream = field(init=False)


class Device:
    def __init__(self, model: CudaModel) -> None:
        self.model, self.sms, self.engines = model, model.sms, model.engines  # that are free
        self.queues: list[deque[Operation]] = []
        self.streams: list[Stream] = []
        self.loaded: set[str] = set()
        self.busy: list[tuple[str, float, float]] = []  # compute, as (name, start, end)

    @property
    def idle(self) -> bool:
        return not any(self.queues) and all(stream.running is None for stream in self.streams)

    def advance(self) -> None:
        """Start all that can start. A queue's first operation delays those behind it."""
        progress = any(self.queues)
        while progress:
            progress = False
            for queue in self.queues:
                while queue and self.can_start(queue[0]):
                    self.start(queue.popleft())
                    progress = True

    def can_start(self, op: Operation) -> bool:
        if op.stream.running is not None or (op.after is not None and not op.after.done):
            return False
        communicator = op.communicator
        if communicator is not None and (communicator.resident or communicator.calls[0] is not op):
            return communicator.aborted
        return op.need <= self.sms and op.engine <= self.engines

    def start(self, op: Operation) -> None:
        model, stream = self.model, op.stream
        clock = stream.clock
        clock.learn(op.order)
        if op.after is not None:
            clock.learn(op.after.order)
        clock.number += 1
        self.sms -= op.need
        self.engines -= op.engine
        stream.running, op.start_us = op, model.now_us
        for place in op.reads:
            model.memory.access(place, False, clock, op.name)
        for place in op.writes:
            model.memory.access(place, True, clock, op.name)
        if op.communicator is not None:
            op.communicator.start(op)
        elif op.duration_us:
            model.at(op.duration_us, partial(self.end, op))
        else:
            self._end(op)

    def end(self, op: Operation) -> None:
        self._end(op)
        self.advance()

    def _end(self, op: Operation) -> None:
        op.done, op.stream.running = True, None
        op.order = op.stream.clock.stamp()
        self.sms += op.need
        self.engines += op.engine
        if op.duration_us and op.communicator is None and not op.engine:
            self.busy.append((op.name, op.start_us, self.model.now_us))
        op.ends()
        self.model.changed.add(self)


class Stream:
    """Takes the place of torch.cuda.Stream. Belongs to the device of the running host."""

    device = torch.device("cpu")
    by_handle: ClassVar[dict[int, Stream]] = {}

    def __init__(self, *_: object, priority: int = 0) -> None:
        device = self.on = _current.host.device
        if len(device.queues) < device.model.connections:
            device.queues.append(deque())
        self.queue = device.queues[len(device.streams) % len(device.queues)]
        device.streams.append(self)
        self.cuda_stream = len(self.by_handle) + 1
        self.by_handle[self.cuda_stream] = self
        self.clock = Clock()
        self.running: Operation | None = None
        self.queued = 0

    def add(self, op: Operation) -> Operation:
        with _current.lock:
            op.stream, op.order = self, _current.host.clock.tick()
            self.queued += 1
            if op.communicator is not None:
                op.communicator.calls.append(op)
            if not self.queue and self.on.can_start(op):  # nothing else can
                self.on.start(op)
            else:
                self.queue.append(op)
        return op

    def wait_event(self, event: Event) -> None:
        if event.op is not None:
            self.add(Operation("wait", after=event.op))

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    """Takes the place of torch.cuda.Event."""

    def __init__(self, **_: object) -> None:
        self.op: Operation | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.op = (stream or _current.host.current).add(Operation("record"))

    def query(self) -> bool:
        _current.count_query()
        if self.op is None:
            return True
        if self.op.done:
            _current.host.clock.learn(self.op.order)
        return self.op.done

    def synchronize(self) -> None:
        host = _current.host
        host.block(self.query, "an event", [self.op.stream.on if self.op else host])

    def elapsed_time(self, end: Event) -> float:
        assert self.op is not None
        assert end.op is not None
        assert end.op.done
        return (end.op.start_us - self.op.start_us) / 1e3


class Memory:
    """Every latest access to each range of device memory, by the block that the range is in."""

    def __init__(self) -> None:
        self._accesses: dict[int, list[tuple[int, int, bool, Clock, int, str]]] = {}

    def access(self, place: Range, written: bool, clock: Clock, name: str) -> None:
        start, size = place
        end = start + size
        kept, block = [], _starts[bisect.bisect(_starts, start) - 1]
        for known in self._accesses.get(block, ()):
            begin, until, wrote, by, number, what = known
            if begin < end and start < until and size and begin < until:
                ordered = clock.knows(by, number)
                if not ordered and (written or wrote):
                    raise ModelError("race", f"{name} and {what} use the same memory unordered")
                if ordered and (written or not wrote) and start <= begin and until <= end:
                    continue
            kept.append(known)
        kept.append((start, end, written, clock, clock.number, name))
        self._accesses[block] = kept

    def block(self, num_bytes: int, stream: Stream) -> torch.Tensor:
        """Memory as a caching allocator gives it: the stream's queued work may still use it."""
        block = new_block(num_bytes)
        if stream.queued:
            start = block.data_ptr()
            owner = (
                start,
                start + num_bytes,
                True,
                stream.clock,
                stream.queued,
                "an earlier owner",
            )
            self._accesses[start] = [owner]
        return block


_keep: list[torch.Tensor] = []  # no address is given out twice within a run
_starts: list[int] = [0]  # of their memory, in order


def new_block(num_bytes: int) -> torch.Tensor:
    block = torch.empty(num_bytes, dtype=torch.uint8)
    _keep.append(block)
    bisect.insort(_starts, block.data_ptr())
    return block


def range_of(tensor: torch.Tensor) -> Range:
    return tensor.data_ptr(), tensor.nbytes


class Communicator:
    """Takes the place of cupy's NcclCommunicator, of two ranks."""

    def __init__(self, ranks: int, id_: object, rank: int) -> None:
        assert ranks == 2
        self.host, self.rank, self._sides = model().host, rank, model().communicators[id_]
        self._sides[rank] = self
        self.resident: Operation | None = None
        self.aborted = False
        self.calls: deque[Operation] = deque()  # queued, in order
        self.host.block(lambda: len(self._sides) == 2, f"rank {1 - rank} of a communicator")

    @property
    def _peer(self) -> Communicator | None:
        return self._sides.get(1 - self.rank)

    def send(self, pointer: int, count: int, dtype: int, rank: int, stream: int) -> None:
        self._add("send", (pointer, count), rank, stream)

    def recv(self, pointer: int, count: int, dtype: int, rank: int, stream: int) -> None:
        self._add("recv", (pointer, count), rank, stream)

    def _add(self, direction: str, place: Range, rank: int, stream: int) -> None:
        if rank == self.rank:
            raise ModelError("mismatch", "a transfer to its own rank")
        group = model().host.groups.get(getcurrent())
        key = (self, stream)
        calls = group.setdefault(key, []) if group is not None else []
        calls.append((direction, place))
        if group is None:
            self.launch(Stream.by_handle[stream], calls)

    def launch(self, stream: Stream, calls: list[tuple[str, Range]]) -> None:
        reads = [place for direction, place in calls if direction == "send"]
        writes = [place for direction, place in calls if direction == "recv"]
        op = Operation("nccl", need=model().transfer_sms, reads=reads, writes=writes, calls=calls)
        op.communicator = self
        stream.add(op)

    def start(self, op: Operation) -> None:
        self.calls.popleft()
        self.resident = op
        peer = self._peer
        if self.aborted:
            self.resident = None
            self.host.device.end(op)
        elif peer is not None and peer.resident is not None:
            self._transfer(op, peer, peer.resident)

    def _transfer(self, op: Operation, peer: Communicator, other: Operation) -> None:
        now = model().now_us
        flip = {"send": "recv", "recv": "send"}
        mirrored = [(flip[direction], place[1]) for direction, place in other.calls]
        if mirrored != [(direction, place[1]) for direction, place in op.calls]:
            raise ModelError("mismatch", f"{op.calls} meets {other.calls}")
        spin_us = now - min(op.start_us, other.start_us)
        limit_us = model().spin_limit_us
        if spin_us > limit_us:
            raise ModelError("spin", f"{spin_us:.0f} us of at most {limit_us:.0f}")
        model().spun_us += spin_us
        op.stream.clock.learn(other.stream.clock.stamp())
        other.stream.clock.learn(op.stream.clock.stamp())
        bytes_ = sum(place[1] for _, place in op.calls)
        duration_us = model().transfer_us(bytes_)

        def ends() -> None:
            if op.done or other.done:
                return  # aborted
            for (direction, place), (_, far) in zip(op.calls, other.calls, strict=True):
                source, target = (place, far) if direction == "send" else (far, place)
                ctypes.memmove(target[0], source[0], source[1])
            receiver = self if op.calls[0][0] == "recv" else peer
            model().received.append((receiver.host.name, now, now + duration_us))
            self.resident = peer.resident = None  # before either device starts its next
            self.host.device.end(op)
            peer.host.device.end(other)

        model().at(duration_us, ends)

    def check_async_error(self) -> None:
        if Nccl.broken:
            raise RuntimeError("unhandled system error")

    def abort(self) -> None:
        """End the call under way as if it had received everything."""
        self.aborted = True
        Nccl.aborts += 1
        if self.resident is not None:
            op, self.resident = self.resident, None
            self.host.device.end(op)
        self.host.device.advance()


class Nccl:
    """Takes the place of the module cupy.cuda.nccl."""

    NCCL_UINT8 = 1
    NcclCommunicator = Communicator
    broken: ClassVar[bool] = False
    aborts: ClassVar[int] = 0

    def __init__(self, id_type: type = bytes) -> None:
        self.id_type = id_type
        self.ids: list[object] = []
        Nccl.broken, Nccl.aborts = False, 0

    def get_unique_id(self) -> object:
        self.ids.append(self.id_type([len(self.ids)] * 128))
        return self.ids[-1]

    def groupStart(self) -> None:
        if getcurrent() in model().host.groups:
            raise ModelError("mismatch", "a group within a group")
        model().host.groups[getcurrent()] = {}

    def groupEnd(self) -> None:
        group = model().host.groups.pop(getcurrent(), None)
        if group is None:
            raise ModelError("mismatch", "the end of a group that never began")
        for (communicator, stream), calls in group.items():
            communicator.launch(Stream.by_handle[stream], calls)


class Runtime:
    """Takes the place of cupy.cuda.runtime."""

    memcpyDefault = 4

    def malloc(self, num_bytes: int) -> int:
        block = new_block(num_bytes)
        self.blocks[block.data_ptr()] = block
        return block.data_ptr()

    blocks: ClassVar[dict[int, torch.Tensor]] = {}

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        return pointer.to_bytes(8, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        return int.from_bytes(handle, "little")

    def free(self, pointer: int) -> None: ...

    def ipcCloseMemHandle(self, pointer: int) -> None: ...

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        duration_us = model().transfer_us(size)

        def ends() -> None:
            ctypes.memmove(target, source, size)
            now = model().now_us
            model().received.append((host.name, now - duration_us, now))

        host = model().host
        places = {"reads": [(source, size)], "writes": [(target, size)]}
        copy = Operation("copy", duration_us, engine=True, ends=ends, **places)  # type: ignore[arg-type]
        Stream.by_handle[stream].add(copy)


class SharedFlags(bytearray):
    """The flag page of a segment that two processes map. A set flag orders its reader after."""

    by_inode: ClassVar[dict[int, SharedFlags]] = {}

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.order = Order()

    @classmethod
    def map(cls, fd: int, size: int) -> SharedFlags:
        return cls.by_inode.setdefault(os.fstat(fd).st_ino, cls(size))

    def __setitem__(self, slot: Any, value: Any) -> None:
        super().__setitem__(slot, value)
        self.order.add(_current.host.clock.tick())

    def find(self, *arguments: Any) -> int:
        self.order.order(_current.host.clock)
        return super().find(*arguments)


class Socket:
    """One end of a connection whose bytes take a random time. Carries descriptors as well."""

    def __init__(self, family: int) -> None:
        self.family = family
        self.peer: Socket
        self._bytes = b""
        self._fds: list[int] = []
        self._order = Order()
        self._last_us = 0.0

    @classmethod
    def pair(cls, family: int = socket.AF_INET) -> tuple[Socket, Socket]:
        a, b = cls(family), cls(family)
        a.peer, b.peer = b, a
        return a, b

    @property
    def has_bytes(self) -> bool:
        return bool(self._bytes)

    def setblocking(self, blocking: bool) -> None: ...

    def fileno(self) -> int:
        return 0

    def close(self) -> None: ...

    def send(self, data: bytes, fds: Sequence[int] = ()) -> int:
        now = model()
        self._last_us = max(self._last_us + 0.01, now.now_us + now.dice.uniform(*now.message_us))
        sent = now.host.clock.tick()

        def arrives() -> None:
            self.peer._bytes += data
            self.peer._fds += fds
            self.peer._order.add(sent)
            now.changed.add(self.peer)

        now.at(self._last_us - now.now_us, arrives)
        return len(data)

    def sendmsg(self, buffers: Sequence[bytes], ancillary: Sequence[Any]) -> int:
        (_, _, fds) = ancillary[0]
        return self.send(buffers[0], [os.dup(fd) for fd in fds])

    def recv(self, size: int) -> bytes:
        if not self._bytes:
            raise BlockingIOError
        data, self._bytes = self._bytes, b""
        self._order.order(model().host.clock)
        return data

    def recvmsg(self, size: int, ancillary: int, flags: int) -> tuple[bytes, list[Any], int, None]:
        data = self.recv(size)
        fds, self._fds = self._fds, []
        raw = b"".join(fd.to_bytes(4, "little") for fd in fds)
        return data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, raw)], 0, None


class Host:
    """A process with one device."""

    def __init__(self, owner: CudaModel, name: str, program: Callable[[Host], None]) -> None:
        self.model, self.name, self._program = owner, name, program
        self.number = len(owner.hosts)
        first = next(iter(owner.hosts.values()), None)
        self.device: Device = first.device if first and owner.one_gpu else Device(owner)
        self.clock = Clock()
        self.groups: dict[object, Group] = {}  # open ones, by thread
        self.done = False
        self.waits: Callable[[], bool] | None = None
        self.waits_on: Sequence[object] = ()  # see `block`
        self.blocked_by = ""
        self.thread = greenlet(self._run, owner.thread)
        self._current: dict[object, Stream] = {}
        self.default: Stream

    def _run(self) -> None:
        try:
            if not self.model.stopped:
                self.default = Stream()
                self._program(self)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.model.failure = self.model.failure or error
        self.done = True
        self.model.changed.add(self)

    @property
    def current(self) -> Stream:
        """The calling thread's stream."""
        return self._current.setdefault(getcurrent(), self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._current[getcurrent()] = stream

    def leave(self) -> None:
        """Let time pass until it is this host's turn, or let another one run."""
        if not self.model.stopped:
            following = self.model.pass_time()
            if following is not self:
                (self.model if following is None else following).thread.switch()
        if self.model.stopped:
            raise Stopped

    def pause(self, duration_us: float) -> None:
        self.model.at(duration_us, partial(self.model.resume, self))
        self.leave()

    def block(
        self, condition: Callable[[], bool], what: str, on: Sequence[object] = (None,)
    ) -> None:
        """Wait until `condition`. on: devices, sockets, locks … that it depends on; None: any."""
        if not condition():
            self.model.suspend(self, condition, what, on)

    def synchronize(self) -> None:
        """Wait for the device, as cudaFree, cudaHostRegister or a lazy module load does."""
        self.block(lambda: self.device.idle, "its device", [self.device])

    def launch(
        self,
        name: str,
        duration_us: float,
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
        ends: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue a kernel on the current stream."""
        if self.model.lazy_loading and name not in self.device.loaded:
            self.device.loaded.add(name)
            self.synchronize()
        need = self.model.compute_sms
        self.current.add(Operation(name, duration_us, need, reads=reads, writes=writes, ends=ends))


class CudaModel:
    """A machine and its run. Keyword arguments replace the attributes below."""

    sms, compute_sms, transfer_sms, engines, connections = 132, 100, 4, 2, 32
    lazy_loading = one_gpu = False
    spin_limit_us = float("inf")
    message_us, host_us = (5.0, 60.0), (1.0, 20.0)
    latency_us, bytes_per_us = 5.0, 100.0
    _queries, _queried_us = 0, 0.0
    _following: Host | None = None

    def __init__(self, seed: int, **machine: Any) -> None:
        vars(self).update(machine)
        self.dice = random.Random(seed)
        self.now_us = self.spun_us = 0.0
        self.hosts: dict[str, Host] = {}
        self.host: Host
        self.memory = Memory()
        self.communicators: defaultdict[object, dict[int, Communicator]] = defaultdict(dict)
        self.received: list[tuple[str, float, float]] = []  # host, start, end
        self.failure: BaseException | None = None
        self.stopped = False
        self.changed: set[object] = set()  # that hosts may wait for
        self._waiting: defaultdict[object, list[Host]] = defaultdict(list)  # by what may end it
        self.lock = threading.RLock()
        self.thread = getcurrent()
        self._heap: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def count_query(self) -> None:
        """Fail if a host looks at events again and again without any time in between."""
        self._queries = self._queries + 1 if self._queried_us == self.now_us else 0
        self._queried_us = self.now_us
        if self._queries > MOST_QUERIES and not self.stopped:
            raise ModelError("spin", "a host that looks at events without sleeping")

    def transfer_us(self, bytes_: int) -> float:
        return self.latency_us + bytes_ / self.bytes_per_us

    def at(self, delay_us: float, action: Callable[[], None]) -> None:
        """Run an action later."""
        entry = (self.now_us + delay_us, self.dice.random(), next(self._numbers), action)
        heapq.heappush(self._heap, entry)

    def suspend(
        self, host: Host, condition: Callable[[], bool], what: str, on: Sequence[object]
    ) -> None:
        """Run the others until `condition`. on: see `Host.block`."""
        host.waits, host.blocked_by, host.waits_on = condition, what, on
        for each in on:
            self._waiting[each].append(host)
        host.leave()

    def resume(self, host: Host) -> None:
        """Let the host run until it waits."""
        self._following = host

    def run(self, programs: dict[str, Callable[[Host], None]]) -> None:
        """Run all programs to their ends. Raises ModelError."""
        with torch.inference_mode():  # as some of the programs, which share this thread
            self._run(programs)

    def _run(self, programs: dict[str, Callable[[Host], None]]) -> None:
        global _current
        _current = self
        for name, program in programs.items():
            self.hosts[name] = Host(self, name, program)
        for host in self.hosts.values():
            self.at(self.dice.uniform(*self.host_us), partial(self.resume, host))
        try:
            while (following := self.pass_time()) is not None:
                following.thread.switch()
            self._check_end()
        finally:
            self.stopped = True
            for host in self.hosts.values():
                if not host.done:
                    self.host = host
                    host.thread.switch()
            _keep.clear()
            del _starts[1:]
            Stream.by_handle.clear()
            Runtime.blocks.clear()
            SharedFlags.by_inode.clear()

    def pass_time(self) -> Host | None:
        """Run actions up to a host's turn, and return it; None: the run is over, or has failed."""
        try:
            while self.failure is None:
                self._end_waits()
                if not self._heap:
                    if all(host.done for host in self.hosts.values()):
                        break
                    waits = (
                        f"{h.name} waits for {h.blocked_by}" for h in self.hosts.values() if h.waits
                    )
                    raise ModelError("deadlock", "; ".join(waits))
                self.now_us, _, _, action = heapq.heappop(self._heap)
                action()
                if self._following is not None:
                    self.host, self._following = self._following, None
                    return self.host
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.failure = self.failure or error
        return None

    def _end_waits(self) -> None:
        """Let the hosts go on whose waits have ended by what has changed."""
        waiting = self._waiting
        hosts = [*waiting[None], *(host for each in self.changed for host in waiting.get(each, ()))]
        self.changed.clear()
        for host in sorted(set(hosts), key=attrgetter("number")) if len(hosts) > 1 else hosts:
            self.host = host
            if host.waits is not None and host.waits():
                host.waits = None
                for each in host.waits_on:
                    waiting[each].remove(host)
                self.at(self.dice.uniform(*self.host_us), partial(self.resume, host))

    def _check_end(self) -> None:
        if self.failure is not None:
            raise self.failure
        for host in self.hosts.values():
            if host.groups:
                raise ModelError("mismatch", f"{host.name} left a group open")
            if not host.device.idle:
                raise ModelError("deadlock", f"the device of {host.name} does not end")


class FreeModel(CudaModel):
    """A model without a clock, one process whose code has real threads and sockets.

    Work ends at once; while `held`, at the next `end_held`.
    """

    def __init__(self) -> None:
        global _current
        super().__init__(0)
        _current = self
        self.held = False
        self.host = Host(self, "host", lambda host: None)
        self.host.default = Stream()

    def at(self, delay_us: float, action: Callable[[], None]) -> None:
        if self.held:
            super().at(delay_us, action)
        else:
            action()

    def end_held(self) -> None:
        self.held = False
        with self.lock:
            while self._heap:
                heapq.heappop(self._heap)[-1]()

    def suspend(
        self, host: Host, condition: Callable[[], bool], what: str, on: Sequence[object]
    ) -> None:
        wait_until(condition, f"no {what}", 10.0, 0.001)


_current: CudaModel


def model() -> CudaModel:
    return _current


@contextlib.contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    host = model().host
    before, host.current = host.current, stream
    try:
        yield
    finally:
        host.current = before


def installed() -> contextlib.ExitStack:
    """Replace torch.cuda by the model until the stack is closed."""
    stack = contextlib.ExitStack()
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: model().host.current,
        "stream": _stream,
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, value))
    empty = lambda size, _: model().memory.block(size, model().host.current)  # noqa: E731
    for module, name, value in (
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch, "as_tensor", lambda raw, device: Runtime.blocks[raw.pointer]),
        (cuda, "empty_bytes", empty),
        (nccl, "empty_bytes", empty),
        (ipc, "device_identity", lambda device: "gpu" if model().one_gpu else model().host.name),
        (ipc, "require_cupy", lambda backend: CUPY),
        (ipc, "create_memfd", lambda size: os.memfd_create("model")),
        (ipc, "check_memfd", lambda fd, size: True),
        (ipc, "mmap", SimpleNamespace(mmap=SharedFlags.map)),
    ):
        stack.enter_context(mock.patch.object(module, name, value))
    return stack


CUPY = SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime()))
