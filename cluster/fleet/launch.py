"""Launch of all ranks of a configuration.

Each pipeline has one placement group and is formed at once. The planner is formed with the
attention and expert ranks but is a group of its own, because it is replaced alone.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import ray

from actors.channels.handshake import new_token
from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec, Seat, form_group, make_specs
from cluster.fleet.fleet import CLOSE_TIMEOUT_S, Fleet, stop_ranks
from cluster.fleet.fleet_store import FleetStore
from cluster.fleet.hardware import load_hardware
from cluster.fleet.metrics_endpoint import create_scrape_targets
from cluster.fleet.nodes import (
    RankPlacement,
    check_resources,
    place_ranks,
    rank_requests,
    resolve_backend,
    resolve_device,
    seat_ranks,
)
from cluster.fleet.placements import configured_placements
from cluster.fleet.rank_group import Member, RankBundle, RankGroup, kill_all
from contracts.config import TandemConfig
from contracts.logs import event
from contracts.ranks import Group
from models.spec.model import read_spec

log = logging.getLogger("tandem.fleet")

FIRST_EPOCH = 1
PIPELINES = ((Group.ATTENTION, Group.EXPERT), (Group.PREFILL,))


def launch(
    config: TandemConfig,
    model_folder: str,
    store: FleetStore | None = None,
    *,
    place_timeout_s: float | None = None,
) -> Fleet:
    """Start all ranks on the connected Ray cluster.

    store: record of the ranks, which then outlive this process; None: they end with it.
    place_timeout_s: None: groups.ready_timeout_s.
    Raises ConfigError for an invalid placement file, ResourceError, CheckpointError and the errors
    of `launch_pipeline`; nothing is left running then.
    """
    token = new_token()
    folder = Path(model_folder)
    placements = configured_placements(config, folder, read_spec(folder))
    backend = config.channel.backend
    group_spec = GroupSpec(config, model_folder, token, FIRST_EPOCH, backend, None, placements)
    placing = config
    if place_timeout_s is not None:
        groups = msgspec.structs.replace(config.groups, ready_timeout_s=place_timeout_s)
        placing = msgspec.structs.replace(config, groups=groups)
    places = _place(placing, "" if store is None else store.application)
    seats = seat_ranks(places, config)
    with ThreadPoolExecutor(len(places)) as threads:  # most of the time is loading
        launched = [
            threads.submit(launch_pipeline, group_spec, *each)
            for each in zip(places, seats, strict=True)
        ]
    errors = [error for future in launched if (error := future.exception())]
    formed = [group for each in launched if not each.exception() for group in each.result()]
    if errors:
        stop_ranks(formed, CLOSE_TIMEOUT_S)
        raise errors[0]
    return Fleet(token, formed, config, create_scrape_targets(config), store)


def _place(config: TandemConfig, application: str) -> list[RankPlacement]:
    """Place each configured pipeline. Raises ResourceError; nothing is placed then.

    Each pipeline needs the other's ranks, which share the memory of its nodes.
    """
    available = ray.cluster_resources()
    device = resolve_device(config, available)
    if config.http.front == "direct":  # else nodes may join, and an autoscaler adds them
        check_resources(rank_requests(config, device), available)
    places: list[RankPlacement] = []
    try:
        for wanted in PIPELINES:
            if requests := rank_requests(config, device, wanted):
                places.append(place_ranks(requests, config, device, application))
    except BaseException:
        for one in places:
            one.release()
        raise
    return places


def launch_pipeline(
    common: GroupSpec, placed: RankPlacement, seats: Sequence[Seat]
) -> list[RankGroup]:
    """Start and form the ranks of one placement.

    common: settings of all pipelines. seats: of the ranks.

    Raises ConfigError for an invalid hardware file, the first error of a rank, or LaunchError after
    groups.ready_timeout_s; nothing is left running or placed then.
    """
    handles: list[RayRank] = []
    try:
        group_spec = _formation(common, placed)
        handles = [placed.start(bundle) for bundle in range(len(placed.requests))]
        seats_of: defaultdict[Group, list[Seat]] = defaultdict(list)
        for request, seat in zip(placed.requests, seats, strict=True):
            seats_of[request.group].append(seat)
        order = (Group.ATTENTION, Group.EXPERT, Group.PLANNER, Group.PREFILL)
        specs = make_specs(group_spec, *(seats_of[group] for group in order))
        ready = form_group(specs, handles, timeout_s=common.config.groups.ready_timeout_s)
    except BaseException:
        kill_all(handles)
        placed.release()
        raise
    epoch, backend = group_spec.epoch, group_spec.backend
    if seats_of[Group.PREFILL]:
        event(log, "prefill_ready", epoch=epoch, backend=backend, workers=len(specs))
    else:
        event(log, "group_ready", epoch=epoch, backend=backend, ranks=len(specs))
    found = [RankBundle(placed, bundle) for bundle in range(len(specs))]
    members = [Member(*each) for each in zip(specs, found, handles, ready, strict=True)]
    planners = [member for member in members if member.spec.group is Group.PLANNER]
    ranks = [member for member in members if member.spec.group is not Group.PLANNER]
    return [RankGroup(some, group_spec) for some in (ranks, planners) if some]


def _formation(common: GroupSpec, placed: RankPlacement) -> GroupSpec:
    """Add the settings that depend on the nodes, and the planner's hardware profile."""
    config, hosts = common.config, [node.host for node in placed.nodes]
    name = config.planner.hardware
    plans = any(request.group is Group.PLANNER for request in placed.requests)
    channel = resolve_backend(config, placed.device, hosts)
    event(log, "channel_selected", backend=channel.backend, reason=channel.reason)
    hardware = load_hardware(name) if plans and name else None
    return common._replace(backend=channel.backend, hardware=hardware)
