"""Prefill workers as Ray actors, each replaced when it dies or hangs.

launch ── place, prepare, connect, start ──> worker 0, 1, …      epoch 1
supervisor thread: every CHECK_PERIOD_S asks each for its status
    gone, silent for HUNG_AFTER_S, not healthy, or given up by a router ─> killed;
    another in its place, epoch + 1; the others are told its address, routers find it in `addresses`
    its node is gone ─> the same on another node, as soon as one has room for it
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.remote import RayRank
from actors.rendezvous import Formation, channel_addresses, form_group, make_specs
from actors.telemetry import Telemetry
from cluster.placement import (
    Node,
    Placed,
    RankRequest,
    is_placed,
    node_of,
    resolve_backend,
    seat_ranks,
    start_rank,
)
from cluster.rank_calls import expositions, recorded_spans, statuses, stop_all
from contracts import metrics
from contracts.config import TandemConfig
from contracts.errors import TandemError
from contracts.events import TaskSpan
from contracts.worker import Group, RankReady, RankStatus, WorkerSpec

log = logging.getLogger("tandem.prefill_group")

CHECK_PERIOD_S = 0.25
HUNG_AFTER_S = 3.0  # without an answer to `status`, which no batch holds up
RETRY_S = 1.0  # before another try to replace a worker; doubled up to MAX_RETRY_S
MAX_RETRY_S = 30.0
PLACE_PERIOD_S = 1.0  # how often a worker that has no node yet is looked for


class Member:
    """A worker's place: who is in it now."""

    def __init__(self, spec: WorkerSpec, rank: RayRank, ready: RankReady, node: Node) -> None:
        self.spec = spec
        self.rank = rank
        self.ready = ready
        self.node = node
        self.problem = ""  # why it is being replaced; empty: it works
        self._asked: Future[RankStatus] | None = None
        self._asked_s = 0.0

    def look(self, now_s: float, stalled_s: float) -> str:
        """Why it must be replaced; empty: it need not. stalled_s: how long we did not look."""
        if self._asked is None:
            self._asked, self._asked_s = self.rank.call("status"), now_s
            return ""
        if not self._asked.done():
            self._asked_s += stalled_s
            silent_s = now_s - self._asked_s
            return f"no answer for {silent_s:.1f} s" if silent_s > HUNG_AFTER_S else ""
        asked, self._asked = self._asked, None
        error = asked.exception()
        if error is not None:
            return str(error)
        status = asked.result()
        return "" if status.healthy else status.reason or "not healthy"

    def settle(self, spec: WorkerSpec, rank: RayRank, ready: RankReady, node: Node) -> None:
        self.spec, self.rank, self.ready, self.node = spec, rank, ready, node
        self._asked, self.problem = None, ""


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
        self._telemetry = Telemetry()
        self._lock = threading.Lock()  # one replacement at a time counts the epoch up
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
            member.problem = reason or member.look(now_s, stalled_s)
        except Exception as error:  # noqa: BLE001 - supervision must not end; it is asked again
            log.warning("worker_not_asked name=%s error=%s", member.ready.name, error)
        if member.problem:
            log.error("worker_lost name=%s reason=%s", member.ready.name, member.problem)
            self._threads.submit(self._replace, member)

    def _replace(self, member: Member) -> None:
        """Another worker in its place, tried until it is there or the group is closed."""
        retry_s = RETRY_S
        self._kill(member)
        while not self._closing.is_set():
            try:
                self._start_again(member)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told and tried again
                if not self._closing.is_set():
                    log.error("worker_not_replaced name=%s error=%s", member.ready.name, error)
            self._closing.wait(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _kill(self, member: Member) -> None:
        """Ray lets a process that hangs have five seconds to end by itself; on this node it need
        not."""
        try:
            if member.node.is_ours:
                os.kill(member.ready.pid, signal.SIGKILL)
        except OSError as error:
            log.info("worker_not_killed name=%s error=%s", member.ready.name, error)
        ray.kill(member.rank.actor)

    def _start_again(self, member: Member) -> None:
        """Raises what keeps the worker from starting; its actor is gone then."""
        rank_number, timeout_s = member.spec.rank, self._config.groups.ready_timeout_s
        with self._lock:
            self.epoch += 1
            epoch = self.epoch
        rank = start_rank(self._requests[rank_number], self._placement, rank_number)
        try:
            node = self._settled(member, rank)
            spec = msgspec.structs.replace(member.spec, epoch=epoch, host=node.listen_host)
            ready = rank.call("prepare", spec).result(timeout_s)
            addresses = channel_addresses([*self.ready, ready], Group.PREFILL)
            rank.call("connect", addresses).result(timeout_s)
            rank.call("start").result(timeout_s)
        except BaseException as error:
            ray.kill(rank.actor)
            if isinstance(error, TimeoutError):
                message = f"not up within {timeout_s:g} s (groups.ready_timeout_s)"
                raise TandemError(message) from None
            raise
        if self._closing.is_set():
            ray.kill(rank.actor)
            return
        member.settle(spec, rank, ready, node)
        self._count(ready)
        for other in self._members:
            if other is not member and not other.problem:
                other.rank.call("connect", addresses)

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
                log.error("worker_has_no_node name=%s needs=%s", member.ready.name, needs)
        raise TimeoutError

    def _count(self, ready: RankReady) -> None:
        with self._lock:
            self.restarts += 1
            self._telemetry.count(metrics.RANK_RESTARTS, Group.PREFILL.value)
        log.warning("worker_replaced name=%s epoch=%d pid=%d", ready.name, self.epoch, ready.pid)


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
        log.info("prefill_ready epoch=%d backend=%s workers=%d", epoch, backend, len(ranks))
        members = [Member(*each) for each in zip(specs, ranks, ready, placed.nodes, strict=True)]
        return PrefillGroup(requests, placement, members, formation)
    except BaseException:
        for rank in ranks:
            ray.kill(rank.actor)
        remove_placement_group(placement)
        raise
