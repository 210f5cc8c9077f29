"""Packets and events of the channels between attention ranks and expert ranks.

A *link* joins a pair of ranks. Each link has a header socket: a small `Header` travels ahead of
each payload, so payloads have their exact size and the receiver knows the sender. How the payload
moves depends on the backend: shared memory, TCP, CUDA IPC or NCCL.

        sender                                   receiver
        reserve(peer, parts) -> tensors
        fill them in place
        commit(reservation, header)  ──────────> poll() -> [Packet(header, tensors)]
                                                 use packet.tensors
                                     <────────── packet.release()      (the memory may be reused)

No call blocks past its deadline; a lost peer is an event that names the peer.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.requests import Priority
from contracts.traces import Stage, TaskSpan

if TYPE_CHECKING:  # the launcher's process knows packets, but no torch
    import torch

Size = Annotated[int, msgspec.Meta(ge=0)]


class PacketKind(enum.IntEnum):
    A2E = 0
    E2A = 1
    HINT = 2  # predicted for a later layer: local experts [n], and the probability of each [n]
    # About placement generations (actors/rebalance/placement_generations.py). `batch` is the
    # attempt (READY: that of the ACQUIRE it answers, 0 if none); `token_group` of PREPARED is its
    # timeout in seconds; the payload is uint8 [n].
    PREPARED = 3  # expert rank: its experts are loaded; payload: the placement as msgpack
    ABORT_VOTE = 4  # expert rank: it cannot load its experts; payload: the reason
    ABORTED = 5  # attention rank: it does not switch; payload: the reason
    COMMITTED = 6  # attention rank: it uses no earlier generation any more
    READY = 7  # expert rank: as PREPARED, to a rank that joins or that sent ACQUIRE
    ACQUIRE = 8  # attention rank: it needs the experts of this placement; payload: as PREPARED
    RELEASE = 9  # attention rank: it needs them no longer
    DRAINING = 10  # expert rank: it must stop; attention rank: it may stop
    # Of batches that prefill workers compute together (actors/gather/shuffled.py). `batch` is the
    # pass.
    GROUP = 11  # payload: a message as msgpack
    CONTEXT = 12  # the leader's cached entries
    SCATTER = 13  # a worker's part of a sum; to the leader also new entries
    GATHER = 14  # finished rows
    SQUARES = 15  # sums of squares of a worker's heads


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a payload.

    The attention rank numbers `batch` and `micro_batch`; the expert rank copies them into its
    answer. `sent_s`, on the sender's monotonic clock, is for timelines. `generation` is the
    placement generation that the payload's local experts belong to.
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
    """Return the torch dtype named `name`. Raises ChannelError."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ChannelError(f"{name!r} is not a dtype of torch")
    return dtype


@dataclass(slots=True, eq=False)
class Packet:
    """A received payload.

    tensors: views of channel memory, valid until `release()`. arrived_s: when it was received.
    sent_s: from its header, converted to the receiver's clock. Call `release()` once, from any
    thread, in any order.
    """

    peer: str
    header: Header
    tensors: Sequence[torch.Tensor]
    arrived_s: float
    free: Callable[[], None] | None
    sent_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.sent_s = self.header.sent_s

    @property
    def rows(self) -> int:
        """Rows of the first tensor."""
        return self.tensors[0].shape[0]

    def release(self) -> None:
        free, self.free = self.free, None
        self.tensors = ()
        if free is not None:
            free()


class PeerJoined(msgspec.Struct, frozen=True):
    """A peer connected, or `join` connected to it. `connect` raises no event."""

    peer: str


class PeerLost(msgspec.Struct, frozen=True):
    """A peer died or hung, reported once per link. epoch: the peer's."""

    peer: str
    error: PeerError
    epoch: int = 0


ChannelEvent = Packet | PeerJoined | PeerLost


def transfers(channel_events: Sequence[ChannelEvent]) -> list[tuple[float, float]]:
    """Return (sent_s, arrived_s) of each packet, on the receiver's clock."""
    return [(h.sent_s, h.arrived_s) for h in channel_events if isinstance(h, Packet)]


def transfer_span(packet: Packet, receiver: str) -> TaskSpan:
    """Return the timeline span of a packet's transfer to `receiver`."""
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
