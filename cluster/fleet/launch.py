"""Starts an attention/expert group as Ray actors in a placement group."""

from __future__ import annotations

import logging
from collections import Counter

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import Formation, form_group, make_specs
from cluster.files.hardware import load_hardware
from cluster.fleet.group_watch import GroupWatch
from cluster.fleet.placement import Placed, resolve_backend, seat_ranks, start_rank
from cluster.fleet.rank_calls import expositions, recorded_spans, statuses, stop_all
from contracts.config import TandemConfig
from contracts.events import TaskSpan
from contracts.logs import event
from contracts.plan import Plan
from contracts.worker import Group, RankReady, RankStatus

log = logging.getLogger("tandem.launch")


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
        names, give_up_s = [rank.name for rank in self._ranks], formation.config.groups.give_up_s
        self._watch = GroupWatch(names, self._ranks, give_up_s)
        self._watch.start()

    @property
    def beyond_repair(self) -> str:
        """Which ranks keep it from serving, and why; empty: it serves, or may yet."""
        return self._watch.reason

    @property
    def client_addresses(self) -> dict[str, str]:
        return {r.name: r.client_address for r in self.ready if r.client_address}

    def status(self, timeout_s: float) -> list[RankStatus]:
        """What each rank says of itself; a rank that does not answer is unhealthy."""
        return statuses(self._ranks, timeout_s)

    def metrics(self, timeout_s: float) -> list[str]:
        """Prometheus text of each rank, and of the planner, that answers."""
        return expositions(self._actors, timeout_s)

    def spans(self, timeout_s: float) -> list[TaskSpan]:
        return recorded_spans(self._ranks, timeout_s)

    def pin_plan(self, plan: Plan | None, timeout_s: float) -> None:
        """The plan of all batches from now on; None: one is chosen for each."""
        for future in [rank.call("pin_plan", plan) for rank in self._ranks]:
            future.result(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the loops in order, then the actors, then gives the resources back."""
        self._watch.close(timeout_s)
        stop_all(self._actors, timeout_s)
        remove_placement_group(self._placement)


def launch_group(
    config: TandemConfig,
    model_folder: str,
    token: bytes,
    placed: Placed,
    with_kv: Counter[str],
    *,
    epoch: int = 1,
) -> RunningGroup:
    """Starts and joins the ranks on the Ray cluster that this process is connected to, where they
    are `placed`. with_kv: as `seat_ranks` takes it.

    Raises ConfigError for a hardware file that cannot be used, the first error of a rank, or
    LaunchError at groups.ready_timeout_s; nothing is left running then, and no place is taken.
    """
    placement = placed.placement
    ranks: list[RayRank] = []
    try:
        name = config.planner.hardware
        hardware = load_hardware(name) if config.planner.enabled and name else None
        ranks = [start_rank(request, placement, i) for i, request in enumerate(placed.requests)]
        backend = resolve_backend(config, placed.device, [node.host for node in placed.nodes])
        formation = Formation(config, model_folder, token, epoch, backend, hardware)
        seats = seat_ranks(placed, with_kv)
        first = config.groups.attention_ranks
        last = first + config.groups.expert_ranks
        specs = make_specs(formation, seats[:first], seats[first:last], seats[last:])
        ready = form_group(specs, ranks, timeout_s=config.groups.ready_timeout_s)
        event(log, "group_ready", epoch=epoch, backend=backend, ranks=len(ranks))
        return RunningGroup(ranks, ready, placement, formation)
    except BaseException:
        for rank in ranks:
            ray.kill(rank.actor)
        remove_placement_group(placement)
        raise


def _plans(rank: RayRank) -> bool:
    return rank.name.startswith(Group.PLANNER)
