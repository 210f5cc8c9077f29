"""Adoption of a previous launcher's ranks, or their removal.

    FleetStore ─> placements, actors ─> each rank confirms its identity ─> Fleet with the same token
            ranks not in the record are killed; a scale in progress resumes (resizing.py)
    no record, another launch or configuration, a missing placement group,
        a foreign rank ─> everything with the application's name is killed; launch.py starts anew
    the previous launcher lives and is draining (redeployed by Serve)
        ─> its ranks stay, because they still answer requests

Lost and silent ranks are left to the supervisor.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Collection

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.ranks.remote import NAMESPACE, RayRank
from actors.ranks.rendezvous import GroupSpec
from cluster.fleet.fleet import Fleet
from cluster.fleet.fleet_store import FleetRecord, FleetStore, RankRecord, restore_placement
from cluster.fleet.metrics_endpoint import create_scrape_targets
from cluster.fleet.nodes import RankPlacement
from cluster.fleet.rank_group import Member, RankBundle, RankGroup
from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError, TandemError
from contracts.logs import event

log = logging.getLogger("tandem.fleet")

REPLY_TIMEOUT_S = 5.0  # for the identities of all ranks
ENDING_S = 60.0  # for a live launcher to report that it is draining, or to end
_POLL_PERIOD_S = 0.2


def adopt(config: TandemConfig, model_folder: str, store: FleetStore) -> Fleet | None:
    """Return the fleet of a previous launcher of this application, or None if there is none.

    On None nothing of the application is left, except what is draining by itself.
    """
    ending = _ending(store)
    record = store.read()
    if record is not None:
        try:
            kill_orphans(store.application, record.names)
            groups = _groups(config, model_folder, record, store.application)
            event(log, "fleet_adopted", logging.WARNING, ranks=sum(len(g.members) for g in groups))
            targets = create_scrape_targets(config)
            return Fleet(record.token, groups, config, targets, store, record.scale)
        except (TandemError, RayError) as error:
            event(log, "fleet_adoption_failed", logging.ERROR, error=error)
    kill_orphans(store.application, set() if ending is None else ending.names)
    store.forget()
    return None


def _ending(store: FleetStore) -> FleetRecord | None:
    """Return the record of a live launcher that is draining.

    Waits for a launcher that does not state it; after ENDING_S it counts as dead.
    """
    end_s = time.monotonic() + ENDING_S
    while (record := store.other()) is not None and time.monotonic() < end_s:
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
    """Kill all ranks of an application and release its placement groups, except names in `kept`."""
    prefix = f"{application}/"

    def is_orphan(name: str) -> bool:
        return name.startswith(prefix) and name not in kept

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and is_orphan(actor["name"]):
            event(log, "orphan_killed", logging.WARNING, name=actor["name"])
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
    for id, room in ray.util.placement_group_table().items():
        if is_orphan(room["name"]) and room["state"] != "REMOVED":
            event(log, "orphan_killed", logging.WARNING, name=room["name"])
            found = PlacementGroup(PlacementGroupID(bytes.fromhex(id)))
            ray.util.remove_placement_group(found)


def _groups(
    config: TandemConfig, model_folder: str, record: FleetRecord, application: str
) -> list[RankGroup]:
    """Restore the groups.

    Raises LaunchError for a foreign rank, ResourceError for a lost placement.
    """
    used = {entry.room for group in record.groups for entry in group.ranks}
    rooms: dict[str, RankPlacement] = {}
    for room in record.rooms:
        with contextlib.suppress(*() if room.name in used else (ResourceError,)):
            rooms[room.name] = restore_placement(room, application)
    found = [[_member(entry, rooms) for entry in group.ranks] for group in record.groups]
    _check_identities([member for members in found for member in members], record.token)
    groups = []
    for members, entry in zip(found, record.groups, strict=True):
        placements = {member.spec.group: member.spec.placement for member in members}
        settings = (config, model_folder, record.token, entry.epoch, entry.backend)
        group = RankGroup(members, GroupSpec(*settings, None, placements))
        draining = [_found(one, rooms) for one in entry.draining if one.room in rooms]
        group.draining = [one for one in draining if one is not None]
        groups.append(group)
    return groups


def _member(entry: RankRecord, rooms: dict[str, RankPlacement]) -> Member:
    """Restore a rank.

    If its actor is dead, start an empty process there; supervision replaces it.
    """
    found = _found(entry, rooms)
    if found is not None:
        return found
    place = RankBundle(rooms[entry.room], entry.bundle)
    return Member(entry.spec, place, place.start(), entry.ready)


def _found(entry: RankRecord, rooms: dict[str, RankPlacement]) -> Member | None:
    """Return the member, or None if its actor is dead."""
    try:
        actor = ray.get_actor(entry.actor, namespace=NAMESPACE)
    except ValueError:
        return None
    handle = RayRank(entry.spec.name, actor, entry.actor)
    return Member(entry.spec, RankBundle(rooms[entry.room], entry.bundle), handle, entry.ready)


def _check_identities(members: list[Member], token: bytes) -> None:
    """Raise LaunchError for a foreign rank. Silent ranks are left to the supervisor."""
    pending = [(member, member.handle.call("identity")) for member in members]
    digest = hashlib.sha256(token).digest()
    end_s = time.monotonic() + REPLY_TIMEOUT_S
    for member, answer in pending:
        try:
            found = answer.result(max(0.0, end_s - time.monotonic()))
        except (TandemError, RayError, TimeoutError):
            continue
        if tuple(found) != (member.name, member.spec.epoch, digest):
            raise LaunchError(f"{member.name} is {found[0]} of epoch {found[1]}: not ours")
