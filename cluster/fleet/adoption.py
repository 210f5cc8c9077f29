"""A launcher takes up the ranks of one that has ended, or ends what it has left.

    ledger.py ─> rooms, actors ─> each says who it is ─> a Fleet under the same token
            what is in no ledger ends, a change that was under way is gone on with (resizing.py)
    no ledger, another launch or configuration, a room gone, a rank that is
        somebody else ─> all that bears the application's name ends: launch.py starts anew
        a launcher that lives and says that it ends: Serve has deployed the application anew
                      ─> its ranks are let alone, for they still answer what they have

A rank that is gone or says nothing is the supervisor's business, as always.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.ranks.remote import NAMESPACE, RayRank
from actors.ranks.rendezvous import GroupSpec
from cluster.fleet.fleet import Fleet
from cluster.fleet.fleet_store import (
    FleetRecord,
    FleetStore,
    GroupRecord,
    RankRecord,
    restore_placement,
)
from cluster.fleet.member import Member, RankBundle
from cluster.fleet.nodes import RankPlacement
from cluster.fleet.rank_group import RankGroup
from cluster.fleet.scrape_targets import create_scrape_targets
from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError, TandemError
from contracts.logs import event

log = logging.getLogger("tandem.fleet")

REPLY_TIMEOUT_S = 5.0  # for all ranks together to say who they are
ENDING_S = 60.0  # for a launcher that lives to say that it ends, or to be gone
_POLL_PERIOD_S = 0.2


def adopt(config: TandemConfig, model_folder: str, ledger: FleetStore) -> Fleet | None:
    """The fleet that another launcher of this application has left; None: there is none, and
    nothing of it any more but what ends by itself."""
    ending = _ending(ledger)
    record = ledger.read()
    if record is not None:
        try:
            kill_orphans(ledger.application, record.names)
            groups = _groups(config, model_folder, record, ledger.application)
            event(log, "fleet_adopted", logging.WARNING, ranks=sum(len(g.members) for g in groups))
            scrape_targets = create_scrape_targets(config)
            return Fleet(record.token, groups, scrape_targets, config, ledger, record.scale)
        except (TandemError, RayError) as error:
            event(log, "fleet_adoption_failed", logging.ERROR, error=error)
    kill_orphans(ledger.application, set() if ending is None else ending.names)
    ledger.forget()
    return None


def _ending(ledger: FleetStore) -> FleetRecord | None:
    """What a launcher that lives says it ends. One that says nothing is killed, or hangs: it is
    waited for, and then taken for gone."""
    end_s = time.monotonic() + ENDING_S
    while (record := ledger.other()) is not None and time.monotonic() < end_s:
        if record.is_ending:
            event(
                log,
                "previous_launcher_draining",
                ranks=sum(len(one.ranks) for one in record.groups),
            )
            return record
        time.sleep(_POLL_PERIOD_S)
    return None


def kill_orphans(application: str, kept: Collection[str] = ()) -> None:
    """Ends every rank of an application, and gives back all room that it has taken. kept: names of
    those that stay."""
    prefix = f"{application}/"

    def is_orphan(name: str) -> bool:
        return name.startswith(prefix) and name not in kept

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and is_orphan(actor["name"]):
            event(log, "orphan_killed", logging.WARNING, name=actor["name"])
            with contextlib.suppress(ValueError):  # it has ended by itself meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
    for id, room in ray.util.placement_group_table().items():
        if is_orphan(room["name"]) and room["state"] != "REMOVED":
            event(log, "orphan_killed", logging.WARNING, name=room["name"])
            found = PlacementGroup(PlacementGroupID(bytes.fromhex(id)))
            ray.util.remove_placement_group(found)


def _groups(
    config: TandemConfig, model_folder: str, record: FleetRecord, application: str
) -> list[RankGroup]:
    """Raises LaunchError for a rank that is somebody else, ResourceError for room that is gone."""
    used = {entry.room for group in record.groups for entry in group.ranks}
    rooms: dict[str, RankPlacement] = {}
    for room in record.rooms:
        with contextlib.suppress(*() if room.name in used else (ResourceError,)):
            rooms[room.name] = restore_placement(room, application)
    found = [[_member(entry, rooms) for entry in group.ranks] for group in record.groups]
    _check_identities([member for members in found for member in members], record.token)
    groups = [
        _group(config, model_folder, record, members, entry)
        for members, entry in zip(found, record.groups, strict=True)
    ]
    for group, entry in zip(groups, record.groups, strict=True):
        draining = [_found(one, rooms) for one in entry.draining if one.room in rooms]
        group.draining = [one for one in draining if one is not None]
    return groups


def _group(
    config: TandemConfig,
    model_folder: str,
    record: FleetRecord,
    members: list[Member],
    entry: GroupRecord,
) -> RankGroup:
    placements = {member.spec.group: member.spec.placement for member in members}
    token, epoch = record.token, entry.epoch
    group_spec = GroupSpec(config, model_folder, token, epoch, entry.backend, None, placements)
    return RankGroup(members, group_spec)


def _member(entry: RankRecord, rooms: dict[str, RankPlacement]) -> Member:
    """In the place of one whose actor is gone: a process that knows nothing. It says so when it is
    asked for its status, and is replaced."""
    found = _found(entry, rooms)
    if found is not None:
        return found
    place = RankBundle(rooms[entry.room], entry.bundle)
    return Member(entry.spec, place, place.start(), entry.ready)


def _found(entry: RankRecord, rooms: dict[str, RankPlacement]) -> Member | None:
    """None: its actor is gone."""
    try:
        actor = ray.get_actor(entry.actor, namespace=NAMESPACE)
    except ValueError:
        return None
    handle = RayRank(entry.spec.name, actor, entry.actor)
    return Member(entry.spec, RankBundle(rooms[entry.room], entry.bundle), handle, entry.ready)


def _check_identities(members: list[Member], token: bytes) -> None:
    """Raises LaunchError for one who is somebody else. Who does not answer is asked again by the
    supervisor."""
    pending = [(member, member.handle.call("identity")) for member in members]
    digest = hashlib.sha256(token).digest()
    end_s = time.monotonic() + REPLY_TIMEOUT_S
    for member, answer in pending:
        found = _answer(answer, end_s)
        expected = (member.name, member.spec.epoch, digest)
        if found is not None and tuple(found) != expected:
            raise LaunchError(f"{member.name} is {found[0]} of epoch {found[1]}: not ours")


def _answer(answer: Future[Any], end_s: float) -> Any:
    try:
        return answer.result(max(0.0, end_s - time.monotonic()))
    except (TandemError, RayError, FutureTimeoutError):
        return None
