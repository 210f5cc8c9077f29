"""Placement of ranks on a Ray cluster: resources, placement groups, nodes."""

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray._private.state import state
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.ranks.remote import NAMESPACE, OrphanGuardShell, RayRank, rank_class
from actors.ranks.rendezvous import Seat
from actors.ranks.shell import WorkerShell
from contracts.config import GroupsConfig, TandemConfig
from contracts.device_modes import check_device
from contracts.errors import ResourceError
from contracts.ranks import Group, rank_name

_NODE_SHARE = 0.001  # of the resource "node:<ip>"; every Ray node has one


class RankRequest(NamedTuple):
    """A rank and the Ray resources that it requests."""

    group: Group
    rank: int
    resources: dict[str, float]


def resolve_device(config: TandemConfig, available: dict[str, float]) -> str:
    """Return "cuda" or "cpu". "auto" selects GPUs if there are enough for all ranks.

    Raises ConfigError for a mode that does not run there.
    """
    device, groups = config.groups.device, config.groups
    if device == "auto":
        has_gpus = available.get("GPU", 0) >= groups.ranks * gpus_per_rank(config)
        device = "cuda" if has_gpus else "cpu"
    check_device(config, device)
    return device


def gpus_per_rank(config: TandemConfig) -> float:
    """Return 1, or an equal part of one GPU if CUDA IPC channels share it."""
    return 1.0 / config.groups.ranks if config.channel.backend == "ipc" else 1.0


class ChannelChoice(NamedTuple):
    backend: str
    reason: str


def resolve_backend(config: TandemConfig, device: str, hosts: Sequence[str]) -> ChannelChoice:
    """Return the channel backend for the nodes of the ranks."""
    if config.channel.backend != "auto":
        return ChannelChoice(config.channel.backend, "channel.backend names it")
    nodes = len(set(hosts))
    if device == "cuda" and nodes == 1:
        return ChannelChoice("ipc", "one node: copy engines move payloads, which takes no SMs")
    if device == "cuda":
        return ChannelChoice("nccl", f"{nodes} nodes with GPUs")
    if nodes == 1:
        return ChannelChoice("shm", "one node without GPUs")
    return ChannelChoice("tcp", f"{nodes} nodes without GPUs")


def rank_requests(
    config: TandemConfig, device: str, wanted: Sequence[Group] = tuple(Group)
) -> list[RankRequest]:
    """Return the ranks of the given groups with their resources: attention, expert, prefill."""
    groups = config.groups
    base = {"CPU": groups.cpus_per_rank} if groups.cpus_per_rank else {}
    if device == "cuda":
        base["GPU"] = gpus_per_rank(config)
    return [
        RankRequest(group, rank, {**base, **extra})
        for group, count, extra in (
            (Group.ATTENTION, groups.attention_ranks, groups.attention_resources),
            (Group.EXPERT, groups.expert_ranks, groups.expert_resources),
            (Group.PREFILL, groups.prefill_ranks, groups.prefill_resources),
        )
        if group in wanted
        for rank in range(count)
    ]


def check_resources(requests: Sequence[RankRequest], available: dict[str, float]) -> None:
    """Raise ResourceError if the cluster can never hold all ranks."""
    wanted: Counter[str] = Counter()
    for request in requests:
        wanted.update(request.resources)
    for resource, amount in wanted.items():
        has = available.get(resource, 0.0)
        if amount > has + 1e-9:
            hint = "lower groups.cpus_per_rank" if resource == "CPU" else "add nodes that have it"
            raise ResourceError(
                f"{len(requests)} ranks need {amount:g} {resource}, the Ray cluster has {has:g}; "
                f"use fewer ranks or {hint}"
            )


def check_room(config: TandemConfig, application: str) -> None:
    """Raise ResourceError if `application` has ranks that new ones could not replace.

    They need what is free or held by `application`. With an autoscaler that has reported its
    limits, everything below them is free.
    """
    rooms = [
        room
        for room in ray.util.placement_group_table().values()
        if room["name"].startswith(f"{application}/") and room["state"] == "CREATED"
    ]
    if not rooms:
        return
    total: dict[str, float] = ray.cluster_resources()
    requests = rank_requests(config, resolve_device(config, total))
    most = state.get_max_resources_from_cluster_config()
    check_resources(requests, total | (most or {}))
    if most is not None:
        return
    free: Counter[str] = Counter(ray.available_resources())
    for room in rooms:
        for bundle in room["bundles"].values():
            free.update(bundle)
    check_resources(requests, dict(free))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for request in requests:
        if not any(
            all(node.get(name, 0) >= amount for name, amount in request.resources.items())
            for node in nodes
        ):
            raise ResourceError(
                f"no node of the Ray cluster has {request.resources}, which a rank of the group "
                f"{request.group} needs; use smaller ranks or add such a node"
            )
    if config.groups.placement == "spread" and config.groups.attention_ranks:
        _spread_hosts([], config.groups)


def _place(
    requests: Sequence[RankRequest], groups: GroupsConfig, name: str, on: str
) -> PlacementGroup:
    """Return a ready placement group with one bundle per rank.

    on: host of all bundles, or empty. Raises ResourceError.
    """
    bundles = [dict(request.resources) or {"CPU": _NODE_SHARE} for request in requests]
    hosts = [on] * len(bundles) if on else []
    if not on and groups.placement == "spread" and requests[0].group is not Group.PREFILL:
        hosts = _spread_hosts(requests, groups)
    for bundle, host in zip(bundles, hosts, strict=bool(hosts)):
        bundle[f"node:{host}"] = _NODE_SHARE
    lifetime = "detached" if name else None
    placement = placement_group(bundles, strategy="PACK", name=name, lifetime=lifetime)
    try:
        ray.get(placement.ready(), timeout=groups.ready_timeout_s)
    except GetTimeoutError:
        remove_placement_group(placement)
        check_resources(requests, ray.cluster_resources())
        raise ResourceError(
            f"{len(bundles)} ranks could not be placed within {groups.ready_timeout_s:g} s: the "
            "cluster's resources are in use or too scattered; see `ray status`"
        ) from None
    return placement


def _spread_hosts(requests: Sequence[RankRequest], groups: GroupsConfig) -> list[str]:
    """Return one node per rank such that no node holds ranks of both groups."""
    hosts = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
    if len(hosts) < 2:
        raise ResourceError(
            f"groups.placement=spread needs at least 2 nodes, the Ray cluster has {len(hosts)}; "
            "use placement=pack"
        )
    attention = groups.attention_ranks / (groups.attention_ranks + groups.expert_ranks)
    split = min(max(1, round(len(hosts) * attention)), len(hosts) - 1)
    of_group = {
        Group.ATTENTION: hosts[:split],
        Group.EXPERT: hosts[split:],
        Group.PLANNER: hosts[:split],
    }
    return [
        of_group[request.group][request.rank % len(of_group[request.group])] for request in requests
    ]


class Node(NamedTuple):
    """A node of the Ray cluster: its address, and the address its ranks listen on."""

    id: str
    host: str
    listen_host: str


class RankPlacement(NamedTuple):
    """Ranks with a bundle each; bundle i belongs to request i.

    nodes: the initial nodes. application: owner, with which they outlive this process; empty: they
    end with it. name: of the placement group.
    """

    requests: list[RankRequest]
    placement: PlacementGroup
    device: str
    nodes: list[Node]
    application: str = ""
    name: str = ""

    def start(self, bundle: int) -> RayRank:
        """Start the process of a rank in its bundle, as soon as the bundle has a node."""
        request = self.requests[bundle]
        resources = {k: v for k, v in request.resources.items() if k not in ("CPU", "GPU")}
        name = rank_name(request.group, request.rank)
        shell, key, outliving = WorkerShell, "", dict[str, str]()
        if self.application:
            shell, key = OrphanGuardShell, f"{self.name}/{name}/{secrets.token_hex(4)}"
            outliving = {"name": key, "namespace": NAMESPACE, "lifetime": "detached"}
        actor = (
            rank_class(name, shell)
            .options(
                **outliving,
                num_cpus=request.resources.get("CPU", 0),
                num_gpus=request.resources.get("GPU", 0),
                resources=resources,
                max_restarts=0,
                max_task_retries=0,
                enable_task_events=False,  # its status is requested four times a second
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.placement, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )
        return RayRank(name, actor, key)

    @property
    def seated(self) -> list[tuple[RankRequest, Node]]:
        """Return each rank with its initial node."""
        return list(zip(self.requests, self.nodes, strict=True))

    def node(self, bundle: int) -> Node:
        """Return the current node of a placed bundle."""
        return _node_of(self.placement, bundle)

    @property
    def is_complete(self) -> bool:
        """True if every bundle has a node. After a node loss it is False until one has room."""
        table: dict[str, Any] = ray.util.placement_group_table(self.placement)
        return bool(table["state"] == "CREATED")

    def release(self) -> None:
        remove_placement_group(self.placement)


def place_ranks(
    requests: list[RankRequest],
    config: TandemConfig,
    device: str,
    application: str,
    *,
    beside: str | None = None,
) -> RankPlacement:
    """Place ranks, and the planner beside attention ranks.

    application: as in `RankPlacement`. beside: host of the group that they join; empty: any. Raises
    ResourceError.
    """
    if beside is None and requests[0].group is Group.ATTENTION and config.planner.enabled:
        planner = RankRequest(Group.PLANNER, 0, {})  # it rarely computes
        requests = [*requests, planner]
    name = f"{application}/{secrets.token_hex(4)}" if application else ""
    placement = _place(requests, config.groups, name, beside or "")
    found = [_node_of(placement, bundle) for bundle in range(len(requests))]
    return RankPlacement(requests, placement, device, found, application, name)


def _node_of(placement: PlacementGroup, bundle: int) -> Node:
    table: dict[str, Any] = ray.util.placement_group_table(placement)
    return _node(table["bundles_to_node_id"][bundle])


def this_node() -> Node:
    return _node(ray.get_runtime_context().get_node_id())


def _node(id: str) -> Node:
    alive = ray.nodes()
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    alone = len(alive) == 1  # no other node has to reach a rank
    return Node(id, address[id], "127.0.0.1" if alone else address[id])


def seat_ranks(placed: Sequence[RankPlacement], config: TandemConfig) -> list[list[Seat]]:
    """Return the seats of the ranks of each placement.

    All ranks of a node but the planner divide its cores. Those with a KV pool divide its memory,
    also with prefill workers that may be added later, unless they have own GPUs.
    """
    on_nodes = [(one.group, node.id) for each in placed for one, node in each.seated]
    computing = Counter(node for group, node in on_nodes if group is not Group.PLANNER)
    with_kv = Counter(node for group, node in on_nodes if group in (Group.ATTENTION, Group.PREFILL))
    for node in {node for group, node in on_nodes if group is Group.PREFILL}:
        with_kv[node] += config.prefill_slots - config.groups.prefill_ranks
    seen = Counter[str]()

    def seat(request: RankRequest, node: Node, device: str) -> Seat:
        core_share = 0, 0
        if request.group is not Group.PLANNER:
            core_share = seen[node.id], computing[node.id]
            seen[node.id] += 1
        has_own_gpu = request.resources.get("GPU", 0) >= 1
        # Ray shows each actor its own GPU only: it is number 0 there.
        name = "cuda:0" if device == "cuda" else "cpu"
        return Seat(
            name, node.listen_host, 1 if has_own_gpu else max(1, with_kv[node.id]), core_share
        )

    return [[seat(*one, each.device) for one in each.seated] for each in placed]
