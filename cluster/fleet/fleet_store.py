"""Record of a launcher's ranks in Ray's GCS, for adoption by its successor."""

import hashlib
import logging
from collections.abc import Sequence

import msgspec
import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from actors.channels.local_process import is_alive, own_identity
from cluster.fleet.nodes import Node, RankPlacement, RankRequest
from cluster.fleet.rank_group import Member, RankGroup
from contracts.config import TandemConfig
from contracts.errors import ResourceError
from contracts.logs import event
from contracts.ranks import RankReady, RankSpec
from contracts.scaling import ScaleCheckpoint

log = logging.getLogger("tandem.fleet")

_NAMESPACE = b"tandem"


class RoomRecord(msgspec.Struct, frozen=True):
    name: str
    device: str
    requests: list[RankRequest]
    nodes: list[Node]


class RankRecord(msgspec.Struct, frozen=True):
    """A rank. actor: its name in Ray. room, bundle: its place."""

    spec: RankSpec
    ready: RankReady
    actor: str
    room: str
    bundle: int


class GroupRecord(msgspec.Struct, frozen=True):
    """A group. draining: removed members that have not ended."""

    epoch: int
    backend: str
    ranks: list[RankRecord]
    draining: list[RankRecord] = []


class FleetRecord(msgspec.Struct, frozen=True):
    """Record of all ranks.

    config: digest of the launch configuration. scale: the last change of the number of ranks.
    writer: process identity of the launcher. is_ending: the launcher drains its ranks and ends.
    """

    launch_id: str
    config: bytes
    token: bytes
    rooms: list[RoomRecord]
    groups: list[GroupRecord]
    scale: ScaleCheckpoint = ScaleCheckpoint()
    writer: bytes = b""
    is_ending: bool = False

    @property
    def names(self) -> set[str]:
        actors = {one.actor for group in self.groups for one in (*group.ranks, *group.draining)}
        return actors | {room.name for room in self.rooms}


class FleetStore:
    """Store of one application, for one thread at a time. launch_id: id of the deployment."""

    def __init__(self, application: str, launch_id: str, config: TandemConfig) -> None:
        self.application, self.launch_id = application, launch_id
        self.config_digest = hashlib.sha256(msgspec.json.encode(config)).digest()
        self._key = f"fleet/{application}".encode()
        self._written = b""
        self._is_ending = False
        self._writer = own_identity()

    def write(
        self,
        token: bytes,
        groups: Sequence[RankGroup],
        scale: ScaleCheckpoint = ScaleCheckpoint(),  # noqa: B008 - frozen
    ) -> None:
        """Write the current state, if it has changed and `end` was not called."""
        body = msgspec.msgpack.encode(self._record(token, groups, scale))
        if body != self._written and not self._is_ending:
            _internal_kv_put(self._key, body, namespace=_NAMESPACE)
            self._written = body

    def _record(
        self, token: bytes, groups: Sequence[RankGroup], scale: ScaleCheckpoint
    ) -> FleetRecord:
        entries = [_group_entry(group) for group in groups]
        members = [one for group in groups for one in (*group.members, *group.draining)]
        rooms = {one.place.placed.name: one.place.placed for one in members}
        return FleetRecord(
            self.launch_id,
            self.config_digest,
            token,
            [RoomRecord(name, p.device, p.requests, p.nodes) for name, p in rooms.items()],
            entries,
            scale,
            self._writer,
        )

    def end(self) -> None:
        """Mark the record as ending, so that no launcher adopts it. Later writes have no effect."""
        self._is_ending = True
        record = self.latest()
        if record is not None and not self._is_others(record):
            ending = msgspec.structs.replace(record, is_ending=True)
            _internal_kv_put(self._key, msgspec.msgpack.encode(ending), namespace=_NAMESPACE)

    def other(self) -> FleetRecord | None:
        """Return the record of another live launcher."""
        record = self.latest()
        return record if record is not None and self._is_others(record) else None

    def read(self) -> FleetRecord | None:
        """Return the record if it belongs to this launch and configuration and can be adopted."""
        record = self.latest()
        if record is None or record.is_ending:
            return None
        fits = (record.launch_id, record.config) == (self.launch_id, self.config_digest)
        return record if fits else None

    def latest(self) -> FleetRecord | None:
        body = _internal_kv_get(self._key, namespace=_NAMESPACE)
        if body is None:
            return None
        try:
            return msgspec.msgpack.decode(body, type=FleetRecord)
        except msgspec.DecodeError as error:
            event(log, "fleet_record_read_failed", logging.WARNING, error=error)
            return None

    def leave(self) -> None:
        """Delete the record, unless another launcher wrote it."""
        record = self.latest()
        if record is None or record.writer == self._writer:
            self.forget()

    def _is_others(self, record: FleetRecord) -> bool:
        return record.writer != self._writer and is_alive(record.writer)

    def forget(self) -> None:
        _internal_kv_del(self._key, namespace=_NAMESPACE)


def _group_entry(group: RankGroup) -> GroupRecord:
    ranks = group.members  # read before `draining`: no rank is missed then
    draining = [one for one in group.draining if one not in ranks]
    return GroupRecord(
        group.epoch,
        group.backend,
        [_entry(one) for one in ranks],
        [_entry(one) for one in draining],
    )


def _entry(member: Member) -> RankRecord:
    place = member.place
    return RankRecord(member.spec, member.ready, member.handle.key, place.placed.name, place.bundle)


def restore_placement(room: RoomRecord, application: str) -> RankPlacement:
    """Return the placement of a record. Raises ResourceError if the placement group is gone."""
    try:
        found = ray.util.get_placement_group(room.name)
    except ValueError:
        raise ResourceError(f"{room.name}: no such placement group") from None
    return RankPlacement(room.requests, found, room.device, room.nodes, application, room.name)
