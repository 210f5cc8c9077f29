"""A planner whose answers a test decides, on a real socket; and a real one in this process."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from actors.channels.handshake import Identity, accept, initiate
from actors.channels.listener import dial, listen_tcp
from actors.ranks.planner_rank import planner_rank
from actors.ranks.rank import Rank
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from contracts.config import TandemConfig
from contracts.errors import HandshakeError
from contracts.hardware import Hardware
from contracts.placement import Placement
from contracts.planner_messages import (
    PLANNER_PURPOSE,
    CurrentPlacement,
    FromPlanner,
    ModelsChanged,
    MoveOutcome,
    PlacementProposal,
    PlacementReport,
    PlanRequest,
    PlanResponse,
    ToPlanner,
)
from contracts.ranks import Group
from tests.support.group_harness import ThreadGroup, group_config

TOKEN = b"a token of 32 random bytes......"
DEADLINE_S = 20.0
# Made here: where two threads make the first one of a type at once, msgspec crashes.
_decode_request = msgspec.msgpack.Decoder(ToPlanner).decode
_decode_answer = msgspec.msgpack.Decoder(FromPlanner).decode
Answer = Callable[[PlanRequest], PlanResponse | None]


def never(query: PlanRequest) -> None:
    """A planner that hears and says nothing."""


class FakePlanner:
    """A context manager. `received`: all messages of all ranks, in order."""

    def __init__(self, answer: Answer = never, token: bytes = TOKEN) -> None:
        self.received: queue.Queue[ToPlanner] = queue.Queue()
        self.held: dict[str, CurrentPlacement] = {}  # of expert ranks, by name: the last one said
        self._socket_of: dict[str, socket.socket] = {}
        self._ends: dict[tuple[str, int], PlacementReport] = {}
        self._answer = answer
        self._identity = Identity(name="planner-0", token=token, epoch=None)
        self._listener, self.address = listen_tcp("127.0.0.1")
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> FakePlanner:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(DEADLINE_S)  # whom it has let in by now is hung up on
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for sock in self._sockets:
            sock.close()

    def hang_up(self) -> None:
        """Ends every connection."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # it has ended already
                sock.shutdown(socket.SHUT_RDWR)

    def wait_held(self, *ranks: str) -> None:
        """Returns once these expert ranks have joined; what came before is dropped."""
        while not set(ranks) <= set(self.held):
            self.received.get(timeout=DEADLINE_S)

    def propose(self, placement: Placement, *ranks: str) -> None:
        """To the expert ranks of these names; none: to all that have joined."""
        for rank in ranks or tuple(self._socket_of):
            _send(self._socket_of[rank], PlacementProposal(placement))

    def outcome(self, rank: str, generation: int) -> PlacementReport:
        """What became of it there in the end."""
        while (rank, generation) not in self._ends:
            message = self.received.get(timeout=DEADLINE_S)
            if isinstance(message, PlacementReport) and message.outcome is not MoveOutcome.READY:
                self._ends[message.rank, message.generation] = message
        return self._ends[rank, generation]

    def next_query(self) -> PlanRequest:
        """The next question; reports before it are dropped."""
        while True:
            message = self.received.get(timeout=DEADLINE_S)
            if isinstance(message, PlanRequest):
                return message

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            self._threads.append(threading.Thread(target=self._talk, args=(sock,), daemon=True))
            self._threads[-1].start()

    def _talk(self, sock: socket.socket) -> None:
        try:
            accept(sock, self._identity, deadline_s=DEADLINE_S)
            sock.settimeout(None)
            _send(sock, ModelsChanged(1))
            with sock.makefile("rb") as file:
                while size := int.from_bytes(file.read(4), "little"):
                    message = _decode_request(file.read(size))
                    if isinstance(message, CurrentPlacement):
                        self._socket_of[message.rank] = sock
                        self.held[message.rank] = message  # from here on it may be proposed to
                    self.received.put(message)
                    answer = self._answer(message) if isinstance(message, PlanRequest) else None
                    if answer is not None:
                        _send(sock, answer)
        except (OSError, ValueError, HandshakeError):
            return  # hung up


class PlannerConnection:
    """A blocking client of a planner, as a rank would be."""

    def __init__(
        self,
        address: str,
        token: bytes = TOKEN,
        purpose: str = PLANNER_PURPOSE,
        name: str = "attention-0",
    ) -> None:
        self.socket = dial(address, DEADLINE_S)
        me = Identity(name=name, token=token, epoch=None)
        initiate(self.socket, me, purpose=purpose, to=None, deadline_s=DEADLINE_S)
        self.socket.settimeout(DEADLINE_S)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> PlannerConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, message: object) -> None:
        _send(self.socket, message)

    def read(self) -> FromPlanner:
        """Raises EOFError when the planner has closed the connection."""
        size = self._file.read(4)
        if len(size) < 4:
            raise EOFError
        body = self._file.read(int.from_bytes(size, "little"))
        message: FromPlanner = _decode_answer(body)
        return message

    def answer(self, query: PlanRequest) -> PlanResponse:
        self.send(query)
        while True:
            message = self.read()
            if isinstance(message, PlanResponse):
                return message


@contextlib.contextmanager
def following(
    folder: Path, backend: str = "shm", **sections: Any
) -> Iterator[tuple[FakePlanner, ThreadGroup]]:
    """Yield two attention and two expert ranks that have joined a planner."""
    sections.setdefault("placement", {"rebalance": "continuous", "bytes_per_s": 1e9})
    config = group_config(2, 2, **sections)
    with (
        FakePlanner() as planner,
        ThreadGroup(folder, config, backend=backend, token=TOKEN) as group,
    ):
        group.join_planner(planner.address)
        planner.wait_held("expert-0", "expert-1")
        yield planner, group


@contextlib.contextmanager
def real_planner(
    folder: Path,
    config: TandemConfig,
    hardware: Hardware | None,
    token: bytes = TOKEN,
    *,
    expert_ranks: int = 1,
    placements: Mapping[Group, Placement] | None = None,
) -> Iterator[Rank]:
    """A planner for one attention rank and some expert ranks."""
    seat = Seat("cpu", "127.0.0.1", 1)
    group_spec = GroupSpec(config, str(folder), token, 1, "shm", hardware, placements or {})
    *_, spec = make_specs(group_spec, [seat], [seat] * expert_ranks, [seat])
    assert spec.group is Group.PLANNER
    planner = planner_rank(spec)
    try:
        yield planner
    finally:
        planner.stop()


def _send(sock: socket.socket, message: object) -> None:
    body = msgspec.msgpack.encode(message)
    sock.sendall(len(body).to_bytes(4, "little") + body)
