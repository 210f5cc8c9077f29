"""Whether a running server can have so many ranks: asked before anything is started or ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from cluster.fleet.growth import kept_place
from cluster.fleet.member import Member
from cluster.fleet.rank_group import RankGroup
from contracts.config import SCALABLE, TandemConfig
from contracts.errors import NotReadyError, RequestError
from contracts.worker import Group

KIND_OF = {
    "attention_ranks": Group.ATTENTION,
    "expert_ranks": Group.EXPERT,
    "prefill_workers": Group.PREFILL,
}


def check_changes(
    changes: Mapping[str, int],
    groups: Sequence[RankGroup],
    config: TandemConfig,
    *,
    follows_load: bool,
) -> None:
    """changes: of kinds that there are. follows_load: prefill workers come and go with it. Raises
    RequestError for what can never be, NotReadyError where the Ray cluster has no room now."""
    if (count := changes.get("prefill_workers")) is not None:
        _check_prefill(count, config, follows_load)
    if (count := changes.get("expert_ranks")) is not None:
        _check_experts(count, _group_of(Group.EXPERT, groups).of_kind(Group.EXPERT)[0])
    for name, count in changes.items():
        _check_room(name, count, _group_of(KIND_OF[name], groups))


def _group_of(kind: Group, groups: Sequence[RankGroup]) -> RankGroup:
    return next(group for group in groups if group.of_kind(kind))


def _check_experts(count: int, first: Member) -> None:
    experts = first.spec.placement.num_experts
    if count > experts:
        raise RequestError(
            f"expert_ranks={count}: the model has {experts} experts per layer; "
            "use at most that many ranks",
            "expert_ranks",
        )


def _check_prefill(count: int, config: TandemConfig, follows_load: bool) -> None:
    most, experts = config.prefill_slots, config.prefill.experts
    if experts not in SCALABLE:
        raise RequestError(
            f"prefill_workers={count} with prefill.experts={experts}: its workers divide the "
            f"experts among them; use {', '.join(SCALABLE)}",
            "prefill_workers",
        )
    if count > most:
        name = "scaling.max_prefill_ranks" if follows_load else "groups.prefill_ranks"
        raise RequestError(
            f"prefill_workers={count}: this server was started for {most} at most ({name}); "
            "start it with a larger scaling.max_prefill_ranks",
            "prefill_workers",
        )


def _check_room(name: str, count: int, group: RankGroup) -> None:
    """What the Ray cluster has free now, of what they ask for."""
    kind = KIND_OF[name]
    there = group.of_kind(kind)
    new = [n for n in range(len(there), count) if kept_place(group, kind, n) is None]
    free = ray.available_resources() if new else {}
    for resource, each in there[0].place.needs.items():
        if new and each * len(new) > free.get(resource, 0.0) + 1e-9:
            raise NotReadyError(
                f"{name}={count}: {len(new)} more need {each * len(new):g} {resource}, the Ray "
                f"cluster has {free.get(resource, 0.0):g} free; add nodes, or ask for fewer"
            )
