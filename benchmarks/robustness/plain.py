"""What chaos is done to, without Ray: ranks and ingress replicas as plain processes, and a thread
that replaces those that are lost. (A cluster's supervisor is cluster/fleet's; what it finds out and
does is the same, but that a rank counts as hung here when its process is stopped.)"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import msgspec
import psutil

from actors.ranks.rendezvous import peer_addresses
from benchmarks.robustness.front import Orders
from benchmarks.robustness.front_process import FrontProcess
from benchmarks.robustness.links import Links
from benchmarks.robustness.stray import WAKE_S, OutOfReach, retries_refused
from benchmarks.support.two_nodes import HEAD, OTHER
from cluster.fleet.rank_group import INTRODUCE_PERIOD_S
from cluster.fleet.repair import most_missed
from cluster.fleet.replies import Directory
from contracts.config import TandemConfig
from contracts.logs import event
from contracts.ranks import Group, RankStatus
from tests.support.local_group import LocalGroup, RankLocation

log = logging.getLogger("tandem.chaos")

LOOK_S = 0.1
HUNG_AFTER_S = 3.0  # as cluster/fleet/rank_group.py
STATUS_S = 10.0
ON_OTHER_NODE = ("attention-1", "expert-1")


class PlainTarget:
    """A context manager: everything serves inside, and no process of it is left afterwards.

    links: between the node that this runs on and another, where half of the ranks are."""

    def __init__(
        self, folder: Path, config: TandemConfig, *, replicas: int = 2, links: Links | None = None
    ) -> None:
        self._config, self._replicas, self.links = config, replicas, links
        self._backend = "shm" if links is None else "tcp"  # shared memory would go around the link
        locations = None if links is None else _locations(links)
        self._group = LocalGroup(
            str(folder), config, planner=True, backend=self._backend, locations=locations
        )
        self._fronts: list[FrontProcess] = []
        self._ended_s: dict[str, float] = {}  # ingress replicas that have been killed, by URL
        self._stopped_since_s: dict[str, float] = {}
        self._status_calls: dict[str, Future[RankStatus]] = {}
        self._misses: dict[str, dict[str, float]] = {}  # epochs of expert ranks, by who lost them
        self._missed_since_s: dict[str, float] = {}
        self._introduced_s = -math.inf
        self._epochs: dict[str, int] = {}  # of ranks that have been replaced
        self._replacing: dict[str, threading.Thread] = {}  # by name
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards who is in which place
        self._thread = threading.Thread(target=self._look_after, name="supervisor", daemon=True)
        self.replaced: list[tuple[str, float]] = []  # who, and when his loss was found

    def __enter__(self) -> PlainTarget:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._group)
            stack.callback(self._close_fronts)
            for number in range(self._replicas):
                self._fronts.append(self._start_front(number))
            for front in self._fronts:
                front.wait()
            self._thread.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for thread in (self._thread, *list(self._replacing.values())):
            thread.join(2 * STATUS_S)
        self._stack.close()

    # ---- what chaos needs of it

    @property
    def urls(self) -> list[str]:
        """Of the ingress replicas that serve."""
        with self._lock:
            return [f"http://127.0.0.1:{front.port}" for front in self._serving]

    def ended(self, url: str, since_s: float) -> bool:
        """Whether the ingress replica there has been killed after that."""
        return self._ended_s.get(url, 0.0) >= since_s

    def processes(self) -> dict[str, int]:
        """Role -> process id of each that lives, the planner and ingress replicas too."""
        with self._lock:
            found = {name: process.pid for name, process in self._group.processes.items()}
            return found | {one.name: one.pid for one in self._fronts if one.port}

    def kill(self, role: str) -> None:
        for front in self._fronts:
            if front.name == role:
                self._ended_s[f"http://127.0.0.1:{front.port}"] = time.monotonic() + 1.0
                front.send_signal(signal.SIGKILL)
        if role in self._group.processes:
            self._group.processes[role].send_signal(signal.SIGKILL)

    def wake(self, role: str) -> str:
        """See `run.Target`. An attention rank also tries to rejoin before it has a replacement."""
        with self._lock:
            stray, seen = self._group.processes[role], len(self.replaced)
            stray.send_signal(signal.SIGSTOP)
            self._group.processes[role] = OutOfReach(stray)
        end_s = time.monotonic() + WAKE_S
        while not (self.is_whole and len(self.replaced) > seen):
            if time.monotonic() > end_s:
                break
            time.sleep(LOOK_S)
        experts = peer_addresses(self._group.ready, Group.ATTENTION)
        return retries_refused(stray, experts, lambda: self.kill(role), lambda: self.is_whole)

    def status(self) -> list[RankStatus]:
        return self._group.status(STATUS_S)

    @property
    def others(self) -> int:
        return len(psutil.Process().children(recursive=True)) - len(self.processes())

    @property
    def is_whole(self) -> bool:
        """Return whether every rank serves and none awaits a replacement."""
        with self._lock:
            whole = len(self._serving) == self._replicas and not self._lost()
            return whole and not self._replacing and not self._are_missed()

    @property
    def _serving(self) -> list[FrontProcess]:
        return [front for front in self._fronts if front.port and not front.is_gone]

    # ---- the supervisor's

    def _look_after(self) -> None:
        while not self._closing.wait(LOOK_S):
            with self._lock:
                lost = self._lost()
            for name, reason in lost.items():
                event(log, "worker_lost", logging.WARNING, name=name, reason=reason)
                self.replaced.append((name, time.monotonic()))
                self._replacing[name] = threading.Thread(
                    target=self._replace, args=[name], name=f"replaces-{name}", daemon=True
                )
                self._replacing[name].start()
            self._replace_fronts()

    def _lost(self) -> dict[str, str]:
        """Ranks and the planner: gone, stopped for too long, or lost to those that ask them."""
        lost, now_s = {}, time.monotonic()
        for name, process in list(self._group.processes.items()):
            if name in self._replacing:
                continue
            if process._process.poll() is not None:
                lost[name] = "its process has ended"
            elif not is_stopped(process.pid):
                self._stopped_since_s.pop(name, None)
            elif now_s - self._stopped_since_s.setdefault(name, now_s) > HUNG_AFTER_S:
                lost[name] = f"stopped for {HUNG_AFTER_S:g} s"
        for name, reason in self._reported_losses(lost).items():
            lost.setdefault(name, reason)
        return lost

    def _reported_losses(self, lost: Mapping[str, str]) -> dict[str, str]:
        """What attention ranks say of themselves and of the expert ranks, if they have answered."""
        found: dict[str, str] = {}
        for name, process in list(self._group.processes.items()):
            if not name.startswith("attention-"):
                continue
            if name in lost or name in self._replacing:
                self._misses.pop(name, None)
                continue
            call = self._status_calls.get(name)
            if call is None:
                self._status_calls[name] = process.call("status")
            elif call.done():
                del self._status_calls[name]
                if call.exception() is not None:
                    continue
                status = call.result()
                if not status.healthy:
                    found[name] = status.reason
                self._misses[name] = status.sections.get("lost", {})
        return self._missed(time.monotonic()) | found

    def _missed(self, now_s: float) -> dict[str, str]:
        """Expert ranks that all have lost, or half of them for long. The others are introduced
        again: as cluster/fleet/rank_group.py."""
        missed = Counter(self._are_missed())
        if missed and now_s - self._introduced_s >= INTRODUCE_PERIOD_S:
            self._introduced_s = now_s
            self._group.introduce(list(self._replacing))
        call, since_s = len(self._misses), self._missed_since_s
        most, self._missed_since_s = most_missed(missed, call, since_s, now_s)
        return dict.fromkeys(most, "attention ranks have lost it")

    def _are_missed(self) -> list[str]:
        """Expert ranks that are there, once for each attention rank that has lost them."""
        return [
            expert
            for some in list(self._misses.values())
            for expert, epoch in some.items()
            if epoch == self._epochs.get(expert, 1)
            and expert not in self._replacing
            and not is_stopped(self._pid(expert))
        ]

    def _pid(self, name: str) -> int:
        return self._group.processes[name].pid

    def _replace(self, name: str) -> None:
        """Another in its place, until one is there. Each on a thread of its own: one that does not
        come holds up no other."""
        while not self._closing.is_set():
            try:
                self._epochs[name] = self._group.replace(
                    name, without=lambda: [one for one in list(self._replacing) if one != name]
                )
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                event(log, "worker_replacement_failed", logging.ERROR, name=name, error=error)
                self._closing.wait(0.5)
        for known in (self._status_calls, self._stopped_since_s, self._misses):
            known.pop(name, None)
        planner = {one.name: one.channel_address for one in self._group.ready}["planner-0"]
        for other, process in list(self._group.processes.items()):
            if other.startswith(("attention-", "expert-")):
                process.call("join_planner", planner)
        for front in self._fronts:
            front.publish(self._directory)
        del self._replacing[name]
        self._group.introduce(list(self._replacing))  # to those that came meanwhile, too

    def _replace_fronts(self) -> None:
        """One that comes waits for a rank, and no rank may wait for it: on a thread of its own."""
        for number, front in enumerate(self._fronts):
            if front.is_gone and front.name not in self._replacing and not self._closing.is_set():
                self._replacing[front.name] = threading.Thread(
                    target=self._replace_front, args=[number], name=f"replaces-{front.name}"
                )
                self._replacing[front.name].start()

    def _replace_front(self, number: int) -> None:
        self._fronts[number].close()
        another = self._start_front(number)
        with self._lock:
            self._fronts[number] = another
        another.publish(self._directory)  # ranks that came meanwhile
        another.wait()
        del self._replacing[another.name]

    def _start_front(self, number: int) -> FrontProcess:
        http = msgspec.structs.replace(self._config.http, port=0)
        config = msgspec.structs.replace(self._config, http=http)
        return FrontProcess(Orders(f"ingress-{number}", config, self._directory))

    @property
    def _directory(self) -> Directory:
        return Directory(
            client_addresses=self._group.client_addresses,
            prefill_addresses={},
            token=self._group.token,
            ranks=[],
        )

    def _close_fronts(self) -> None:
        for front in self._fronts:
            front.close()


def _locations(links: Links) -> dict[str, RankLocation]:
    names = [f"{kind}-{number}" for kind in ("attention", "expert") for number in (0, 1)]
    there = RankLocation(OTHER, links.nodes.inside(1))
    locations = {name: there if name in ON_OTHER_NODE else RankLocation(HEAD) for name in names}
    return locations | {"planner-0": RankLocation(HEAD)}


def is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
