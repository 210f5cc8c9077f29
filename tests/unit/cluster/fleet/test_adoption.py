"""Record of a launcher's ranks, and their adoption by another launcher."""

import os
import time
from collections.abc import Collection
from typing import Any

import msgspec
import pytest
import ray

from actors.channels.local_process import own_identity
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from cluster.fleet import adoption, fleet_store
from cluster.fleet.fleet_store import FleetRecord, FleetStore, RoomRecord
from cluster.fleet.nodes import Node, RankPlacement, RankRequest
from cluster.fleet.rank_group import Member, RankBundle, RankGroup
from contracts.config import TandemConfig
from contracts.errors import ResourceError
from contracts.loading import load_config
from contracts.ranks import Group
from contracts.scaling import ScaleCheckpoint
from tests.support.process_identity import process_identity_of
from tests.support.started_ranks import NODE, StartedRank, rank_of, started_member

TOKEN = b"of this launch"
CONFIG = load_config(None, ["groups.expert_ranks=2"])


class Cluster:
    """Ray's GCS, and its actors and placement groups.

    kept: the store. removed: applications of which everything was killed. kept_names: what was
    exempt from the last kill.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.writes = 0
        self.removed: list[str] = []
        self.kept_names: set[str] = set()
        self.actors: dict[str, StartedRank] = {}
        self.rooms: set[str] = set()
        pop = self.kept.pop
        for name, function in (
            ("put", self._put),
            ("get", lambda key, namespace: self.kept.get(key)),
            ("del", lambda key, namespace: pop(key, None)),
        ):
            monkeypatch.setattr(fleet_store, f"_internal_kv_{name}", function)
        monkeypatch.setattr(adoption, "kill_orphans", self._kill_orphans)
        monkeypatch.setattr(adoption, "restore_placement", self._restore)
        monkeypatch.setattr(ray, "get_actor", self._actor)
        monkeypatch.setattr(adoption, "RayRank", lambda name, actor, key: actor)
        monkeypatch.setattr(adoption, "create_scrape_targets", lambda config: None)
        monkeypatch.setattr(adoption, "Fleet", lambda *arguments: arguments)

    def launch(self) -> list[RankGroup]:
        """Launch a group of three ranks and a planner, and save them."""
        seats = [Seat("cpu", "127.0.0.1", 1)]
        group_spec = GroupSpec(CONFIG, "folder", TOKEN, 3, "shm")
        specs = make_specs(group_spec, seats, seats * 2, seats)
        requests = [RankRequest(spec.group, spec.rank, {"CPU": 0.5}) for spec in specs]
        placed = RankPlacement(requests, None, "cpu", [NODE] * 4, "tandem", "tandem/room")
        self.rooms.add(placed.name)
        members = []
        for place, spec in enumerate(specs):
            key = f"{placed.name}/{spec.name}/1"
            members.append(started_member(spec, RankBundle(placed, place), key))
            self.actors[key] = rank_of(members[-1])
        groups = [RankGroup(members[:3], group_spec), RankGroup(members[3:], group_spec)]
        FleetStore("tandem", "one", CONFIG).write(TOKEN, groups)
        return groups

    def add(self, group: RankGroup) -> Member:
        """Add an attention rank in a placement group of its own."""
        spec = msgspec.structs.replace(group.members[0].spec, rank=1, epoch=4, attention_ranks=2)
        node = Node("b", "10.0.0.2", "10.0.0.2")
        request = RankRequest(Group.ATTENTION, 1, {"CPU": 0.5})
        own = RankPlacement([request], None, "cpu", [node], "tandem", "tandem/more")
        member = started_member(spec, RankBundle(own, 0), "tandem/more/attention-1")
        self.rooms.add("tandem/more")
        self.actors["tandem/more/attention-1"] = rank_of(member)
        group.join(member)
        return member

    def launched_by(self, pid: int) -> FleetStore:
        """Launch as another process, and return its store."""
        store = FleetStore("tandem", "one", CONFIG)
        store._writer = process_identity_of(pid)
        store.write(TOKEN, self.launch())
        return store

    def end_launcher(self) -> None:
        """Replace the writer of the record by a process that is gone."""
        for key, body in self.kept.items():
            record = msgspec.msgpack.decode(body, type=FleetRecord)
            gone = process_identity_of(os.getppid(), later_ticks=1)
            record = msgspec.structs.replace(record, writer=gone)
            self.kept[key] = msgspec.msgpack.encode(record)

    def adopted(self, launch_id: str = "one", config: TandemConfig = CONFIG) -> Any:
        """Return the arguments of the adopted `Fleet`, or None."""
        return adoption.adopt(config, "folder", FleetStore("tandem", launch_id, config))

    def _kill_orphans(self, application: str, kept: Collection[str] = ()) -> None:
        if kept:
            self.kept_names = set(kept)
        else:
            self.removed.append(application)

    def _put(self, key: bytes, value: bytes, namespace: bytes) -> None:
        self.writes += 1
        self.kept[key] = value

    def _actor(self, name: str, namespace: str) -> StartedRank:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _restore(self, room: RoomRecord, application: str) -> RankPlacement:
        if room.name not in self.rooms:
            raise ResourceError(f"{room.name}: no such placement group")
        return RankPlacement(room.requests, None, room.device, room.nodes, application, room.name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def attention_names(group: RankGroup) -> list[str]:
    return [one.name for one in group.of_kind(Group.ATTENTION)]


def test_new_launcher_adopts_the_same_ranks_in_the_same_places(cluster: Cluster) -> None:
    before = cluster.launch()
    silent = rank_of(before[0].members[1])
    silent.answers["identity"] = silent.death  # left to the supervisor
    token, groups, config, *_ = cluster.adopted()
    assert (token, config) == (TOKEN, CONFIG)
    for old, new in zip(before, groups, strict=True):
        assert (new.kind, new.epoch, new.backend) == (old.kind, old.epoch, old.backend)
        for one, other in zip(old.members, new.members, strict=True):
            assert (one.spec, one.ready) == (other.spec, other.ready)
            assert one.handle is other.handle
            assert one.place.bundle == other.place.bundle
            assert one.place.needs == other.place.needs
    assert not cluster.removed


def test_scaled_group_is_adopted_with_its_current_ranks(cluster: Cluster) -> None:
    groups = cluster.launch()
    added = cluster.add(groups[0])
    FleetStore("tandem", "one", CONFIG).write(TOKEN, groups)
    _, (found, _), *_ = cluster.adopted()
    assert attention_names(found) == ["attention-0", "attention-1"]
    (_, new) = found.of_kind(Group.ATTENTION)
    assert (new.place.placed.name, new.spec.attention_ranks) == ("tandem/more", 2)
    groups[0].members.remove(added)
    FleetStore("tandem", "one", CONFIG).write(TOKEN, groups)
    cluster.rooms.discard("tandem/more")
    _, (found, _), *_ = cluster.adopted()
    assert attention_names(found) == ["attention-0"]
    assert not cluster.removed


@pytest.mark.parametrize("present", ["all", "room", "nothing"])
def test_draining_rank_is_adopted_as_draining_if_it_is_present(
    cluster: Cluster, present: str
) -> None:
    groups = cluster.launch()
    groups[0].leave(cluster.add(groups[0]))
    FleetStore("tandem", "one", CONFIG).write(TOKEN, groups, ScaleCheckpoint(resumed=1))
    names = {"tandem/room", "tandem/more", *cluster.actors}
    if present == "nothing":
        cluster.rooms.discard("tandem/more")
    if present != "all":
        del cluster.actors["tandem/more/attention-1"]
    _, (found, _), _, _, _, scale = cluster.adopted()
    assert scale == ScaleCheckpoint(resumed=1)
    assert attention_names(found) == ["attention-0"]
    assert [one.name for one in found.draining] == ["attention-1"] * (present == "all")
    assert not cluster.removed
    assert cluster.kept_names == names, "all else is killed"


@pytest.mark.parametrize("other", ["launch", "configuration", "room", "garbage"])
def test_mismatching_record_is_removed_with_its_ranks(cluster: Cluster, other: str) -> None:
    cluster.launch()
    config = CONFIG
    if other == "configuration":
        config = load_config(None, ["groups.expert_ranks=1"])
    elif other == "room":
        cluster.rooms.clear()
    elif other == "garbage":
        cluster.kept.update(dict.fromkeys(cluster.kept, b"\xc1"))
    assert cluster.adopted("two" if other == "launch" else "one", config) is None
    assert cluster.removed == ["tandem"]
    assert not cluster.kept


@pytest.mark.parametrize(
    "fields", [{"rank": 7}, {"epoch": 2}, {"token": b"of another launch"}], ids=str
)
def test_rank_with_other_identity_is_not_adopted(cluster: Cluster, fields: dict[str, Any]) -> None:
    rank = rank_of(cluster.launch()[0].members[1])
    rank.spec = msgspec.structs.replace(rank.spec, **fields)
    assert cluster.adopted() is None
    assert cluster.removed == ["tandem"]


def test_only_changes_are_saved(cluster: Cluster) -> None:
    groups = cluster.launch()
    store = FleetStore("tandem", "one", CONFIG)
    member = groups[0].members[0]
    written = []
    for pid in (98, 98, 99):
        member.assign(member.spec, member.handle, msgspec.structs.replace(member.ready, pid=pid))
        store.write(TOKEN, groups)
        written.append(cluster.writes - 1)  # without that of the launch
    assert written == [1, 1, 2]
    record = store.read()
    assert record is not None
    assert record.groups[0].ranks[0].ready.pid == 99


def test_ranks_of_a_draining_launcher_are_kept_and_not_adopted(cluster: Cluster) -> None:
    """Serve has deployed the application anew: the previous replica completes its requests."""
    before = cluster.launched_by(os.getppid())
    before.end()
    assert cluster.adopted() is None, "although it is the same configuration"
    assert cluster.kept_names == {*cluster.actors, *cluster.rooms}
    before.write(TOKEN, cluster.launch())
    before.leave()
    record = FleetStore("tandem", "one", CONFIG).read()
    assert record is not None, "the previous launcher neither overwrites nor removes the new record"
    assert record.writer == own_identity()


def test_launcher_that_does_not_drain_is_awaited_until_it_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that reuses its pid does not count as the launcher."""
    cluster.launched_by(os.getppid())
    sleeps: list[float] = []

    def record_sleep(period_s: float) -> None:
        sleeps.append(period_s)
        cluster.end_launcher()

    monkeypatch.setattr(time, "sleep", record_sleep)
    assert FleetStore("tandem", "one", CONFIG).other() is not None
    assert cluster.adopted() is not None
    assert len(sleeps) == 1
    assert not cluster.removed
