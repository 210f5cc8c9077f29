"""Ranks under one repair policy, and the restart of lost ones.

restart ── place, prepare, connect, start ──> replacements with epoch + 1
    working ranks receive the new addresses, routers find them in the directory
    node lost ─> the same on another node as soon as one has room
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import msgspec
import ray

from actors.channels.local_process import kill_process
from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec, form_group, introduce
from cluster.fleet.nodes import Node, RankPlacement, resolve_backend
from cluster.fleet.repair import GroupHealth, most_missed, repair_policy
from contracts.errors import TandemError
from contracts.logs import event
from contracts.ranks import Group, RankReady, RankSpec, RankStatus

CHECK_PERIOD_S = 0.25
HUNG_AFTER_S = 3.0  # without a reply to `status`, which is independent of the rank's loop


class RankBundle(NamedTuple):
    """A bundle of a placement group, where a rank's process runs."""

    placed: RankPlacement
    bundle: int

    def start(self) -> RayRank:
        return self.placed.start(self.bundle)

    @property
    def node(self) -> Node:
        return self.placed.node(self.bundle)

    @property
    def is_exclusive(self) -> bool:
        """True if the placement group has no other bundle. Ray cannot release a single bundle."""
        return len(self.placed.requests) == 1

    @property
    def needs(self) -> dict[str, float]:
        return self.placed.requests[self.bundle].resources


class Member:
    """A rank. replacement_reason: set while it is being replaced. status: the last one received."""

    def __init__(
        self, spec: RankSpec, place: RankBundle, handle: RayRank, ready: RankReady
    ) -> None:
        self.place = place
        self.assign(spec, handle, ready)

    def assign(self, spec: RankSpec, handle: RayRank, ready: RankReady) -> None:
        self.spec, self.handle, self.ready = spec, handle, ready
        self.replacement_reason = ""
        self.status: RankStatus | None = None
        self._problem = ""
        self._status_call: Future[RankStatus] | None = None
        self._status_called_s = 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_up(self) -> bool:
        """True if the last check found no problem."""
        return not self.replacement_reason and not self._problem

    def check(self, now_s: float, stalled_s: float) -> str:
        """Return the rank's problem, or an empty string.

        Called about every CHECK_PERIOD_S from one thread. stalled_s: time the caller itself was
        stalled since the last call.
        """
        if self._status_call is None:
            self._status_call, self._status_called_s = self.handle.call("status"), now_s
        elif not self._status_call.done():
            self._status_called_s += stalled_s
            silent_s = now_s - self._status_called_s
            if silent_s > HUNG_AFTER_S:
                self._problem = f"no answer for {silent_s:.1f} s"
        else:
            reply, self._status_call = self._status_call, None
            self._problem = _problem(reply)
            if reply.exception() is None:
                self.status = reply.result()
        return self._problem

    def kill(self) -> None:
        """Kill the process.

        Ray gives a hung process five seconds; a local one is killed at once.
        """
        try:
            if not kill_process(self.ready.process_identity):
                event(log, "worker_process_not_found", name=self.name)
        except OSError as error:
            event(log, "worker_kill_failed", name=self.name, error=error)
        ray.kill(self.handle.actor)


def _problem(reply: Future[RankStatus]) -> str:
    error = reply.exception()
    if error is not None:
        return str(error) or type(error).__name__
    status = reply.result()
    return "" if status.healthy else status.reason or "not healthy"


log = logging.getLogger("tandem.fleet")

PLACE_PERIOD_S = 1.0  # between checks for a node
INTRODUCE_PERIOD_S = 1.0  # between introductions of missed ranks


class RankGroup:
    """A group of ranks; any thread reads it, the supervisor's threads change it.

    kind: of its first rank. draining: removed members that have not ended. beyond_repair: reason
    that it cannot serve any more, or empty.
    """

    def __init__(self, members: Sequence[Member], group_spec: GroupSpec) -> None:
        self.members = list(members)
        self.draining: list[Member] = []
        self.kind = members[0].spec.group
        self.policy = repair_policy(self.kind, group_spec.config)
        self.backend = group_spec.backend
        self.epoch = group_spec.epoch
        self.restarts = 0
        self.beyond_repair = ""
        self._config = group_spec.config
        self._unavailable_since_s: dict[str, float] = {}  # by name, of unavailable ranks
        self._introduced_s = -math.inf
        self._missed_since_s: dict[str, float] = {}  # missed by half of the attention ranks
        self._suspects: dict[str, str] = {}  # reported by routers: client address -> reason
        self._lock = threading.Lock()  # guards the epoch, counts and introductions

    @property
    def ready(self) -> list[RankReady]:
        return [member.ready for member in self.members]

    @property
    def working(self) -> list[Member]:
        return [member for member in self.members if not member.replacement_reason]

    @property
    def client_addresses(self) -> dict[str, str]:
        """Current client address of each rank that accepts requests, by name."""
        return {ready.name: ready.client_address for ready in self.ready if ready.client_address}

    def suspect(self, suspects: Mapping[str, str]) -> None:
        """Record problems that routers report, by client address; unknown addresses are ignored."""
        known = self.client_addresses.values()
        self._suspects.update({a: reason for a, reason in suspects.items() if a in known})

    def health(self, now_s: float, stalled_s: float) -> GroupHealth:
        """Check all members that are not being replaced. stalled_s: see `Member.check`."""
        problems = {
            member.name: reason
            for member in self.working
            if (reason := self._check(member, now_s, stalled_s))
        }
        problems = self._reported_lost(now_s) | problems
        replaced = {
            one.name: one.replacement_reason for one in self.members if one.replacement_reason
        }
        since_s = self._unavailable_since_s
        self._unavailable_since_s = {
            name: since_s[name] + stalled_s if name in since_s else now_s
            for name in (*problems, *replaced)
        }
        unavailable_s = now_s - min(self._unavailable_since_s.values(), default=now_s)
        names = [member.name for member in self.members]
        return GroupHealth(names, problems, unavailable_s, replaced)

    def _reported_lost(self, now_s: float) -> dict[str, str]:
        """Return expert ranks that attention ranks have lost but that report no problem.

        See `most_missed`. Ranks missed by fewer, or under an earlier epoch, are introduced again.
        """
        reported: Counter[str] = Counter()
        reporters = [one for one in self.members if one.spec.group is Group.ATTENTION and one.is_up]
        lost = [one.status.sections.get("lost", {}) for one in reporters if one.status]
        epochs_in_use = {one.name: one.spec.epoch for one in self.members if one.is_up}
        missed = [
            (name, epoch)
            for epochs in lost
            for name, epoch in epochs.items()
            if name in epochs_in_use
        ]
        reported.update(name for name, epoch in missed if epoch == epochs_in_use[name])
        if missed and now_s - self._introduced_s >= INTRODUCE_PERIOD_S:
            self._introduced_s = now_s
            self._introduce()
        most, self._missed_since_s = most_missed(
            reported, len(reporters), self._missed_since_s, now_s
        )
        return dict.fromkeys(most, "attention ranks have lost it, and it reports no problem")

    def next_epoch(self) -> int:
        with self._lock:
            self.epoch += 1
            return self.epoch

    def join(self, member: Member) -> None:
        """Add a started rank: it is supervised and in the directory from now on.

        All ranks are introduced to each other, except expert ranks, which join when experts move.
        """
        self.members = [*self.members, member]
        if member.spec.group is not Group.EXPERT:
            self._introduce()

    def leave(self, member: Member) -> None:
        """Remove a rank from the directory without replacement; the caller drains it."""
        self.draining = [*self.draining, member]
        self.members = [one for one in self.members if one is not member]

    def gone(self, member: Member) -> None:
        """Forget a drained rank."""
        self.draining = [one for one in self.draining if one is not member]

    def of_kind(self, kind: Group) -> list[Member]:
        """Return the members of a kind in rank order."""
        found = [member for member in self.members if member.spec.group is kind]
        return sorted(found, key=lambda member: member.spec.rank)

    def has(self, members: Sequence[Member]) -> bool:
        """Return whether all are still members."""
        return all(member in self.members for member in members)

    def _is_all(self, members: Sequence[Member]) -> bool:
        return len(members) == len(self.members)

    def restart(self, lost: Sequence[Member], closing: threading.Event) -> None:
        """Restart the lost ranks under one new epoch, unless the fleet closes.

        Raises the error that prevents their start; their actors are killed then.
        """
        epoch, timeout_s = self.next_epoch(), self._config.groups.ready_timeout_s
        handles = [member.place.start() for member in lost]
        try:
            found = [
                self._settled(member, handle, closing)
                for member, handle in zip(lost, handles, strict=True)
            ]
            specs = self._specs(lost, found, epoch)
            ready = form_group(
                specs,
                handles,
                timeout_s=timeout_s,
                others=lambda: [one.ready for one in self.working],
                allow_unreachable=not self._is_all(lost),
            )
        except BaseException as error:
            kill_all(handles)
            if isinstance(error, TimeoutError):
                message = f"not placed within {timeout_s:g} s (groups.ready_timeout_s)"
                raise TandemError(message) from None
            raise
        if closing.is_set() or not self.has(lost):
            kill_all(handles)
            return
        for member, spec, handle, reported in zip(lost, specs, handles, ready, strict=True):
            member.assign(spec, handle, reported)
            self._count(member)
        if not self._is_all(lost):  # else they have been formed as a whole
            self._introduce()

    def _check(self, member: Member, now_s: float, stalled_s: float) -> str:
        try:
            suspected = self._suspects.pop(member.ready.client_address, "")
            return suspected or member.check(now_s, stalled_s)
        except Exception as error:  # noqa: BLE001 - supervision continues with the next round
            event(log, "worker_status_failed", logging.WARNING, name=member.name, error=error)
            return ""

    def _specs(self, lost: Sequence[Member], found: list[Node], epoch: int) -> list[RankSpec]:
        """Return the specs of the replacements; if all restart, the backend follows their nodes.

        (Workers that gather from each other also serve those of other nodes.)
        """
        if self._is_all(lost):
            hosts = [node.host for node in found]
            self.backend = resolve_backend(self._config, lost[0].place.placed.device, hosts).backend
        return [
            msgspec.structs.replace(
                member.spec, epoch=epoch, host=node.listen_host, backend=self.backend
            )
            for member, node in zip(lost, found, strict=True)
        ]

    def _introduce(self) -> None:
        """Send the addresses of all working ranks to each other.

        Lost ranks are omitted until replaced.
        """
        with self._lock:
            working = self.working
            handles = {member.name: member.handle for member in working}
            introduce([member.ready for member in working], handles)

    def _settled(self, member: Member, handle: RayRank, closing: threading.Event) -> Node:
        """Return the node of the started process.

        Waits while no node has room; otherwise raises TimeoutError after groups.ready_timeout_s.
        """
        started, timeout_s = handle.started(), self._config.groups.ready_timeout_s
        end_s, reported = time.monotonic() + timeout_s, False
        while not closing.is_set() and time.monotonic() < end_s and self.has([member]):
            try:
                started.result(PLACE_PERIOD_S)
                return member.place.node
            except TimeoutError:
                if member.place.placed.is_complete:
                    continue
            end_s = time.monotonic() + timeout_s
            if not reported:
                reported, needs = True, member.place.needs
                event(log, "worker_node_unknown", logging.ERROR, name=member.name, needs=needs)
        raise TimeoutError

    def _count(self, member: Member) -> None:
        with self._lock:
            self.restarts += 1
        epoch, pid = member.spec.epoch, member.ready.pid
        event(log, "worker_replaced", logging.WARNING, name=member.name, epoch=epoch, pid=pid)


def kill_all(handles: Sequence[RayRank]) -> None:
    for handle in handles:
        ray.kill(handle.actor)
