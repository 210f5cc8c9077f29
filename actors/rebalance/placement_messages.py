"""Packets about placement generations."""

import math
from collections import deque
from typing import Final

import msgspec
import torch

from actors.channels.base import Header, Packet, PacketKind
from actors.channels.endpoint import Endpoint, send_tensors
from actors.rebalance.placement_generations import LAUNCH_ATTEMPT, PlacementMessage
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError
from contracts.messages import FRAME_ERRORS
from contracts.placement import Placement
from contracts.requests import Priority

_MOST_TEXT_BYTES: Final = 2000
_decode = msgspec.msgpack.Decoder(Placement).decode
_IN_EACH_CLASS: Final = (PacketKind.COMMITTED, PacketKind.RELEASE)


class PlacementSender:
    """Sends packets in order; drops those to peers that are gone.

    What cannot be sent for lack of memory or descriptors is retried: a peer that misses a packet
    would wait forever.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._unsent: deque[tuple[PlacementMessage, Priority]] = deque()

    def send(self, message: PlacementMessage) -> None:
        """Send a packet; COMMITTED and RELEASE in each class, as these can overtake each other."""
        for priority in Priority if message.kind in _IN_EACH_CLASS else (Priority.LS,):
            self._unsent.append((message, priority))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            message, priority = self._unsent[0]
            try:
                if message.peer in self._endpoint.peers():  # a new process gets the state anew
                    self._send(message, priority)
            except PeerError:
                pass  # `poll` reports the loss
            except ChannelError:
                return
            self._unsent.popleft()

    def _send(self, message: PlacementMessage, priority: Priority) -> None:
        header = Header(
            message.kind,
            self._endpoint.epoch,
            message.attempt,
            0,
            0,
            math.ceil(message.within_s),
            priority,
            self._clock(),
            message.generation,
        )
        text = (message.reason or " ").encode()[:_MOST_TEXT_BYTES]
        placed = message.placement
        body = text if placed is None else msgspec.msgpack.encode(placed)
        payload = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        send_tensors(self._endpoint, message.peer, header, [payload])


def reason_of(packet: Packet) -> str:
    return _body(packet).decode(errors="replace").strip()


def placement_of(packet: Packet) -> Placement:
    """Return the placement in a PREPARED, READY or ACQUIRE packet.

    Raises ValueError if it is invalid or of another generation than the header.
    """
    try:
        placement = _decode(_body(packet))
    except FRAME_ERRORS as error:
        raise ValueError(f"{packet.peer} sent a placement that cannot be read: {error}") from None
    expected = packet.header.generation
    if placement.generation != expected:
        raise ValueError(
            f"{packet.peer} sent generation {placement.generation} of the placement as {expected}"
        )
    return placement


def attempt_of(packet: Packet) -> int:
    """Return the attempt of an ACQUIRE or of its READY. Raises ValueError if unset."""
    header = packet.header
    if header.batch <= LAUNCH_ATTEMPT:
        raise ValueError(
            f"{packet.peer} sent {header.kind.name} of generation {header.generation} as attempt "
            f"{header.batch}: {LAUNCH_ATTEMPT + 1} or more is an attempt; is it another version?"
        )
    return header.batch


def _body(packet: Packet) -> bytes:
    (body,) = packet.tensors
    return body.cpu().numpy().tobytes()
