"""Endpoints, packets and peer processes of the channel tests."""

import contextlib
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.channels.base import ChannelEvent, Header, Packet, PacketKind, PeerJoined, PeerLost
from actors.channels.endpoint import Endpoint, send_tensors
from actors.channels.factory import make_endpoint
from actors.channels.tcp import PIECE
from contracts.clock import Clock, monotonic_s
from contracts.config import ChannelConfig
from contracts.requests import Priority
from tests.support.fork_server import ForkedProcess

TOKEN = b"a token of 32 random bytes......"
DEADLINE_S = 20.0
ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("shm", "tcp")
_FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64"]
ALL_DTYPES = [*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool"]


def endpoint(
    name: str,
    backend: str,
    *,
    epoch: int = 1,
    token: bytes = TOKEN,
    clock: Clock = monotonic_s,
    placement: str = "",
    **config: Any,
) -> Endpoint:
    return make_endpoint(
        name=name,
        token=token,
        epoch=epoch,
        config=ChannelConfig(backend=backend, **config),  # type: ignore[arg-type]
        clock=clock,
        device=torch.device("cuda" if backend in ("ipc", "nccl") else "cpu"),
        placement=placement,
    )


@contextlib.contextmanager
def linked(backend: str, **config: Any) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Yield two endpoints of this process, "left" joined to "right"."""
    with joined(endpoint("left", backend, **config), endpoint("right", backend, **config)) as pair:
        yield pair


@contextlib.contextmanager
def joined(left: Endpoint, right: Endpoint) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Join `left` to `right`; close both at the end."""
    with closed(left, right):
        left.connect("right", right.listen())
        wait_for(right, PeerJoined)
        yield left, right


@contextlib.contextmanager
def closed(*ends: Endpoint) -> Iterator[None]:
    """Close the endpoints at the end."""
    try:
        yield
    finally:
        for end in ends:
            end.close()


def wait_for(
    end: Endpoint, kind: type, count: int = 1, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Return the next `count` events, which must all be of `kind`."""
    found: list[ChannelEvent] = []
    end_s = monotonic_s() + deadline_s
    while len(found) < count:
        left_s = end_s - monotonic_s()
        assert left_s > 0, f"{len(found)} of {count} {kind.__name__} within {deadline_s} s"
        for channel_event in end.poll(left_s):
            assert isinstance(channel_event, kind), (
                f"expected {kind.__name__}, got {describe(channel_event)}"
            )
            found.append(channel_event)
    assert len(found) == count, f"expected {count} {kind.__name__}, got {len(found)}"
    return found


def describe(channel_event: ChannelEvent) -> str:
    if isinstance(channel_event, PeerLost):
        return f"PeerLost({channel_event.error!r})"
    return str(getattr(channel_event, "header", channel_event))


def header(
    batch: int = 0,
    *,
    epoch: int = 1,
    kind: PacketKind = PacketKind.A2E,
    priority: Priority = Priority.LS,
) -> Header:
    return Header(kind, epoch, batch, 0, 0, 0, priority)


def send(end: Endpoint, peer: str, tensors: Sequence[torch.Tensor], head: Header) -> None:
    send_tensors(end, peer, head, tensors)


def random_tensor(dtype: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return random bit patterns of that dtype (bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    size = kind.itemsize
    for n in shape:
        size *= n
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).view(tuple(shape)) if size else torch.empty(tuple(shape), dtype=kind)


def raw_frame(backend: str, body: bytes) -> bytes:
    """Return `body` as a header frame without a payload."""
    if backend == "tcp":
        return PIECE.pack(0, len(body)) + body
    return len(body).to_bytes(4, "little") + body


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Peer:
    """A process that runs tests/support/channels_peer.py in a role, joined to `end`."""

    def __init__(self, end: Endpoint, backend: str, role: str, **options: Any) -> None:
        address = end.listen()
        options |= {"backend": backend, "role": role, "address": address, "token": TOKEN.hex()}
        self.process = ForkedProcess("tests.support.channels_peer", json.dumps(options))
        joined = wait_for(end, PeerJoined, deadline_s=60.0)
        assert joined[0].peer == "peer"

    def line(self) -> str:
        return self.process.stdout.readline().decode().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def with_peer(
    backend: str, role: str, *, options: dict[str, Any] | None = None, **config: Any
) -> Iterator[tuple[Endpoint, Peer]]:
    """Yield an endpoint "main" and a process "peer" that is joined to it."""
    main = endpoint("main", backend, **config)
    peer = None
    try:
        peer = Peer(main, backend, role, **(options or {}))
        yield main, peer
    finally:
        if peer is not None:
            peer.end()
        main.close()


def open_fds() -> dict[int, str]:
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: target for fd, target in fds.items() if not target.startswith("/proc")}


def shm_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "tandem" in name}


def our_threads() -> set[threading.Thread]:
    """Return the threads except permanent ones (progress bar, memory release)."""
    for_good = {"tqdm_monitor", "malloc-trim"}
    return {thread for thread in threading.enumerate() if thread.name not in for_good}


def is_foreign(fd: int, target: str) -> bool:
    """Return whether it belongs to Ray's libraries, which open some at any time."""
    objects = gc.get_objects()
    ours = {o.fileno() for o in objects if issubclass(type(o), socket.socket)}
    return target.startswith(("socket:", "anon_inode:")) and fd not in ours


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, a descriptor or a file in /dev/shm."""
    gc.collect()
    gc.freeze()  # so that the collection after the test looks through that test's objects only
    threads, fds, files = our_threads(), open_fds(), shm_files()
    yield
    gc.collect()
    for thread in our_threads() - threads:
        thread.join(5.0)  # it may be about to end
    left = [thread.name for thread in our_threads() - threads]
    assert not left, f"threads left: {left}"
    end_s = time.monotonic() + 5.0  # one may be about to be closed
    while new := {fd: target for fd, target in open_fds().items() if fds.get(fd) != target}:
        if time.monotonic() > end_s:
            left = [f"{fd} {target}" for fd, target in new.items() if not is_foreign(fd, target)]
            assert not left, f"descriptors left: {left}"
            break
        time.sleep(0.02)
    assert shm_files() == files


def until(condition: Callable[[], bool], end: Endpoint, deadline_s: float = DEADLINE_S) -> None:
    """Poll `end`, without events, until `condition`."""
    end_s = monotonic_s() + deadline_s
    while not condition():
        assert monotonic_s() < end_s
        assert not end.poll(0.01)


def first_packet(end: Endpoint) -> Packet:
    packet = wait_for(end, Packet)[0]
    assert isinstance(packet, Packet)
    return packet
