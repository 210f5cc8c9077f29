"""What a launcher writes down of its ranks, in Ray's GCS, for another one to take them over."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import msgspec
import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.fleet.codec import encode_config
from cluster.fleet.member import Member
from cluster.fleet.nodes import Node, Placed, RankRequest
from cluster.fleet.rank_group import RankGroup
from contracts.config import TandemConfig
from contracts.errors import ResourceError
from contracts.logs import event
from contracts.worker import RankReady, WorkerSpec

log = logging.getLogger("tandem.fleet")

_NAMESPACE = b"tandem"


class Room(msgspec.Struct, frozen=True):
    """A placement group, by its name."""

    name: str
    device: str
    requests: list[RankRequest]
    nodes: list[Node]


class Entry(msgspec.Struct, frozen=True):
    """A rank. actor: its name in Ray. room, bundle: where it runs."""

    spec: WorkerSpec
    ready: RankReady
    actor: str
    room: str
    bundle: int


class GroupEntry(msgspec.Struct, frozen=True):
    epoch: int
    backend: str
    ranks: list[Entry]


class Record(msgspec.Struct, frozen=True):
    """config: a digest of what the ranks were launched with."""

    launch_id: str
    config: bytes
    token: bytes
    rooms: list[Room]
    groups: list[GroupEntry]


class Ledger:
    """Of one application. launch_id: of whoever deployed it."""

    def __init__(self, application: str, launch_id: str, config: TandemConfig) -> None:
        self.application, self.launch_id = application, launch_id
        self.config_digest = hashlib.sha256(encode_config(config)).digest()
        self._key = f"fleet/{application}".encode()
        self._written: list[tuple[str, int, WorkerSpec]] = []

    def write(self, token: bytes, groups: Sequence[RankGroup]) -> None:
        """What is there now; without effect where nothing has changed since the last time."""
        members = [member for group in groups for member in group.members]
        now = [(member.name, member.ready.pid, member.spec) for member in members]
        if now == self._written:
            return
        rooms = {one.place.placed.name: one.place.placed for one in members}
        record = Record(
            self.launch_id,
            self.config_digest,
            token,
            [Room(name, p.device, p.requests, p.nodes) for name, p in rooms.items()],
            [
                GroupEntry(group.epoch, group.backend, [_entry(one) for one in group.members])
                for group in groups
            ],
        )
        _internal_kv_put(self._key, msgspec.msgpack.encode(record), namespace=_NAMESPACE)
        self._written = now

    def read(self) -> Record | None:
        """What was written last, if another launcher of this launch and configuration can go on
        with it."""
        body = _internal_kv_get(self._key, namespace=_NAMESPACE)
        if body is None:
            return None
        try:
            record = msgspec.msgpack.decode(body, type=Record)
        except msgspec.DecodeError as error:
            event(log, "ledger_not_read", logging.WARNING, error=error)
            return None
        fits = (record.launch_id, record.config) == (self.launch_id, self.config_digest)
        return record if fits else None

    def forget(self) -> None:
        _internal_kv_del(self._key, namespace=_NAMESPACE)


def _entry(member: Member) -> Entry:
    place = member.place
    return Entry(member.spec, member.ready, member.handle.key, place.placed.name, place.bundle)


def placed_of(room: Room, application: str) -> Placed:
    """Raises ResourceError if it is gone."""
    try:
        found = ray.util.get_placement_group(room.name)
    except ValueError:
        raise ResourceError(f"{room.name}: no such placement group") from None
    return Placed(room.requests, found, room.device, room.nodes, application, room.name)
