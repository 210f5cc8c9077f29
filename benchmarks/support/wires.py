"""Ways to move bytes between two processes: the channels, and memcpy, which only makes the copies
of a move through shared memory.

`flow` moves payloads from private memory of one side to private memory of the other: filling by the
sender and copying out by the receiver are part of it.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import torch

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.channels.endpoint import Endpoint

MAX_BYTES = 64 << 20
WINDOW_BYTES = 32 << 20  # of payloads that are not yet answered, within these bounds:
MIN_WINDOW, MAX_WINDOW = 2, 32
POLL_S = 5.0


def window(num_bytes: int) -> int:
    """Return how many payloads of that size may be in transit."""
    return max(MIN_WINDOW, min(MAX_WINDOW, WINDOW_BYTES // num_bytes))


class Mover(Protocol):
    """One side. The other side makes the matching call."""

    def flow(self, num_bytes: int, outgoing: int, incoming: int) -> None:
        """Send and receive payloads; return when all have arrived on either side."""

    def close(self) -> None: ...


class Wire(Mover, Protocol):
    """One side of a mover that also has round trips."""

    def ping(self, num_bytes: int, count: int) -> list[float]:
        """Return the seconds of each of `count` round trips."""

    def pong(self, num_bytes: int, count: int) -> None:
        """Serve the `ping` of the other side."""


class ChannelWire:
    """One link of an endpoint."""

    def __init__(self, end: Endpoint, peer: str, device: torch.device) -> None:
        self._end = end
        self._peer = peer
        self._device = device
        self._source = torch.ones(MAX_BYTES, dtype=torch.uint8, device=device)
        self._target = torch.zeros(MAX_BYTES, dtype=torch.uint8, device=device)

    def ping(self, num_bytes: int, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            started_s = time.perf_counter()
            self._send(num_bytes, PacketKind.A2E)
            self._receive(next(self._packets()))
            seconds.append(time.perf_counter() - started_s)
        return seconds

    def pong(self, num_bytes: int, count: int) -> None:
        for _ in range(count):
            self._receive(next(self._packets()))
            self._send(num_bytes, PacketKind.A2E)

    def flow(self, num_bytes: int, outgoing: int, incoming: int) -> None:
        """An empty packet (E2A) acknowledges each payload (A2E), which bounds the sender."""
        unanswered = 0
        while outgoing or incoming or unanswered:
            while outgoing and unanswered < window(num_bytes):
                self._send(num_bytes, PacketKind.A2E)
                outgoing, unanswered = outgoing - 1, unanswered + 1
            for packet in self._packets(at_most=1):
                if packet.header.kind is PacketKind.E2A:
                    packet.release()
                    unanswered -= 1
                else:
                    self._receive(packet)
                    self._send(0, PacketKind.E2A)
                    incoming -= 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._end.close()

    def _send(self, num_bytes: int, kind: PacketKind) -> None:
        parts = [TensorSpec("uint8", (num_bytes,))] if num_bytes else []
        reservation = self._end.reserve(self._peer, parts)
        if num_bytes:
            reservation.tensors[0].copy_(self._source[:num_bytes])
        self._end.commit(reservation, Header(kind, self._end.epoch, 0, 0, 0, 0))

    def _receive(self, packet: Packet) -> None:
        payload = packet.tensors[0]
        self._target[: payload.numel()].copy_(payload)
        packet.release()

    def _packets(self, at_most: int | None = None) -> Iterator[Packet]:
        """Yield packets as they arrive, from at most so many polls."""
        polls = 0
        while at_most is None or polls < at_most:
            polls += 1
            for channel_event in self._end.poll(POLL_S):
                if isinstance(channel_event, PeerLost):
                    raise channel_event.error
                if isinstance(channel_event, Packet):
                    yield channel_event


class MemcpyWire:
    """Makes the copies of shared memory, alternating between two slots, the minimum of a stream."""

    def __init__(self) -> None:
        self._private = torch.ones(MAX_BYTES, dtype=torch.uint8)
        self._shared = torch.zeros(2 * MAX_BYTES, dtype=torch.uint8)

    def flow(self, num_bytes: int, outgoing: int, incoming: int) -> None:
        private = self._private[:num_bytes]
        slots = self._shared[: 2 * num_bytes].view(2, num_bytes)
        for index in range(outgoing):
            slots[index % 2].copy_(private)
        for index in range(incoming):
            private.copy_(slots[index % 2])

    def close(self) -> None:
        return
