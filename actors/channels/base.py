"""The one interface of all channels between attention ranks and expert ranks.

A pair of ranks is joined by a *link*. Every link has a header socket: a small `Header` travels
ahead of each payload, so that the payload has its exact size and the receiver knows whom to receive
from.
The payload moves in a way that depends on the backend: shared memory, TCP, CUDA IPC, NCCL.

        sender                                   receiver
        reserve(peer, parts) -> tensors
        fill them in place
        commit(reservation, header)  ──────────> poll() -> [Packet(header, tensors)]
                                                 use packet.tensors
                                     <────────── packet.release()      (the memory may be reused)

Nothing here blocks for longer than the deadline; a lost peer is an event with the peer's name.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec
import torch

from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.requests import Priority
from contracts.traces import Stage, TaskSpan

Size = Annotated[int, msgspec.Meta(ge=0)]


class PacketKind(enum.IntEnum):
    A2E = 0
    E2A = 1
    HINT = 2  # what a later layer may want: local experts [n], and how likely each is [n]
    # Of a generation of placement (actors/rebalance/expert_generations.py); `batch` is the attempt
    # (of HELD
    # that of the WANTED which it answers; 0: of none), of PLACED `token_group` the seconds that it
    # may take, the payload uint8 [n].
    PREPARED = 3  # from an expert rank: its experts are there; the placement as msgpack
    ABORT_VOTE = 4  # from an expert rank: they will not be; why
    ABORTED = 5  # from an attention rank: it does not go over to it; why
    COMMITTED = 6  # from an attention rank: it uses none before it any more
    READY = (
        7  # from an expert rank: its experts are there, for whoever joins or wants it; as PLACED
    )
    ACQUIRE = 8  # from an attention rank: the placement as msgpack, whose experts it needs there
    RELEASE = 9  # from an attention rank: it needs them no more
    DRAINING = (
        10  # from an expert rank: it is to go; from an attention rank: it may, as for that one
    )


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a payload is. `batch` and `micro_batch` are the attention rank's own numbers; the expert
    rank copies them into its answer. `sent_s`, on the sender's monotonic clock, is for timelines.
    `generation`: of the placement that the payload's local experts are of.
    """

    kind: PacketKind
    epoch: int
    batch: int
    layer: int
    micro_batch: int
    token_group: int
    priority: Priority = Priority.LS
    sent_s: float = 0.0
    generation: int = 0


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of one tensor of a payload."""

    dtype: str  # "float32", "bfloat16", "int32", ...
    shape: tuple[Size, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


def spec_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return the spec of `tensor`, as `dtype` if one is given."""
    return TensorSpec(str(dtype or tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def connection_lost(peer: str, error: OSError) -> PeerDeadError:
    return PeerDeadError(f"{peer}: connection lost ({error})", peer)


def connection_closed(peer: str) -> PeerDeadError:
    return PeerDeadError(f"{peer} closed its connection", peer)


@functools.cache
def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of that name. Raises ChannelError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ChannelError(f"{name!r} is not a dtype of torch")
    return dtype


class Reservation(Protocol):
    """Memory to fill, in place, before `Endpoint.commit`. Commit each reservation exactly once;
    `tensors` is empty afterwards."""

    peer: str
    tensors: Sequence[torch.Tensor]


class Packet:
    """A received payload. `arrived_s`: when it was seen. `sent_s`: as its header says, on the
    receiver's clock too. `release()` must be called once, from any thread, in any order."""

    __slots__ = ("_release", "_tensors", "arrived_s", "header", "peer", "sent_s")

    def __init__(
        self,
        peer: str,
        header: Header,
        tensors: Sequence[torch.Tensor],
        arrived_s: float,
        release: Callable[[], None] | None,
    ) -> None:
        self.peer = peer
        self.header = header
        self._tensors = tensors
        self.arrived_s = arrived_s
        self.sent_s = header.sent_s
        self._release = release

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Views of channel memory: valid until `release()`."""
        return self._tensors

    @property
    def rows(self) -> int:
        """Of its first tensor."""
        return self._tensors[0].shape[0]

    def release(self) -> None:
        release, self._release = self._release, None
        self._tensors = ()
        if release is not None:
            release()


class PeerJoined(msgspec.Struct, frozen=True):
    """A peer is joined: it has connected to us, or we have to it by `join`. (Whoever calls
    `connect` is joined when it returns: no event.)"""

    peer: str


class PeerLost:
    """A peer died (connection closed) or hung (silent for too long). Told once per link. epoch: the
    peer's."""

    __slots__ = ("epoch", "error", "peer")

    def __init__(self, peer: str, error: PeerError, epoch: int = 0) -> None:
        self.peer = peer
        self.error = error
        self.epoch = epoch


ChannelEvent = Packet | PeerJoined | PeerLost


def transfers(channel_events: Sequence[ChannelEvent]) -> list[tuple[float, float]]:
    """(sent_s, arrived_s) of each packet among `channel_events`, on the receiver's clock."""
    return [(h.sent_s, h.arrived_s) for h in channel_events if isinstance(h, Packet)]


def transfer_span(packet: Packet, receiver: str) -> TaskSpan:
    """The packet's way to `receiver`, for its timeline: from sent to seen."""
    header = packet.header
    return TaskSpan(
        f"{packet.peer}>{receiver}",
        Stage.A2E if header.kind is PacketKind.A2E else Stage.E2A,
        packet.sent_s,
        packet.arrived_s,
        header.batch,
        header.layer,
        header.micro_batch,
        header.token_group,
        packet.rows,
    )


class Endpoint(Protocol):
    """One rank's end of all its links. Owned by one thread, except `wake` and `Packet.release`.

    Constructor of every implementation (keyword-only): name (this rank's name, such as
    "attention-0"), token (the cluster's secret), epoch, config (ChannelConfig), clock, device.
    """

    name: str
    epoch: int
    backend: str

    def listen(self, host: str = "127.0.0.1") -> str:
        """Starts to accept links. Returns the address to hand to the peers' `connect`."""

    def connect(self, peer: str, address: str) -> None:
        """Joins `peer`. Raises HandshakeError, PeerError or ChannelError within deadline_s."""

    def join(self, peer: str, address: str) -> None:
        """As `connect`, from any thread: `poll` tells PeerJoined. One that is linked under that
        name, at an older epoch, is lost then."""

    def peers(self) -> Sequence[str]:
        """Names of the peers whose links are up."""

    def reserve(self, peer: str, parts: Sequence[TensorSpec]) -> Reservation:
        """Memory for a payload. Never waits for the receiver. Raises PeerError if it is lost,
        another ChannelError if this process has no memory or descriptors for it."""

    def commit(self, reservation: Reservation, header: Header) -> None:
        """Sends. Returns without waiting for the payload to arrive. Raises as `reserve`."""

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        """What has happened; waits at most timeout_s (0: not at all), less if `wake` is called.

        Packets older than either end's epoch are dropped here. Never raises for a lost peer: tells
        `PeerLost`.
        """

    def watch(self, descriptor: int) -> None:
        """A `poll` that waits also returns while that can be read. Whoever owns it reads it."""

    def drop(self, peer: str, reason: str) -> None:
        """Ends the link to `peer`, who sees it; `poll` tells PeerLost with this reason."""

    def wake(self) -> None:
        """Makes a `poll` in another thread return now."""

    @property
    def stall_reason(self) -> str:
        """Why it sends no heartbeats any more: nobody has polled for channel.step_timeout_s. Empty:
        it does."""

    def dump_stacks_after(self, after_s: float) -> None:
        """In the log, when nobody has polled for so long."""

    def bytes_moved(self) -> tuple[int, int]:
        """Payload bytes sent and received so far."""

    def close(self) -> None:
        """Closes every link, ends every thread, removes every file. May be called twice."""


def send_tensors(
    endpoint: Endpoint,
    peer: str,
    header: Header,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Copy `tensors` into channel memory, as `dtype` if one is given, and send them.

    Raises as `Endpoint.reserve`.
    """
    reservation = endpoint.reserve(peer, [spec_of(tensor, dtype) for tensor in tensors])
    for slot, tensor in zip(reservation.tensors, tensors, strict=True):
        slot.copy_(tensor)
    endpoint.commit(reservation, header)
