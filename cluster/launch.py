"""Starts the ranks of a configuration as Ray actors, in placement groups."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.remote import RayRank, RemoteWorker
from actors.rendezvous import Formation, Seat, form_group, make_specs
from cluster.hardware import load_hardware
from contracts.config import GroupsConfig, TandemConfig
from contracts.errors import ResourceError
from contracts.events import TaskSpan
from contracts.plan import Plan
from contracts.worker import Group, RankReady, RankStatus, rank_name

log = logging.getLogger("tandem.launch")

TOKEN_BYTES = 32
_NODE_SHARE = 0.001  # of the resource "node:<ip>", which every Ray node has one of


class RankRequest(NamedTuple):
    """A rank and the Ray resources it asks for."""

    group: Group
    rank: int
    resources: dict[str, float]


class RunningGroup:
    """An attention/expert group of Ray actors, and its planner. `close` ends it.

    A planner that dies stays away: the ranks go on with their default plans.
    """

    def __init__(
        self,
        ranks: list[RayRank],
        ready: list[RankReady],
        placement: PlacementGroup,
        formation: Formation,
    ) -> None:
        self.ready = [one for one, rank in zip(ready, ranks, strict=True) if not _plans(rank)]
        self.token = formation.token
        self.backend = formation.backend
        self.epoch = formation.epoch
        self._actors = ranks
        self._ranks = [rank for rank in ranks if not _plans(rank)]
        self._placement = placement

    @property
    def client_addresses(self) -> dict[str, str]:
        return {r.name: r.client_address for r in self.ready if r.client_address}

    def status(self, timeout_s: float) -> list[RankStatus]:
        """What each rank says of itself; a rank that does not answer is unhealthy."""
        futures = [(rank.name, rank.call("status")) for rank in self._ranks]
        answers = []
        for name, future in futures:
            try:
                answers.append(future.result(timeout_s))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is that rank's state
                answers.append(RankStatus(name=name, healthy=False, reason=str(error)))
        return answers

    def metrics(self, timeout_s: float) -> list[str]:
        """Prometheus text of each rank, and of the planner, that answers."""
        futures = [(rank.name, rank.call("metrics")) for rank in self._actors]
        texts: list[str] = []
        for name, future in futures:
            try:
                texts.append(future.result(timeout_s))
            except Exception as error:  # noqa: BLE001 - a scrape shows the ranks that answer
                log.warning("rank_metrics_failed name=%s error=%s", name, error)
        return texts

    def spans(self, timeout_s: float) -> list[TaskSpan]:
        futures = [rank.call("spans") for rank in self._ranks]
        spans = [span for future in futures for span in future.result(timeout_s)]
        return sorted(spans, key=lambda span: span.start_s)

    def pin_plan(self, plan: Plan | None, timeout_s: float) -> None:
        """The plan of all batches from now on; None: one is chosen for each."""
        for future in [rank.call("pin_plan", plan) for rank in self._ranks]:
            future.result(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the loops in order, then the actors, then gives the resources back."""
        futures = [rank.call("stop") for rank in self._actors]
        for rank, future in zip(self._actors, futures, strict=True):
            try:
                future.result(timeout_s)
            except Exception as error:  # noqa: BLE001 - it is killed next, whatever it answers
                log.warning("rank_stop_failed name=%s error=%s", rank.name, error)
            ray.kill(rank.actor)
        remove_placement_group(self._placement)


def launch_group(config: TandemConfig, model_folder: str, *, epoch: int = 1) -> RunningGroup:
    """Places, starts and joins the ranks on the Ray cluster that this process is connected to.

    Raises ConfigError for a hardware file that cannot be used, ResourceError if the cluster lacks
    what is asked for, the first error of a rank, or LaunchError at groups.ready_timeout_s; nothing
    is left running then.
    """
    name = config.planner.hardware
    hardware = load_hardware(name) if config.planner.enabled and name else None
    device = resolve_device(config, ray.cluster_resources())
    requests = rank_requests(config, device)
    check_resources(requests, ray.cluster_resources())
    if config.planner.enabled:
        requests.append(RankRequest(Group.PLANNER, 0, {}))  # it computes now and then only
    placement = _place(requests, config.groups)
    ranks: list[RayRank] = []
    try:
        ranks = [_start_rank(request, placement, i) for i, request in enumerate(requests)]
        hosts = _hosts(placement, len(ranks))
        token = secrets.token_bytes(TOKEN_BYTES)
        backend = resolve_backend(config, device, hosts)
        formation = Formation(config, model_folder, token, epoch, backend, hardware)
        seats = _seats(requests, hosts, device)
        first = config.groups.attention_ranks
        last = first + config.groups.expert_ranks
        specs = make_specs(formation, seats[:first], seats[first:last], seats[last:])
        ready = form_group(specs, ranks, timeout_s=config.groups.ready_timeout_s)
        log.info("group_ready epoch=%d backend=%s ranks=%d", epoch, backend, len(ranks))
        return RunningGroup(ranks, ready, placement, formation)
    except BaseException:
        for rank in ranks:
            ray.kill(rank.actor)
        remove_placement_group(placement)
        raise


def resolve_device(config: TandemConfig, available: dict[str, float]) -> str:
    """ "cuda" or "cpu": "auto" takes GPUs if there are enough for the ranks."""
    groups = config.groups
    if groups.device != "auto":
        return groups.device
    ranks = groups.attention_ranks + groups.expert_ranks
    return "cuda" if available.get("GPU", 0) >= ranks * gpus_per_rank(config) else "cpu"


def gpus_per_rank(config: TandemConfig) -> float:
    """1, or with CUDA IPC channels, whose ranks all share one GPU, an equal part of it."""
    groups = config.groups
    if config.channel.backend == "ipc":
        return 1.0 / (groups.attention_ranks + groups.expert_ranks)
    return 1.0


def resolve_backend(config: TandemConfig, device: str, hosts: Sequence[str]) -> str:
    """The channel backend that fits where the ranks have been placed."""
    if config.channel.backend != "auto":
        return config.channel.backend
    if device == "cuda":
        return "nccl"
    return "shm" if len(set(hosts)) == 1 else "tcp"


def rank_requests(config: TandemConfig, device: str) -> list[RankRequest]:
    """All ranks, attention ranks first, each with its resources."""
    groups = config.groups
    base = {"CPU": groups.cpus_per_rank} if groups.cpus_per_rank else {}
    if device == "cuda":
        base["GPU"] = gpus_per_rank(config)
    return [
        RankRequest(group, rank, {**base, **extra})
        for group, count, extra in (
            (Group.ATTENTION, groups.attention_ranks, groups.attention_resources),
            (Group.EXPERT, groups.expert_ranks, groups.expert_resources),
        )
        for rank in range(count)
    ]


def check_resources(requests: Sequence[RankRequest], available: dict[str, float]) -> None:
    """Raises ResourceError if the cluster as a whole could never hold all ranks."""
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


def _place(requests: Sequence[RankRequest], groups: GroupsConfig) -> PlacementGroup:
    """A placement group with one bundle per rank, ready. Raises ResourceError."""
    bundles = [dict(request.resources) or {"CPU": _NODE_SHARE} for request in requests]
    if groups.placement == "spread":
        for bundle, host in zip(bundles, _spread_hosts(requests), strict=True):
            bundle[f"node:{host}"] = _NODE_SHARE
    placement = placement_group(bundles, strategy="PACK")
    try:
        ray.get(placement.ready(), timeout=groups.ready_timeout_s)
    except GetTimeoutError:
        remove_placement_group(placement)
        raise ResourceError(
            f"{len(bundles)} ranks could not be placed within {groups.ready_timeout_s:g} s: the "
            "cluster's resources are in use or too scattered; see `ray status`"
        ) from None
    return placement


def _spread_hosts(requests: Sequence[RankRequest]) -> list[str]:
    """A node per rank, so that no node holds ranks of both groups."""
    hosts = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
    if len(hosts) < 2:
        raise ResourceError(
            f"groups.placement=spread needs at least 2 nodes, the Ray cluster has {len(hosts)}; "
            "use placement=pack"
        )
    groups = Counter(request.group for request in requests)
    attention = groups[Group.ATTENTION] / (groups[Group.ATTENTION] + groups[Group.EXPERT])
    split = min(max(1, round(len(hosts) * attention)), len(hosts) - 1)
    of_group = {
        Group.ATTENTION: hosts[:split],
        Group.EXPERT: hosts[split:],
        Group.PLANNER: hosts[:split],
    }
    return [
        of_group[request.group][request.rank % len(of_group[request.group])] for request in requests
    ]


def _start_rank(request: RankRequest, placement: PlacementGroup, bundle: int) -> RayRank:
    resources = {k: v for k, v in request.resources.items() if k not in ("CPU", "GPU")}
    actor = RemoteWorker.options(
        num_cpus=request.resources.get("CPU", 0),
        num_gpus=request.resources.get("GPU", 0),
        resources=resources,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement, placement_group_bundle_index=bundle
        ),
    ).remote()
    return RayRank(rank_name(request.group, request.rank), actor)


def _plans(rank: RayRank) -> bool:
    return rank.name.startswith(Group.PLANNER)


def _hosts(placement: PlacementGroup, count: int) -> list[str]:
    """The address of each bundle's node."""
    table: dict[str, Any] = ray.util.placement_group_table(placement)
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [address[table["bundles_to_node_id"][index]] for index in range(count)]


def _seats(requests: Sequence[RankRequest], hosts: Sequence[str], device: str) -> list[Seat]:
    attention_on = Counter(
        host
        for request, host in zip(requests, hosts, strict=True)
        if request.group is Group.ATTENTION
    )
    # Ray shows each actor its own GPU only: it is number 0 there.
    name = "cuda:0" if device == "cuda" else "cpu"
    only_node = len(ray.nodes()) == 1  # then nobody outside needs to reach a rank
    return [
        Seat(name, "127.0.0.1" if only_node else host, max(1, attention_on[host])) for host in hosts
    ]
