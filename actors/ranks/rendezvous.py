"""Formation of a group: load in parallel, exchange addresses, connect, start.

Ranks are handles whose calls return futures, for Ray actors and plain processes alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from contracts.config import TandemConfig
from contracts.errors import (
    ChannelError,
    HandshakeBrokenError,
    HandshakeError,
    LaunchError,
    TandemError,
)
from contracts.hardware import Hardware
from contracts.logs import event
from contracts.placement import Placement
from contracts.ranks import Group, RankReady, RankSpec
from models.spec.model import read_spec
from planner.placement.slots import contiguous

log = logging.getLogger(f"tandem.{__name__}")

REACH_TIMEOUT_S = 10.0  # for connecting to an unreachable rank
DEGRADED_REACH_TIMEOUT_S = 1.0  # if the group can start without it
RETRY_S = 0.1


class _UnreachableError(LaunchError):
    """A rank cannot be reached; it may be reachable later."""


class WorkerHandle(Protocol):
    """A `WorkerShell` in another process."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method; the future raises its exception, or LaunchError if the process is gone."""


class Seat(NamedTuple):
    """Device and host of a rank. core_share: see RankSpec."""

    device: str
    host: str
    ranks_on_node: int
    core_share: tuple[int, int] = (0, 0)


class GroupSpec(NamedTuple):
    """Common properties of a group's ranks. placements: of expert ranks and prefill workers."""

    config: TandemConfig
    model_folder: str
    token: bytes
    epoch: int
    backend: str
    hardware: Hardware | None = None
    placements: Mapping[Group, Placement] = {}

    def placement(self, group: Group) -> Placement:
        """Return the placement that concerns a rank of `group`."""
        of = Group.EXPERT if group in (Group.ATTENTION, Group.PLANNER) else group
        return self.placements.get(of, Placement())


def contiguous_placements(
    model_folder: str, *, expert_ranks: int = 0, prefill_ranks: int = 0
) -> dict[Group, Placement]:
    """Return placements for `GroupSpec` with experts in order. Raises CheckpointError."""
    model = read_spec(Path(model_folder))
    return {
        group: contiguous(
            model.num_experts, ranks, num_layers=model.num_layers, moe_layers=model.moe_layers
        )
        for group, ranks in ((Group.EXPERT, expert_ranks), (Group.PREFILL, prefill_ranks))
    }


def make_specs(
    group_spec: GroupSpec,
    attention: Sequence[Seat],
    expert: Sequence[Seat],
    planner: Sequence[Seat] = (),
    prefill: Sequence[Seat] = (),
) -> list[RankSpec]:
    """Return one spec per rank: attention, expert, prefill, planner."""
    return [
        RankSpec(
            group=group,
            rank=rank,
            attention_ranks=len(attention),
            expert_ranks=len(expert),
            prefill_ranks=len(prefill),
            model_folder=group_spec.model_folder,
            token=group_spec.token,
            epoch=group_spec.epoch,
            device=seat.device,
            backend=group_spec.backend,
            host=seat.host,
            ranks_on_node=seat.ranks_on_node,
            core_share=seat.core_share,
            config=group_spec.config,
            hardware=group_spec.hardware if group is Group.PLANNER else None,
            placement=group_spec.placement(group),
        )
        for group, seats in (
            (Group.ATTENTION, attention),
            (Group.EXPERT, expert),
            (Group.PREFILL, prefill),
            (Group.PLANNER, planner),
        )
        for rank, seat in enumerate(seats)
    ]


def form_group(
    specs: Sequence[RankSpec],
    handles: Sequence[WorkerHandle],
    *,
    timeout_s: float,
    others: Callable[[], Sequence[RankReady]] = tuple,
    allow_unreachable: bool = False,
) -> list[RankReady]:
    """Bring a group up and return each rank's `RankReady`, in the order of `specs`.

    others: returns running ranks to connect to; they may be replaced meanwhile. allow_unreachable:
    start even if a rank cannot be reached. Raises the first error of any rank, with its name, or
    LaunchError at the deadline.
    """
    deadline_s = time.monotonic() + timeout_s
    pairs = list(zip(specs, handles, strict=True))
    ready = gather(
        [(spec.name, handle.call("prepare", spec)) for spec, handle in pairs],
        "load its weights",
        deadline_s,
    )
    try:
        _join(
            pairs,
            ready,
            others,
            deadline_s,
            DEGRADED_REACH_TIMEOUT_S if allow_unreachable else REACH_TIMEOUT_S,
        )
    except _UnreachableError as error:
        if not allow_unreachable:
            raise
        event(log, "rank_degraded", logging.WARNING, reason=error.message)
    for spec, answer in zip(specs, ready, strict=True):
        if spec.group is Group.PLANNER:
            address = answer.channel_address
            joining = [(s.name, handle.call("join_planner", address)) for s, handle in pairs]
            gather(joining, "receive the planner's address", deadline_s)
    starting = [(spec.name, handle.call("start")) for spec, handle in pairs]
    gather(starting, "start its loop", deadline_s)
    return ready


def _join(
    pairs: Sequence[tuple[RankSpec, WorkerHandle]],
    ready: Sequence[RankReady],
    others: Callable[[], Sequence[RankReady]],
    deadline_s: float,
    reach_s: float,
) -> None:
    """Connect all ranks; retry for reach_s, because an unreachable rank may be replaced."""
    until_s = min(deadline_s, time.monotonic() + reach_s)
    while True:
        try:
            return _connect(pairs, [*others(), *ready], deadline_s)
        except _UnreachableError:
            if time.monotonic() > until_s:
                raise
        time.sleep(RETRY_S)


def _connect(
    pairs: Sequence[tuple[RankSpec, WorkerHandle]], known: Sequence[RankReady], deadline_s: float
) -> None:
    """Connect each rank to its peers among `known`. Raises as `gather`."""
    for group, peers in (
        (Group.ATTENTION, "the expert ranks"),
        (Group.PREFILL, "the other prefill workers"),
    ):
        addresses = peer_addresses(known, group)
        members = [(spec.name, h) for spec, h in pairs if spec.group is group]
        connecting = [(name, handle.call("connect", addresses)) for name, handle in members]
        gather(connecting, f"connect to {peers}", deadline_s)


def peer_addresses(ready: Sequence[RankReady], group: Group) -> dict[str, str]:
    """Return the addresses for `connect` of a rank of `group`, by name."""
    return channel_addresses(ready, Group.EXPERT if group is Group.ATTENTION else group)


def introduce(ready: Sequence[RankReady], handles: Mapping[str, WorkerHandle]) -> None:
    """Send all ranks each other's addresses without waiting; existing links are kept."""
    for group in (Group.ATTENTION, Group.PREFILL):
        addresses = peer_addresses(ready, group)
        for name, handle in handles.items() if addresses else ():
            if name.startswith(f"{group.value}-"):
                handle.call("connect", addresses)


def channel_addresses(ready: Sequence[RankReady], group: Group) -> dict[str, str]:
    """Return the channel addresses of the ranks of `group` that have one, by name."""
    return {
        answer.name: answer.channel_address
        for answer in ready
        if answer.channel_address and answer.name.startswith(f"{group.value}-")
    }


def gather(futures: Sequence[tuple[str, Future[Any]]], what: str, deadline_s: float) -> list[Any]:
    """Return all answers; a failed rank raises at once, with its name."""
    left_s = max(0.0, deadline_s - time.monotonic())
    done, _ = wait([future for _, future in futures], left_s, return_when=FIRST_EXCEPTION)
    failed = [(name, f) for name, f in futures if f in done and f.exception() is not None]
    answers = []
    for name, future in failed or futures:
        try:
            answers.append(future.result(max(0.0, deadline_s - time.monotonic())))
        except FutureTimeoutError:
            raise LaunchError(
                f"{name} did not {what} in time; see its log, or raise groups.ready_timeout_s"
            ) from None
        except ChannelError as error:
            kind = LaunchError if _is_refusal(error) else _UnreachableError
            raise kind(f"{name} could not {what}: {error.message}") from None
        except TandemError as error:
            if name in error.message:
                raise
            raise type(error)(f"{name}: {error.message}", *error.args[1:]) from None
    return answers


def _is_refusal(error: ChannelError) -> bool:
    """Return True if the peer rejected the handshake, which a retry does not change."""
    return isinstance(error, HandshakeError) and not isinstance(error, HandshakeBrokenError)
