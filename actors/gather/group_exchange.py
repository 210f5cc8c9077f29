"""Messages and collectives of prefill workers that compute a batch together.

    leader ── GroupCall ──> others      Accepted, or Declined if one is busy
           ── Started ────> all accepted; then packets of layers, one per peer and collective
           ── Aborted ────> a worker was lost, or not all accepted; any worker may send it
    others ── Left ───────> all: the pass ends in a layer
    any    ── Busy ───────> all: not to be called for some time

Packets of other passes than the current one are released.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from actors.channels.base import Packet, PacketKind
from actors.channels.endpoint import Endpoint, send_tensors
from actors.gather.all_to_all import AllToAll
from actors.telemetry.telemetry import Timeline
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.logs import event
from contracts.placement import Placement
from kernels.steps import Steps, run_to_end
from models.decoder.batch import SequenceSlice
from models.experts.expert_half import ExpertHalf
from planner.placement.nodes import LinkLevels
from planner.schedule.batch_choice import ExchangeScheme

log = logging.getLogger(f"tandem.{__name__}")


class GroupCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A batch to compute together, from a layer. Blocks are numbered from 0.

    layer: the first; if it is not 0, the leader's residual follows. counts: last rows of each
    sequence that the last layer computes; None: all. first_order: of the tokens in the first layer
    with experts, int32; empty: as they are. keeps_kv: the leader needs the entries of all heads.
    nodes: of the workers.
    """

    slices: list[SequenceSlice]
    layer: int
    counts: list[int] | None
    first_order: bytes
    scheme: ExchangeScheme
    keeps_kv: bool
    nodes: list[int]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The worker waits for `Started`."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    """The worker is busy, or not linked to all others."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """All workers have accepted."""


class Aborted(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Left(msgspec.Struct, frozen=True, tag=True):
    """The worker has requests of its own, and takes no part in the rest of a layer and later."""

    layer: int


class Busy(msgspec.Struct, frozen=True, tag=True):
    """The worker computes a batch alone, for about as long."""

    seconds: float


GroupMessage = GroupCall | Accepted | Declined | Started | Aborted | Left | Busy
_DECODER = msgspec.msgpack.Decoder(GroupMessage)


class GroupExchange(AllToAll):
    """Messages and collectives of one worker. Owned by one thread, except `join`."""

    def __init__(
        self,
        endpoint: Endpoint,
        workers: Sequence[str],
        half: ExpertHalf,
        placement: Placement,
        timeline: Timeline,
    ) -> None:
        super().__init__(endpoint, workers, half, placement, timeline)
        self._dialed: dict[str, str] = {}
        self.levels = LinkLevels((0,) * len(workers))  # replaced, never changed
        self._messages: list[tuple[str, int, GroupMessage]] = []
        self.layer = 0  # of the pass
        self.ended: Left | Aborted | None = None  # how another worker ended the latest pass

    @property
    def workers(self) -> int:
        return len(self.names)

    @property
    def number(self) -> int:
        """The current pass, 0 if there is none."""
        return self._pass

    @property
    def is_linked(self) -> bool:
        return set(self._peers) <= set(self._endpoint.peers())

    def join(self, addresses: Mapping[str, str]) -> None:
        """Dial workers of lower rank at new addresses. Thread-safe; failures are logged."""
        for peer in self.names[: self.rank]:
            address = addresses.get(peer)
            if address is None or self._dialed.get(peer) == address:
                continue
            try:
                self._endpoint.join(peer, address)
                self._dialed[peer] = address
            except ChannelError as error:
                event(log, "join_failed", logging.WARNING, peer=peer, reason=error.message)

    def begin(self, number: int) -> None:
        self._pass, self._lost = number, None
        self.layer, self.ended = 0, None

    def end(self) -> None:
        """Forget the pass and what has arrived for it."""
        self._pass, self._lost = 0, None
        for packet in self._arrived.values():
            packet.release()
        self._arrived.clear()

    def send(self, message: GroupMessage, number: int, peers: Iterable[str] | None = None) -> None:
        """Send a message to peers (None: all). Peers that are lost are skipped."""
        body = torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)
        header = msgspec.structs.replace(self._header(PacketKind.GROUP, 0), batch=number)
        for peer in self._peers if peers is None else peers:
            try:
                send_tensors(self._endpoint, peer, header, [body])
            except ChannelError as error:
                event(log, "group_send_failed", logging.WARNING, peer=peer, reason=error.message)

    def receive(self, timeout_s: float) -> list[tuple[str, int, GroupMessage]]:
        """Return messages with their peers and passes. Raises PeerError if a pass lost a worker."""
        if not self._messages:
            super()._poll(timeout_s)
        received, self._messages = self._messages, []
        return received

    def collect(
        self, kind: PacketKind, layer: int, parts: Mapping[str, Sequence[Tensor]]
    ) -> Steps[dict[str, Packet]]:
        """Send parts to peers and return the packets of all peers, to release."""
        for peer in self._peers:
            send_tensors(self._endpoint, peer, self._header(kind, layer), parts[peer])
        return self._receive(kind, layer)

    def total(self, layer: int, part_TN: Tensor) -> Tensor:
        """Return the sum of all workers' parts. Equal bits on all workers."""
        parts = {peer: [part_TN] for peer in self._peers}
        packets = run_to_end(self.collect(PacketKind.SQUARES, layer, parts))
        arrived = {name: packet.tensors[0] for name, packet in packets.items()}
        total_TN = torch.stack([arrived.get(name, part_TN) for name in self.names]).sum(0)
        for packet in packets.values():
            packet.release()
        return total_TN

    def send_context(self, layer: int, peer: str, entries: Sequence[Tensor]) -> None:
        send_tensors(self._endpoint, peer, self._header(PacketKind.CONTEXT, layer), entries)

    def receive_context(self, layer: int, leader: str) -> Steps[Packet]:
        packets = yield from self._receive(PacketKind.CONTEXT, layer, [leader])
        return packets[leader]

    def check(self) -> None:
        """Raise PeerError if a worker has ended or left the pass, or is lost."""
        self._poll(0.0)

    def _poll(self, timeout_s: float) -> None:
        super()._poll(timeout_s)
        for peer, number, message in self._messages:
            if number != self._pass:
                continue
            if isinstance(message, Aborted):
                self.ended = message
                raise PeerDeadError(message.reason, peer)
            if isinstance(message, Left) and message.layer <= self.layer:
                self.ended = message
                raise PeerDeadError(f"{peer} has requests of its own", peer)

    def _note_loss(self, error: PeerError) -> None:
        if self._pass:
            super()._note_loss(error)

    def _take(self, packet: Packet) -> None:
        header = packet.header
        if header.kind is PacketKind.GROUP:
            body = packet.tensors[0].numpy().tobytes()
            packet.release()
            try:
                self._messages.append((packet.peer, header.batch, _DECODER.decode(body)))
            except msgspec.DecodeError as error:
                self._endpoint.drop(packet.peer, f"{packet.peer} sent no group message: {error}")
        elif header.batch == self._pass:
            super()._take(packet)
        else:
            packet.release()
