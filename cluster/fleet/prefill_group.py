"""Prefill workers as Ray actors, each replaced when it dies or hangs.

launch ── place, prepare, connect, start ──> worker 0, 1, …      epoch 1
supervisor thread: every CHECK_PERIOD_S asks each for its status
    gone, silent (rank_watch.py), not healthy, or given up by a router ─> killed;
    another in its place, epoch + 1; the others are told its address, routers find it in `addresses`
    (all_to_all: all of them, under one epoch: they work in lockstep or not at all)
    its node is gone ─> the same on another node, as soon as one has room for it
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import Formation, channel_addresses, form_group, make_specs
from actors.telemetry.telemetry import Telemetry
from cluster.fleet.placement import (
    Node,
    Placed,
    RankRequest,
    is_placed,
    node_of,
    resolve_backend,
    seat_ranks,
    start_rank,
)
from cluster.fleet.prefill_member import Member
from cluster.fleet.rank_calls import expositions, recorded_spans, statuses, stop_all
from cluster.fleet.rank_watch import CHECK_PERIOD_S
from contracts import metrics
from contracts.config import TandemConfig
from contracts.errors import TandemError
from contracts.events import TaskSpan
from contracts.logs import event
from contracts.worker import Group, RankReady, RankStatus, WorkerSpec

log = logging.getLogger("tandem.prefill_group")

RETRY_S = 1.0  # before another try to replace a worker; doubled up to MAX_RETRY_S
MAX_RETRY_S = 30.0
PLACE_PERIOD_S = 1.0  # how often a worker that has no node yet is looked for


class PrefillGroup:
    """Running prefill workers. Any thread may ask; `close` ends them."""

    def __init__(
        self,
        requests: Sequence[RankRequest],
        placement: PlacementGroup,
        members: list[Member],
        formation: Formation,
    ) -> None:
        self.token = formation.token
        self.backend = formation.backend
        self.epoch = formation.epoch
        self.restarts = 0
        self._requests = requests
        self._placement = placement
        self._members = members
        self._config = formation.config
        self._lockstep = formation.config.prefill.experts == "all_to_all"
        self._telemetry = Telemetry()
        self._lock = threading.Lock()  # guards the epoch, the counts, and who is told of whom
        self._suspects: dict[str, str] = {}  # what routers say: client address -> reason
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(len(members), thread_name_prefix="replace")
        self._supervisor = threading.Thread(
            target=self._supervise, name="prefill-supervisor", daemon=True
        )
        self._supervisor.start()

    @property
    def ready(self) -> list[RankReady]:
        return [member.ready for member in self._members]

    @property
    def addresses(self) -> dict[str, str]:
        """Name -> where each worker takes requests now."""
        return {ready.name: ready.client_address for ready in self.ready}

    def replace(self, suspects: Mapping[str, str]) -> None:
        """The workers at these client addresses are of no use, for these reasons. One that has been
        replaced meanwhile is elsewhere."""
        known = self.addresses.values()
        self._suspects.update({a: reason for a, reason in suspects.items() if a in known})

    def status(self, timeout_s: float) -> list[RankStatus]:
        return statuses(self._ranks, timeout_s)

    def metrics(self, timeout_s: float) -> list[str]:
        """Prometheus text of each worker that answers, and the group's own."""
        group = Group.PREFILL.value
        self._telemetry.set(metrics.GROUP_EPOCH, group, to=self.epoch)
        self._telemetry.count(metrics.RANK_RESTARTS, group, by=0)
        return [*expositions(self._ranks, timeout_s), self._telemetry.exposition()]

    def spans(self, timeout_s: float) -> list[TaskSpan]:
        return recorded_spans(self._ranks, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends supervision, the loops in order, then the actors; gives the resources back."""
        self._closing.set()
        self._supervisor.join(timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)
        stop_all(self._ranks, timeout_s)
        remove_placement_group(self._placement)

    @property
    def _ranks(self) -> list[RayRank]:
        return [member.rank for member in self._members]

    def _supervise(self) -> None:
        looked_s = time.monotonic()
        while not self._closing.wait(CHECK_PERIOD_S):
            now_s = time.monotonic()
            stalled_s = max(0.0, now_s - looked_s - 2 * CHECK_PERIOD_S)
            looked_s = now_s
            for member in self._members:
                if not member.problem:
                    self._look_at(member, now_s, stalled_s)

    def _look_at(self, member: Member, now_s: float, stalled_s: float) -> None:
        reason = self._suspects.pop(member.ready.client_address, "")
        try:
            reason = reason or member.look(now_s, stalled_s)
        except Exception as error:  # noqa: BLE001 - supervision must not end; it is asked again
            event(log, "worker_not_asked", logging.WARNING, name=member.ready.name, error=error)
        if reason:
            event(log, "worker_lost", logging.ERROR, name=member.ready.name, reason=reason)
            lost = self._members if self._lockstep else [member]
            for one in lost:
                one.problem = reason
            self._threads.submit(self._replace, lost)

    def _replace(self, lost: list[Member]) -> None:
        """Others in their places, tried until they are there or the group is closed."""
        names = ", ".join(member.ready.name for member in lost)
        retry_s = RETRY_S
        for member in lost:
            member.kill()
        while not self._closing.is_set():
            try:
                self._start_again(lost)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told and tried again
                if not self._closing.is_set():
                    event(log, "worker_not_replaced", logging.ERROR, name=names, error=error)
            self._closing.wait(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _start_again(self, lost: list[Member]) -> None:
        """All under one new epoch. Raises what keeps them from starting; their actors are gone
        then."""
        with self._lock:
            self.epoch += 1
            epoch = self.epoch
        timeout_s = self._config.groups.ready_timeout_s
        ranks = [
            start_rank(self._requests[member.spec.rank], self._placement, member.spec.rank)
            for member in lost
        ]
        try:
            pairs = list(zip(lost, ranks, strict=True))
            nodes = [self._settled(member, rank) for member, rank in pairs]
            specs = self._specs(lost, nodes, epoch)
            others = [member.ready for member in self._members if not member.problem]
            ready = form_group(specs, ranks, timeout_s=timeout_s, others=others)
        except BaseException as error:
            for rank in ranks:
                ray.kill(rank.actor)
            if isinstance(error, TimeoutError):
                message = f"not placed within {timeout_s:g} s (groups.ready_timeout_s)"
                raise TandemError(message) from None
            raise
        if self._closing.is_set():
            for rank in ranks:
                ray.kill(rank.actor)
            return
        settled = zip(lost, specs, ranks, ready, nodes, strict=True)
        for member, spec, rank, told, node in settled:
            member.settle(spec, rank, told, node)
            self._count(member)
        self._introduce()

    def _specs(self, lost: list[Member], nodes: list[Node], epoch: int) -> list[WorkerSpec]:
        """With the backend that fits where they are now, if that is for them alone to say. (Workers
        that gather from each other serve those of other nodes too.)"""
        backend = lost[0].spec.backend
        if self._lockstep:
            device = lost[0].spec.device.partition(":")[0]
            hosts = [node.host for node in nodes]
            backend = self.backend = resolve_backend(self._config, device, hosts)
        return [
            msgspec.structs.replace(
                member.spec, epoch=epoch, host=node.listen_host, backend=backend
            )
            for member, node in zip(lost, nodes, strict=True)
        ]

    def _introduce(self) -> None:
        """Tells all that work of each other. Lost ones are left out: whoever dials them waits for
        nothing, and they are told of, and tell, when they are back."""
        if self._lockstep:
            return  # they have been joined as a whole
        with self._lock:
            working = [member for member in self._members if not member.problem]
            addresses = channel_addresses([member.ready for member in working], Group.PREFILL)
            for member in working:
                member.rank.call("connect", addresses)

    def _settled(self, member: Member, rank: RayRank) -> Node:
        """Where its process has started. While no node has room for it, it waits; else raises
        TimeoutError after groups.ready_timeout_s."""
        started, timeout_s = rank.started(), self._config.groups.ready_timeout_s
        end_s, told = time.monotonic() + timeout_s, False
        while not self._closing.is_set() and time.monotonic() < end_s:
            try:
                started.result(PLACE_PERIOD_S)
                return node_of(self._placement, member.spec.rank)
            except TimeoutError:
                if is_placed(self._placement):
                    continue
            end_s = time.monotonic() + timeout_s
            if not told:
                told, needs = True, self._requests[member.spec.rank].resources
                event(log, "worker_has_no_node", logging.ERROR, name=member.ready.name, needs=needs)
        raise TimeoutError

    def _count(self, member: Member) -> None:
        with self._lock:
            self.restarts += 1
            self._telemetry.count(metrics.RANK_RESTARTS, Group.PREFILL.value)
        name, pid = member.ready.name, member.ready.pid
        event(log, "worker_replaced", logging.WARNING, name=name, epoch=member.spec.epoch, pid=pid)


def launch_prefill(
    config: TandemConfig,
    model_folder: str,
    token: bytes,
    placed: Placed,
    with_kv: Counter[str],
    *,
    epoch: int = 1,
) -> PrefillGroup:
    """Starts and joins groups.prefill_ranks workers on the Ray cluster that this process is
    connected to. Raises as `launch.launch_group`."""
    requests, placement = placed.requests, placed.placement
    ranks: list[RayRank] = []
    try:
        ranks = [start_rank(request, placement, i) for i, request in enumerate(requests)]
        backend = resolve_backend(config, placed.device, [node.host for node in placed.nodes])
        formation = Formation(config, model_folder, token, epoch, backend)
        specs = make_specs(formation, (), (), prefill=seat_ranks(placed, with_kv))
        ready = form_group(specs, ranks, timeout_s=config.groups.ready_timeout_s)
        event(log, "prefill_ready", epoch=epoch, backend=backend, workers=len(ranks))
        members = [Member(*each) for each in zip(specs, ranks, ready, placed.nodes, strict=True)]
        return PrefillGroup(requests, placement, members, formation)
    except BaseException:
        for rank in ranks:
            ray.kill(rank.actor)
        remove_placement_group(placement)
        raise
