"""Packets about placement generations, and leases of attention ranks on them."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import Final

import msgspec
import torch

from actors.channels.base import Header, Packet, PacketKind
from actors.channels.endpoint import Endpoint, send_tensors
from actors.rebalance.expert_generations import (
    LAUNCH_ATTEMPT,
    Action,
    FreeExperts,
    LoadExperts,
    PlacementMessage,
)
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError
from contracts.messages import FRAME_ERRORS
from contracts.placement import Placement
from contracts.requests import Priority
from planner.placement.resize import is_failover

MOST: Final = 64  # leases of one attention rank, including releases that overtook their ACQUIRE


class PlacementLeases:
    """Methods return actions in order, or raise ValueError for a rank to be disconnected."""

    def __init__(self) -> None:
        self.loading: int | None = None
        self._placements: dict[int, Placement] = {}
        self._by: dict[int, dict[str, int]] = {}  # attempt by generation and holder
        self._owed: dict[str, dict[int, Counter[Priority]]] = {}  # outstanding RELEASE, by holder
        self._committed: dict[str, dict[Priority, int]] = {}  # newest, by holder
        self._waiting: list[int] = []  # generations to load

    def needs(self, generation: int) -> bool:
        """Return True if an attention rank holds a lease."""
        return generation in self._by

    def placement(self, generation: int) -> Placement:
        return self._placements[generation]

    def newest(self, above: int) -> Placement | None:
        """Return the newest leased placement of a planner above that generation."""
        found = [one for one in self._by if not is_failover(one) and one > above]
        return self._placements[max(found)] if found else None

    def acquire(
        self, name: str, placement: Placement, attempt: int, *, resident: bool, misfit: str
    ) -> list[Action]:
        """Handle ACQUIRE. resident: the experts are loaded. misfit: why not, or empty."""
        generation = placement.generation
        if is_failover(generation):
            self._of(name, generation).update(Priority)
        else:
            self._check_count(name, [one for one, by in self._by.items() if name in by], generation)
        if self._placements.get(generation, placement) != placement:
            misfit = f"another placement is leased as generation {generation}"
        if misfit:
            return [PlacementMessage(name, PacketKind.ABORT_VOTE, generation, reason=misfit)]
        self._placements[generation] = placement
        self._by.setdefault(generation, {})[name] = attempt
        if resident:
            return [PlacementMessage(name, PacketKind.READY, generation, attempt)]
        if generation != self.loading and generation not in self._waiting:
            self._waiting.append(generation)
        return self._next()

    def loaded(self, generation: int) -> list[Action]:
        self.loading = None
        by = sorted(self._by.get(generation, {}).items())
        return [
            *(
                PlacementMessage(name, PacketKind.READY, generation, attempt)
                for name, attempt in by
            ),
            *self._next(),
        ]

    def failed(self, generation: int, reason: str) -> list[Action]:
        self.loading = None
        names = sorted(self._by.pop(generation, ()))
        self._placements.pop(generation, None)
        messages = [
            PlacementMessage(name, PacketKind.ABORT_VOTE, generation, reason=reason)
            for name in names
        ]
        return [*messages, *self._next()]

    def release(self, name: str, generation: int, priority: Priority) -> list[Action]:
        if not is_failover(generation):
            return []
        owed = self._of(name, generation)
        owed[priority] -= 1
        if any(owed.values()):
            return []
        del self._owed[name][generation]
        return self._without(name, [generation])

    def committed(self, name: str, generation: int, priority: Priority) -> list[Action]:
        """Handle COMMITTED: the rank uses no planner's generation before that."""
        newest = self._committed.setdefault(name, dict.fromkeys(Priority, 0))
        newest[priority] = max(newest[priority], generation)
        used_from = min(newest.values())
        before = [one for one in self._by if one < used_from and not is_failover(one)]
        return self._without(name, before)

    def remove_peer(self, name: str) -> list[Action]:
        self._owed.pop(name, None)
        self._committed.pop(name, None)
        return self._without(name, list(self._by))

    def _of(self, name: str, generation: int) -> Counter[Priority]:
        owed = self._owed.setdefault(name, {})
        self._check_count(name, owed, generation)
        return owed.setdefault(generation, Counter())

    @staticmethod
    def _check_count(name: str, known: Collection[int], generation: int) -> None:
        if generation not in known and len(known) >= MOST:
            raise ValueError(
                f"{name} holds {len(known) + 1} generations at a time, or releases them before it "
                f"acquires them: {MOST} at most"
            )

    def _without(self, name: str, generations: Iterable[int]) -> list[Action]:
        actions: list[Action] = []
        for generation in generations:
            if name not in self._by.get(generation, ()):
                continue
            del self._by[generation][name]
            if not self._by[generation]:
                del self._by[generation], self._placements[generation]
                if generation in self._waiting:
                    self._waiting.remove(generation)
                    continue
                actions.append(FreeExperts(generation))
                if generation == self.loading:
                    self.loading = None
        return [*actions, *self._next()]

    def _next(self) -> list[Action]:
        if self.loading is not None or not self._waiting:
            return []
        self.loading = self._waiting.pop(0)
        return [LoadExperts(self._placements[self.loading])]


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
        self._unsent: deque[tuple[PlacementMessage, Priority, bytes]] = deque()

    def send(self, message: PlacementMessage, placement: Placement | None = None) -> None:
        """Send a packet; COMMITTED and RELEASE in each class, as classes can overtake each other.

        placement: body of PREPARED, READY and ACQUIRE.
        """
        text = (message.reason or " ").encode()[:_MOST_TEXT_BYTES]
        body = text if placement is None else msgspec.msgpack.encode(placement)
        for priority in Priority if message.kind in _IN_EACH_CLASS else (Priority.LS,):
            self._unsent.append((message, priority, body))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            message, priority, body = self._unsent[0]
            try:
                if message.peer in self._endpoint.peers():  # a new process gets the state anew
                    self._send(message, priority, body)
            except PeerError:
                pass  # `poll` reports the loss
            except ChannelError:
                return
            self._unsent.popleft()

    def _send(self, message: PlacementMessage, priority: Priority, body: bytes) -> None:
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
