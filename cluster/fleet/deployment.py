"""All ranks of a configuration: the attention/expert group, the prefill workers, or both."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import ray
from ray.util.placement_group import remove_placement_group

from cluster.fleet.codec import Directory
from cluster.fleet.launch import RunningGroup, launch_group
from cluster.fleet.placement import (
    Placed,
    check_resources,
    kv_ranks,
    place_ranks,
    rank_requests,
    resolve_device,
)
from cluster.fleet.prefill_group import PrefillGroup, launch_prefill
from contracts.config import TandemConfig
from contracts.events import TaskSpan
from contracts.worker import Group, RankStatus

TOKEN_BYTES = 32


class Deployment:
    """What runs. `close` ends it."""

    def __init__(
        self, token: bytes, group: RunningGroup | None, prefill: PrefillGroup | None
    ) -> None:
        self._token = token
        self._group = group
        self._prefill = prefill
        self._parts = [part for part in (group, prefill) if part is not None]

    @property
    def directory(self) -> Directory:
        """Where the ranks are now."""
        group, prefill = self._group, self._prefill
        return Directory(
            client_addresses=group.client_addresses if group is not None else {},
            prefill_addresses=prefill.addresses if prefill is not None else {},
            token=self._token,
            backend=self._parts[0].backend,
            epoch=max(part.epoch for part in self._parts),
            ranks=[rank for part in self._parts for rank in part.ready],
        )

    @property
    def beyond_repair(self) -> str:
        """Why a pipeline can serve no more; empty: both can. (Prefill workers are replaced.)"""
        return self._group.beyond_repair if self._group is not None else ""

    def replace(self, suspects: Mapping[str, str]) -> None:
        """Replaces the prefill workers at these client addresses, for these reasons."""
        if self._prefill is not None and suspects:
            self._prefill.replace(suspects)

    def status(self, timeout_s: float) -> list[RankStatus]:
        """What each rank says of itself; a rank that does not answer is unhealthy."""
        return [status for part in self._parts for status in part.status(timeout_s)]

    def metrics(self, timeout_s: float) -> list[str]:
        """Prometheus texts of all processes that answer."""
        return [text for part in self._parts for text in part.metrics(timeout_s)]

    def spans(self, timeout_s: float) -> list[TaskSpan]:
        """Recorded by all ranks, in order of their start."""
        spans = [span for part in self._parts for span in part.spans(timeout_s)]
        return sorted(spans, key=lambda span: span.start_s)

    def close(self, timeout_s: float = 10.0) -> None:
        for part in self._parts:
            part.close(timeout_s)


def launch(config: TandemConfig, model_folder: str) -> Deployment:
    """Starts all ranks on the Ray cluster that this process is connected to. Raises as
    `launch.launch_group`; nothing is left running then."""
    available = ray.cluster_resources()
    check_resources(rank_requests(config, resolve_device(config, available)), available)
    token = secrets.token_bytes(TOKEN_BYTES)
    group_place, prefill_place = _place(config)
    with_kv = kv_ranks([one for one in (group_place, prefill_place) if one is not None])
    with ThreadPoolExecutor(2) as threads:  # each loads for most of the time
        group = prefill = None
        if group_place is not None:
            asked = (config, model_folder, token, group_place, with_kv)
            group = threads.submit(launch_group, *asked)
        if prefill_place is not None:
            asked = (config, model_folder, token, prefill_place, with_kv)
            prefill = threads.submit(launch_prefill, *asked)
    return Deployment(token, *_both(group, prefill))


def _place(config: TandemConfig) -> tuple[Placed | None, Placed | None]:
    """Room for either pipeline that is wanted; each must know of the other's ranks, which share
    its nodes' memory. Raises ResourceError; no room is taken then."""
    group = prefill = None
    if config.groups.attention_ranks:
        group = place_ranks(config, (Group.ATTENTION, Group.EXPERT))
    try:
        if config.groups.prefill_ranks:
            prefill = place_ranks(config, (Group.PREFILL,))
    except BaseException:
        if group is not None:
            remove_placement_group(group.placement)
        raise
    return group, prefill


def _both(
    group: Future[RunningGroup] | None, prefill: Future[PrefillGroup] | None
) -> tuple[RunningGroup | None, PrefillGroup | None]:
    """What was launched. Raises what kept one of them from coming up, and ends the other."""
    errors = [future.exception() for future in (group, prefill) if future is not None]
    error = next((error for error in errors if error is not None), None)
    if error is None:
        return group.result() if group else None, prefill.result() if prefill else None
    for future in (group, prefill):
        if future is not None and future.exception() is None:
            future.result().close()
    raise error
