"""What a launcher writes down of its ranks, and who may take them over with it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import ray

from actors.channels.local_process import own_identity
from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from cluster.fleet import adoption, fleet_store
from cluster.fleet.fleet_store import FleetRecord, FleetStore, RoomRecord
from cluster.fleet.member import Member, RankBundle
from cluster.fleet.nodes import Node, RankPlacement, RankRequest
from cluster.fleet.rank_group import RankGroup
from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError
from contracts.loading import load_config
from contracts.ranks import Group, RankReady, RankSpec
from contracts.scaling import ScaleCheckpoint
from tests.support.process_identity import process_identity_of

TOKEN = b"of this launch"
CONFIG = load_config(None, ["groups.expert_ranks=2"])


class FakeRank(RayRank):
    """Says who it is; silent: nothing."""

    def __init__(self, spec: RankSpec, key: str) -> None:
        super().__init__(spec.name, self, key)
        self.spec = spec
        self.silent = False

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.silent:
            answer.set_exception(LaunchError(f"{self.name}: its actor died"))
        elif method == "identity":
            digest = hashlib.sha256(self.spec.token).digest()
            answer.set_result((self.spec.name, self.spec.epoch, digest))
        return answer


class FakePlaced(RankPlacement):
    def start(self, bundle: int) -> RayRank:
        """A process that knows nothing."""
        raise AssertionError("every rank of these tests is there")


class FakeFleet(tuple[Any, ...]):
    """What it is made of."""

    def __new__(cls, *arguments: Any) -> FakeFleet:
        return super().__new__(cls, arguments)


class Cluster:
    """Ray's GCS, and the actors and rooms that it knows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.writes = 0
        self.remnants_ended: list[str] = []
        self.actors: dict[str, FakeRank] = {}
        self.rooms: set[str] = set()
        monkeypatch.setattr(fleet_store, "_internal_kv_put", self._put)
        monkeypatch.setattr(
            fleet_store, "_internal_kv_get", lambda key, namespace: self.kept.get(key)
        )
        monkeypatch.setattr(
            fleet_store, "_internal_kv_del", lambda key, namespace: self.kept.pop(key, None)
        )
        self.kept_names: set[str] = set()
        monkeypatch.setattr(adoption, "kill_orphans", self._end_remnants)
        monkeypatch.setattr(adoption, "restore_placement", self._room)
        monkeypatch.setattr(ray, "get_actor", self._actor)
        monkeypatch.setattr(adoption, "RayRank", lambda name, actor, key: actor)
        monkeypatch.setattr(adoption, "create_scrape_targets", lambda config: None)
        monkeypatch.setattr(adoption, "Fleet", FakeFleet)

    def launch(self, launch_id: str = "one") -> list[RankGroup]:
        seats = [Seat("cpu", "127.0.0.1", 1)]
        group_spec = GroupSpec(CONFIG, "folder", TOKEN, 3, "shm")
        specs = make_specs(group_spec, seats, seats * 2, seats)
        requests = [RankRequest(spec.group, spec.rank, {"CPU": 0.5}) for spec in specs]
        node = Node("a", "10.0.0.1", "127.0.0.1")
        placed = FakePlaced(requests, None, "cpu", [node] * 4, "tandem", "tandem/room")
        self.rooms.add("tandem/room")
        members = []
        for place, spec in enumerate(specs):
            key = f"tandem/room/{spec.name}/1"
            self.actors[key] = rank = FakeRank(spec, key)
            ready = RankReady(name=spec.name, pid=place, channel_address="tcp:here")
            members.append(Member(spec, RankBundle(placed, place), rank, ready))
        groups = [RankGroup(members[:3], group_spec), RankGroup(members[3:], group_spec)]
        FleetStore("tandem", launch_id, CONFIG).write(TOKEN, groups)
        return groups

    def launched_by(self, pid: int) -> FleetStore:
        """The ledger of another process, which has launched."""
        book = FleetStore("tandem", "one", CONFIG)
        book._writer = process_identity_of(pid)
        book.write(TOKEN, self.launch())
        return book

    def dies(self) -> None:
        """Whoever has launched."""
        for key, body in self.kept.items():
            record = msgspec.msgpack.decode(body, type=FleetRecord)
            gone = process_identity_of(os.getppid(), later_ticks=1)
            record = msgspec.structs.replace(record, writer=gone)
            self.kept[key] = msgspec.msgpack.encode(record)

    def adopted(self, launch_id: str = "one", config: TandemConfig = CONFIG) -> Any:
        return adoption.adopt(config, "folder", FleetStore("tandem", launch_id, config))

    def _end_remnants(self, application: str, kept: Collection[str] = ()) -> None:
        if kept:
            self.kept_names = set(kept)
        else:
            self.remnants_ended.append(application)

    def _put(self, key: bytes, value: bytes, namespace: bytes) -> None:
        self.writes += 1
        self.kept[key] = value

    def _actor(self, name: str, namespace: str) -> FakeRank:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _room(self, room: RoomRecord, application: str) -> RankPlacement:
        if room.name not in self.rooms:
            raise ResourceError(f"{room.name}: no such placement group")
        return FakePlaced(room.requests, None, room.device, room.nodes, application, room.name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_another_launcher_has_the_same_ranks_in_the_same_places(cluster: Cluster) -> None:
    before = cluster.launch()
    token, groups, _, config, *_ = cluster.adopted()
    assert (token, config) == (TOKEN, CONFIG)
    for old, new in zip(before, groups, strict=True):
        assert (new.kind, new.epoch, new.backend) == (old.kind, old.epoch, old.backend)
        for one, other in zip(old.members, new.members, strict=True):
            assert (one.spec, one.ready) == (other.spec, other.ready)
            assert one.handle is other.handle
            assert one.place.bundle == other.place.bundle
            assert one.place.needs == other.place.needs
    assert not cluster.remnants_ended


def test_a_group_that_was_scaled_is_taken_over_as_it_is(cluster: Cluster) -> None:
    """Not as it was configured: with one more attention rank, in a room of its own."""
    groups = cluster.launch()
    attention, first = groups[0], groups[0].members[0]
    spec = msgspec.structs.replace(first.spec, rank=1, epoch=4, attention_ranks=2)
    node = Node("b", "10.0.0.2", "10.0.0.2")
    request = RankRequest(Group.ATTENTION, 1, {"CPU": 0.5})
    own = FakePlaced([request], None, "cpu", [node], "tandem", "tandem/more")
    cluster.rooms.add("tandem/more")
    cluster.actors["tandem/more/attention-1"] = rank = FakeRank(spec, "tandem/more/attention-1")
    ready = RankReady(name=spec.name, pid=9, channel_address="tcp:there")
    attention.join(Member(spec, RankBundle(own, 0), rank, ready))
    attention.next_epoch()
    FleetStore("tandem", "one", CONFIG).write(TOKEN, groups)
    _, (found, _), *_ = cluster.adopted()
    assert [one.name for one in found.of_kind(Group.ATTENTION)] == ["attention-0", "attention-1"]
    (_, new) = found.of_kind(Group.ATTENTION)
    assert (new.place.placed.name, new.spec.attention_ranks) == ("tandem/more", 2)
    attention.leave(attention.of_kind(Group.ATTENTION)[1])
    FleetStore("tandem", "one", CONFIG).write(TOKEN, groups)
    cluster.rooms.discard("tandem/more")
    _, (found, _), *_ = cluster.adopted()
    assert [one.name for one in found.of_kind(Group.ATTENTION)] == ["attention-0"]
    assert not cluster.remnants_ended


@pytest.mark.parametrize("there", ["all", "room", "nothing"])
def test_a_rank_that_was_leaving_is_taken_over_as_one_where_it_is_there(
    cluster: Cluster, there: str
) -> None:
    """Nobody starts another in its place."""
    groups = cluster.launch()
    attention, first = groups[0], groups[0].members[0]
    node = Node("b", "10.0.0.2", "10.0.0.2")
    request = RankRequest(Group.ATTENTION, 1, {"CPU": 0.5})
    own = FakePlaced([request], None, "cpu", [node], "tandem", "tandem/more")
    spec = msgspec.structs.replace(first.spec, rank=1, epoch=4)
    ready = RankReady(name=spec.name, pid=9, channel_address="tcp:there")
    draining = Member(spec, RankBundle(own, 0), FakeRank(spec, "tandem/more/attention-1"), ready)
    attention.join(draining)
    attention.leave(draining)
    FleetStore("tandem", "one", CONFIG).write(TOKEN, groups, ScaleCheckpoint(resumed=1))
    if there != "nothing":
        cluster.rooms.add("tandem/more")
    if there == "all":
        cluster.actors["tandem/more/attention-1"] = FakeRank(spec, "tandem/more/attention-1")
    _, (found, _), _, _, _, kept = cluster.adopted()
    assert kept == ScaleCheckpoint(resumed=1)
    assert [one.name for one in found.of_kind(Group.ATTENTION)] == ["attention-0"]
    assert [one.name for one in found.draining] == ["attention-1"] * (there == "all")
    assert not cluster.remnants_ended
    names = {"tandem/room", "tandem/more", "tandem/more/attention-1", *cluster.actors}
    assert cluster.kept_names == names, "all else is ended"


@pytest.mark.parametrize("other", ["launch", "configuration", "room", "garbage"])
def test_what_does_not_fit_is_ended_and_not_taken_over(cluster: Cluster, other: str) -> None:
    cluster.launch()
    config = CONFIG
    if other == "configuration":
        config = load_config(None, ["groups.expert_ranks=1"])
    elif other == "room":
        cluster.rooms.clear()
    elif other == "garbage":
        cluster.kept = dict.fromkeys(cluster.kept, b"\xc1")
    assert cluster.adopted("two" if other == "launch" else "one", config) is None
    assert cluster.remnants_ended == ["tandem"]
    assert not cluster.kept


@pytest.mark.parametrize("field", ["rank", "epoch", "token"])
def test_rank_with_other_identity_is_not_adopted(cluster: Cluster, field: str) -> None:
    groups = cluster.launch()
    rank = groups[0].members[1].handle
    assert isinstance(rank, FakeRank)
    value: Any = {"rank": 7, "epoch": 2, "token": b"of another launch"}[field]
    rank.spec = msgspec.structs.replace(rank.spec, **{field: value})
    assert cluster.adopted() is None
    assert cluster.remnants_ended == ["tandem"]


def test_a_rank_that_does_not_answer_is_the_supervisors_business(cluster: Cluster) -> None:
    rank = cluster.launch()[0].members[1].handle
    assert isinstance(rank, FakeRank)
    rank.silent = True
    assert cluster.adopted() is not None


def test_only_changes_are_saved(cluster: Cluster) -> None:
    groups = cluster.launch()
    book = FleetStore("tandem", "one", CONFIG)
    book.write(TOKEN, groups)
    written = cluster.writes
    book.write(TOKEN, groups)
    assert cluster.writes == written
    member = groups[0].members[0]
    spec = msgspec.structs.replace(member.spec, epoch=4)
    member.assign(spec, member.handle, msgspec.structs.replace(member.ready, pid=99))
    book.write(TOKEN, groups)
    assert cluster.writes == written + 1
    record = book.read()
    assert isinstance(record, FleetRecord)
    assert record.groups[0].ranks[0].ready.pid == 99
    assert record.groups[0].ranks[0].spec.group is Group.ATTENTION
    book.forget()
    assert book.read() is None


def test_ranks_of_a_launcher_that_lives_and_ends_are_let_alone(cluster: Cluster) -> None:
    """Serve has deployed the application anew: the replica before answers what it has."""
    before = cluster.launched_by(os.getppid())
    before.end()
    assert cluster.adopted() is None, "although it is the same configuration"
    assert cluster.kept_names == {*cluster.actors, *cluster.rooms}
    groups = cluster.launch()
    before.write(TOKEN, groups)
    before.leave()
    record = FleetStore("tandem", "one", CONFIG).read()
    assert record is not None, "the one before neither writes over the next one's, nor forgets it"
    assert record.writer == own_identity()


def test_launcher_with_reused_pid_counts_as_dead(cluster: Cluster) -> None:
    cluster.launched_by(os.getppid())
    book = FleetStore("tandem", "one", CONFIG)
    assert book.other() is not None
    cluster.dies()
    assert book.other() is None
    assert cluster.adopted() is not None


def test_a_launcher_that_lives_and_does_not_end_is_waited_for_until_it_is_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.launched_by(os.getppid())
    sleeps: list[float] = []

    def record_sleep(period_s: float) -> None:
        sleeps.append(period_s)
        cluster.dies()

    monkeypatch.setattr(time, "sleep", record_sleep)
    assert cluster.adopted() is not None
    assert len(sleeps) == 1
    assert not cluster.remnants_ended
