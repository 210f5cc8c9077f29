"""Prefill workers that gather experts between GPUs, on the model of the CUDA runtime.

The real store, source, shard, link and server run; threads, locks, sockets and the clock are the
model's.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from actors.channels import cuda
from actors.gather import (
    device_segment,
    nccl_exchange,
    peer_source,
    weight_link,
    weight_server,
    weight_shard,
)
from contracts.config import TandemConfig
from contracts.ranks import Group
from models.experts import copying_store, device_lanes
from models.experts.expert_layout import ExpertLayout
from planner.placement.slots import contiguous
from tests.support.cuda_model import (
    CUPY,
    CudaModel,
    Host,
    ModelError,
    Nccl,
    Order,
    Runtime,
    Socket,
    Stamp,
    Stopped,
    model,
    range_of,
)
from tests.support.rank_specs import rank_spec
from tests.support.spans import length, union

CHAIN = (
    cuda, device_segment, weight_link, nccl_exchange, weight_shard, weight_server, peer_source,
    device_lanes, copying_store,
)  # fmt: skip
GARBAGE = 255


class GatherWork(NamedTuple):
    """window: layers of a shard that a host store fills. sync: chance to wait for the device.
    dies: the last worker only serves, and its process ends at a random time. nodes: of the workers
    in turn; spin_limit_us: of a transfer between them."""

    workers: int = 2
    layers: int = 3
    passes: int = 2
    window: int | None = None
    compute_us: float = 300.0
    width: int = 32
    sync: float = 0.0
    dies: bool = False
    nodes: int = 1
    spin_limit_us: float = float("inf")


class SmallSpec(msgspec.Struct, frozen=True):
    moe_layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    expert_ffn_size: int
    clamp: None = None


class GpuLayout(ExpertLayout):
    """A layout of a GPU, whose memory is the model's."""

    def __init__(self, spec: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(spec, dtype, torch.device("cuda", 0))

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel() * self.dtype.itemsize
        return Runtime.blocks[Runtime().malloc(size)].view(self.dtype).view(shape)


# --- threads, locks and clock of the model


def _now_s() -> float:
    return 1e-6 * model().now_us


def _block(
    condition: Callable[[], bool], what: str, on: Sequence[object], timeout_s: float | None = None
) -> bool:
    """Wait until `condition`, which only changes of `on` make true, or the timeout."""
    run = model()
    if run.stopped:  # the thread unwinds through code that locks
        raise Stopped
    if condition():
        return True
    host = run.host
    if timeout_s is None:
        host.block(condition, what, on)
        return True
    end_s = _now_s() + timeout_s
    run.at(1e6 * max(timeout_s, 0.0), partial(run.changed.add, host))
    host.block(lambda: condition() or _now_s() >= end_s - 1e-12, what, [*on, host])
    return condition()


class _Lock:
    def __init__(self) -> None:
        self._owner: Host | None = None
        self._released: Stamp | None = None

    def acquire(self, timeout: float | None = None) -> bool:
        run = model()
        if self._owner is not None or run.stopped:
            end_s = float("inf") if timeout is None else _now_s() + timeout
            while not _block(lambda: self._owner is None, "a lock", [self], timeout):
                if _now_s() >= end_s:
                    return False  # else another thread was faster
        self._owner = run.host
        if self._released is not None:
            self._owner.clock.learn(self._released)
        return True

    def release(self) -> None:
        run = model()
        self._released, self._owner = run.host.clock.tick(), None
        run.changed.add(self)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        if not model().stopped:
            self.release()


class _Condition(_Lock):
    """A condition whose state changes under its lock, as `on` of `_block` requires."""

    _notified = 0

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        self.release()
        _block(lambda: self._owner is None and ready(), "a condition", [self], timeout)
        self.acquire()
        return ready()

    def wait(self) -> None:
        before = self._notified
        self.wait_for(lambda: self._notified != before)

    def notify_all(self) -> None:
        self._notified += 1


class _Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        model().changed.add(self)

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return _block(lambda: self._is_set, "a flag", [self], timeout)


class _Thread:
    def __init__(self, target: Callable[..., None], args: Any = (), **_: Any) -> None:
        self._call = partial(target, *args)
        self._host: Host | None = None

    def start(self) -> None:
        run, parent = model(), model().host
        name = f"{parent.name}/{len(run.hosts)}"
        host = self._host = run.hosts[name] = Host(run, name, lambda own: self._run(own, parent))
        host.device = parent.device
        host.clock.learn(parent.clock.tick())
        run.at(run.dice.uniform(*run.host_us), partial(run.resume, host))

    def _run(self, host: Host, parent: Host) -> None:
        host.default = parent.default  # all threads of a process begin with its compute stream
        self._call()

    def is_alive(self) -> bool:
        return self._host is not None and not self._host.done

    def join(self, timeout: float | None = None) -> None:
        on = [] if self._host is None else [self._host]
        _block(lambda: not self.is_alive(), "a thread", on, timeout)


class _Pipe(Socket):
    """A Unix socket with an end."""

    numbers: ClassVar[Iterator[int]] = itertools.count(1000)
    by_number: ClassVar[dict[int, _Pipe]] = {}

    def __init__(self, family: int) -> None:
        super().__init__(family)
        self._number = next(self.numbers)
        self.by_number[self._number] = self
        self.ended = False

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._number

    def setsockopt(self, *_: object) -> None: ...

    def sendall(self, data: bytes) -> None:
        if self.ended:
            raise BrokenPipeError
        self.send(data)

    def recv(self, size: int) -> bytes:
        if not self._bytes and self.ended:
            return b""
        data = super().recv(size)
        self._bytes = data[size:]
        return data[:size]

    def recv_into(self, view: memoryview, size: int, flags: int) -> int:
        _block(lambda: len(self._bytes) >= size or self.ended, "a request", [self])
        data = self.recv(size)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        def ends() -> None:
            self.ended = self.peer.ended = True  # type: ignore[attr-defined]
            run.changed.update((self, self.peer))

        run, self.ended = model(), True
        run.changed.add(self)
        if not run.stopped:
            run.at(30.0, ends)

    def shutdown(self, how: int) -> None:
        self.close()


class _Poll:
    def __init__(self) -> None:
        self._of: dict[int, tuple[_Pipe, int]] = {}

    def register(self, which: Any, mask: int) -> None:
        pipe = which if isinstance(which, _Pipe) else _Pipe.by_number[which]
        self._of[pipe.fileno()] = pipe, mask

    def unregister(self, number: int) -> None:
        del self._of[number]

    def _ready(self) -> list[tuple[int, int]]:
        return [
            (number, mask)
            for number, (pipe, mask) in self._of.items()
            if pipe.ended or (mask & select.POLLIN and pipe.has_bytes)
        ]

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        pipes = [pipe for pipe, _ in self._of.values()]
        _block(lambda: bool(self._ready()), "a reply", pipes, 1e-3 * timeout_ms)
        return self._ready()


class _Process:
    """The process at the other end, as far as a link asks."""

    is_running = True
    is_stopped = False

    def __init__(self, world: GatherWorld, name: str) -> None:
        self._world, self._name = world, name

    @property
    def is_ending(self) -> bool:
        return self._name in self._world.ending

    def close(self) -> None: ...


_NCCL = Nccl()
THREADS = SimpleNamespace(Thread=_Thread, Lock=_Lock, Condition=_Condition, Event=_Event)
_NAMES = {
    "threading": THREADS,
    "monotonic_s": _now_s,
    "time": SimpleNamespace(sleep=lambda seconds: _block(lambda: False, "a time", (), seconds)),
    "select": SimpleNamespace(
        poll=_Poll, POLLIN=select.POLLIN, POLLRDHUP=select.POLLRDHUP
    ),
    "require_cupy": lambda backend: CUPY,
    "require_nccl": lambda: _NCCL,
    "open_lanes": lambda make, peer, deadline_s: make(),
    "empty_bytes": lambda size, device: model().memory.block(size, model().host.current),
    "peer_process": lambda sock: None,
    "local_process": SimpleNamespace(peer_process=lambda sock: None),
}  # fmt: skip


def gather_code(file: str = "", old: str = "", new: str = "") -> dict[str, ModuleType]:
    """Modules of the gather that run on the model, with `old` of a file replaced."""
    return code_of(CHAIN, file, old, new)


def code_of(chain: Sequence[ModuleType], file: str, old: str, new: str) -> dict[str, ModuleType]:
    """Modules, each with those before it, whose threads, sockets and clock are the model's."""
    made: dict[str, ModuleType] = {}
    for module in chain:
        path = Path(str(module.__file__))
        text = path.read_text(encoding="utf-8")
        if file.endswith(f"/{path.name}"):
            assert text.count(old) == 1, (file, old)
            text = text.replace(old, new)
        for name in made:
            text = re.sub(rf"from [\w.]+\.{name} import", f"from gathering.{name} import", text)
        copy = made[path.stem] = ModuleType(f"gathering.{path.stem}")
        sys.modules[copy.__name__] = copy
        exec(compile(text, str(path), "exec"), copy.__dict__)
        for name, value in _NAMES.items():
            if hasattr(copy, name):
                setattr(copy, name, value)
    return made


# --- the workers


class _HostStore:
    """Pinned memory of the host with a mark in every byte: copied on the current stream."""

    def __init__(self, world: GatherWorld) -> None:
        self._world = world

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        handle = torch.cuda.current_stream().cuda_stream
        for number, piece in enumerate(into):
            source = Runtime.blocks[Runtime().malloc(piece.nbytes)]
            source.fill_(self._world.mark(layer, first, number))
            Runtime().memcpyAsync(piece.data_ptr(), source.data_ptr(), piece.nbytes, 4, handle)


class GatherWorld:
    """A run of workers. ending: names of processes that have begun to end."""

    def __init__(self, work: GatherWork, code: dict[str, ModuleType]) -> None:
        self.work, self.code = work, code
        self.names = [f"prefill-{rank}" for rank in range(work.workers)]
        self.experts = 2 * work.workers
        layers = tuple(range(work.layers))
        self.spec = SmallSpec(layers, self.experts, work.width, work.width)
        self.placement = contiguous(
            self.experts, work.workers, num_layers=work.layers, moe_layers=layers
        )
        self.ending: set[str] = set()
        self._stores: list[Any] = []
        self._sources: dict[str, Any] = {}
        self._parts: dict[str, list[Any]] = {name: [] for name in self.names}  # of NCCL
        self._ready = Order()  # the addresses' exchange orders what follows after the shards

    @staticmethod
    def mark(layer: int, first: int, piece: int) -> int:
        return 1 + (31 * layer + 7 * first + 3 * piece) % 200

    def run(self, seed: int, **machine: Any) -> CudaModel:
        """Raises ModelError, and what the code raises."""
        run = CudaModel(seed, **{"spin_limit_us": self.work.spin_limit_us, **machine})
        _Pipe.by_number.clear()
        _NCCL.ids.clear()
        run.run({name: partial(self._worker, rank) for rank, name in enumerate(self.names)})
        return run

    def _worker(self, rank: int, host: Host) -> None:
        source = self._source(rank)
        self._join(rank, host)
        if self.work.dies and rank == self.work.workers - 1:
            self._die(source, host)
            return
        layout = source.part_layout
        store = self.code["copying_store"].CopyingStore(source, {}, layout, deadline_s=20.0)
        for _ in range(self.work.passes):
            for layer in range(self.work.layers):
                self._compute(store, layer, host)
        self._stores.append(store)
        host.block(self._is_idle, "the others")  # copies that an end interrupts are not used
        source.abort()
        store.close()
        self._check(source)

    def _source(self, rank: int) -> Any:
        work, shards = self.work, self.code["weight_shard"]
        layout, host = GpuLayout(self.spec), _HostStore(self)
        spec = rank_spec(
            Group.PREFILL, rank=rank, prefill_ranks=work.workers, placement=self.placement,
            backend="nccl" if work.nodes > 1 else "ipc", config=TandemConfig(), token=b"t" * 32,
        )  # fmt: skip
        gathers = self.code["peer_source"]
        part = gathers.own_part(spec, layout)
        shard = shards.Shard(range(work.layers), part, host, work.window)
        source = self._sources[self.names[rank]] = gathers.PeerSource(spec, shard, host)
        source.part_layout = layout
        if source._exchange is not None:
            self._record_parts(source)
        self._ready.add(model().host.clock.tick())
        return source

    def _join(self, rank: int, host: Host) -> None:
        """Serve the others, and link to them."""
        host.block(lambda: len(self._sources) == len(self.names), "the others' shards")
        self._ready.order(host.clock)
        own = self._sources[self.names[rank]]
        peers = [(number, peer) for number, peer in enumerate(self.names) if peer != host.name]
        dials = [THREADS.Thread(self._dial, (own, rank, *peer)) for peer in peers]
        for dial in dials:
            dial.start()
        for dial in dials:
            dial.join()
        own._introduced.set()

    def _dial(self, own: Any, rank: int, number: int, peer: str) -> None:
        is_far = (rank - number) % self.work.nodes != 0
        here, there = _Pipe.pair(socket.AF_INET if is_far else socket.AF_UNIX)
        links, other, run = self.code["weight_link"], self._sources[peer], model()
        dialing, run.host = run.host, run.hosts[peer]  # whose thread serves
        other._server._accept(there, SimpleNamespace(name=own.name))
        run.host = dialing
        if is_far:
            segment = own._exchange.connect(here, peer, serves=False)
        else:
            segment = links.PeerGpuSegment(peer, other._terms)
        link = own._links[peer] = links.WeightLink(peer, here, 1, segment)
        link.local_process = None if is_far else _Process(self, peer)

    def _record_parts(self, source: Any) -> None:
        connect = source._exchange.connect

        def recorded(*given: Any, **more: Any) -> Any:
            part = connect(*given, **more)
            self._parts[source.name].append(part)
            if source.name in self.ending:
                part._communicator.abort()
            return part

        source._exchange.connect = recorded

    def _is_idle(self) -> bool:
        """Return whether all workers have ended and copied ahead what they can."""
        copied = [store for store in self._stores if not store._free and store._copying is None]
        return len(copied) == self.work.workers - self.work.dies

    def _compute(self, store: Any, layer: int, host: Host) -> None:
        host.launch("attention", 10.0)
        if self.work.sync and host.model.dice.random() < self.work.sync:
            host.synchronize()
        store.fetch(layer)
        pieces = store._held[1].buffer.pieces
        host.launch(
            "experts",
            self.work.compute_us,
            reads=[range_of(piece) for piece in pieces],
            ends=partial(self._check_layer, pieces, layer),
        )
        store.release()
        host.pause(host.model.dice.uniform(*host.model.host_us))

    def _check_layer(self, pieces: Sequence[Tensor], layer: int) -> None:
        for number, piece in enumerate(pieces):
            for expert, weights in enumerate(piece):
                mark = self.mark(layer, expert - expert % 2, number)
                pointer, size = range_of(weights)
                ends = *ctypes.string_at(pointer, 1), *ctypes.string_at(pointer + size - 1, 1)
                if {*ends} != {mark}:
                    raise ModelError("corrupt", f"expert {expert} of layer {layer}")

    def _die(self, source: Any, host: Host) -> None:
        """End like a killed process: its memory is freed, then its connections end."""
        host.pause(host.model.dice.uniform(0.0, 3000.0))
        source.shard._source = SimpleNamespace(
            copy_part=lambda *_: None
        )  # it fills no slot any more
        self.ending.add(host.name)
        for part in self._parts[host.name]:
            part._communicator.abort()  # a transfer of freed memory does not end
        for slot in source.shard.pieces:
            for piece in slot:
                ctypes.memset(piece.data_ptr(), GARBAGE, piece.nbytes)
        host.pause(host.model.dice.uniform(10.0, 5000.0))
        source.close()

    def _check(self, source: Any) -> None:
        shard = source.shard
        if self.work.window and (shard._in_use or shard._requested):
            raise ModelError("leak", f"slots of {source.name} stay in use")
        if not self.work.dies and source.fallbacks:
            raise ModelError("fallback", f"{source.name}: {source._lost}")


def hidden_share(code: dict[str, ModuleType], work: GatherWork, seed: int = 0) -> float:
    """Smallest share of a worker's copies' time in which it computes, from the first layer on."""
    run = GatherWorld(work, code).run(seed, message_us=(5.0, 20.0), host_us=(1.0, 5.0))
    shares = []
    for name in (name for name in run.hosts if "/" not in name):
        compute = [(a, b) for _, a, b in run.hosts[name].device.busy if b - a > work.compute_us / 2]
        begin, end = compute[0][0], compute[-1][1]
        copies = [
            (a, b) for by, a, b in run.received if by.startswith(name) and begin < a and b < end
        ]
        exposed = length(union([*copies, *compute])) - length(union(compute))
        shares.append(1.0 - exposed / length(union(copies)))
    return min(shares)


HIDDEN = {
    "gathered": GatherWork(workers=2, layers=4, passes=3, compute_us=8000.0),
    "hybrid": GatherWork(workers=2, layers=6, passes=2, window=3, compute_us=8000.0),
    "between nodes": GatherWork(workers=4, nodes=2, layers=4, passes=3, compute_us=8000.0),
}
REQUIRED_HIDDEN = 0.95
GATHERS = (
    GatherWork(),
    GatherWork(workers=3, window=1, sync=0.3, compute_us=20.0),
    GatherWork(layers=4, passes=3, window=2, compute_us=3000.0),
    GatherWork(layers=4, passes=2, compute_us=6000.0, sync=0.2),
    GatherWork(workers=3, layers=3, passes=3, dies=True),
    GatherWork(workers=3, nodes=3, passes=3, spin_limit_us=250.0),
    GatherWork(workers=4, nodes=2, window=1, sync=0.3, compute_us=20.0),
    GatherWork(workers=3, nodes=2, layers=3, passes=3, dies=True),
)


def gather_symptom(code: dict[str, ModuleType], seeds: range) -> str:
    """The first failure of the gather on this code, or "" if there is none."""
    try:
        for seed in seeds:
            for work in GATHERS:
                GatherWorld(work, code).run(seed)
            if seed == seeds[0] and any(
                hidden_share(code, work) < REQUIRED_HIDDEN for work in HIDDEN.values()
            ):
                return "lost overlap"
    except ModelError as failure:
        return failure.kind
    except Exception as error:  # noqa: BLE001 - what the code itself notices
        return f"error: {type(error).__name__}"
    return ""
