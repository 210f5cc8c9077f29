"""One run: faults one after the other, and now and then two at once, under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx

from benchmarks.robustness.clients import Clients, Outcome
from benchmarks.robustness.hostile import HostileTraffic
from benchmarks.robustness.leaks import Leaks, held, shared
from benchmarks.robustness.links import Links
from benchmarks.robustness.memory import MemoryWatch
from benchmarks.robustness.places import Places, not_adopted, not_newer
from benchmarks.robustness.questions import Load
from benchmarks.robustness.schedule import Fault, Kind
from contracts.errors import TandemError
from contracts.ranks import RankStatus

FILLER = Path("/dev/shm/chaos-fills-it")
WHOLE_S = 60.0  # until everything serves again after a fault
SETTLE_S = 10.0  # limit until resources return to their level before the fault
POLL_S = 0.05
DRAIN_S = 60.0
PIECES = 32  # of a stream with two choices, after which earlier losses count no longer
LAUNCHER = "launcher-0"
HOSTILE_PER_S = 2.0


class Target(Protocol):
    """What faults are done to. replaced: who, and when his loss was found, where that is known.
    links: between its two nodes; None: it has one."""

    replaced: list[tuple[str, float]]
    links: Links | None

    @property
    def urls(self) -> Sequence[str]: ...

    @property
    def is_whole(self) -> bool: ...

    @property
    def others(self) -> int:
        """Processes that have none of the roles."""

    def ended(self, url: str, since_s: float) -> bool: ...

    def processes(self) -> dict[str, int]: ...

    def kill(self, role: str) -> None: ...

    def wake(self, role: str) -> str:
        """Replace this stopped, unreachable rank, then wake it and send it the addresses of the
        others. Return a failure: it was accepted again."""

    def status(self) -> list[RankStatus]: ...


class Done(NamedTuple):
    """A fault that was done, at that time. whole_s: how long until everything served again; None:
    it never did. found_s: until the loss was found, where it was one."""

    fault: Fault
    at_s: float
    whole_s: float | None
    found_s: float | None


class Run:
    """differed: undisturbed answers that differed when repeated, by kind. on_done: called after
    each fault. own_shm: no other program uses /dev/shm."""

    def __init__(
        self,
        target: Target,
        faults: Sequence[Fault],
        load: Load,
        *,
        own_shm: bool = False,
        exact: bool = True,
        hostile: HostileTraffic | None = None,
        on_done: Callable[[Run], None] = lambda _: None,
    ) -> None:
        self._target, self.faults, self._load = target, faults, load
        self._own_shm, self._on_done = own_shm, on_done
        self._leaks = Leaks()
        self.clients = Clients(lambda: target.urls, target.ended, exact=exact)
        self.undisturbed: list[Outcome] = []  # before the first fault, under the same load
        self.began_s = time.monotonic()
        self.done: list[Done] = []
        self.wrong: list[str] = []  # what was found beside answers
        self.differed: dict[str, int] = {}
        self.memory = MemoryWatch(target.processes)
        self.hostile = hostile
        self.used_blocks: dict[str, float] = {}  # by rank, at the end

    async def go(self, *, undisturbed_s: float = 0.0) -> None:
        """undisturbed_s: under load before the first fault."""
        self.differed = dict(await self.clients.learn(self._load))
        load = asyncio.create_task(self.clients.run(self._load))
        beside = [asyncio.create_task(self.memory.run())]
        if self.hostile is not None:
            beside.append(asyncio.create_task(self.hostile.run(HOSTILE_PER_S, seed=1)))
        await asyncio.sleep(undisturbed_s)
        self.undisturbed, self.clients.outcomes = self.clients.outcomes, []
        self.began_s = time.monotonic()
        try:
            await self._faults_in_turn()
        finally:
            for task in beside:
                task.cancel()
            self.clients.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(load, DRAIN_S)
        self.wrong += self.memory.failures()
        if self.hostile is not None:
            self.wrong += self.hostile.failures
        await self._wait_free()

    async def _faults_in_turn(self) -> None:
        pending: list[tuple[Fault, float]] = []
        for fault in self.faults:
            if not pending:
                await asyncio.sleep(fault.pause_s)
                before = await asyncio.to_thread(self._places)
            pending.append((fault, time.monotonic()))
            await self._do(fault)
            if fault.with_next:
                continue
            longest_s = max(each.stopped_s for each, _ in pending)
            await asyncio.sleep(max(0.3, longest_s))
            whole_at_s = await self._whole()
            self.done += [self._done(each, at_s, whole_at_s) for each, at_s in pending]
            await self._answers_come_on(time.monotonic())
            await self._count(" and ".join(sorted({each.kind_and_role for each, _ in pending})))
            now = await asyncio.to_thread(self._places)
            self.wrong += not_newer(before, now)
            if {one.target for one, _ in pending} == {LAUNCHER}:
                self.wrong += not_adopted(before, now)
            pending = []
            self._on_done(self)

    async def _do(self, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        if fault.kind is Kind.KILL:
            await asyncio.to_thread(self._target.kill, fault.target)
        elif fault.kind is Kind.STOP:
            pid = (await asyncio.to_thread(self._target.processes)).get(fault.target)
            if pid is not None and _signalled(pid, signal.SIGSTOP):
                loop.call_later(fault.stopped_s, _signalled, pid, signal.SIGCONT)
        elif fault.kind is Kind.WAKE:
            if problem := await asyncio.to_thread(self._target.wake, fault.target):
                self.wrong.append(problem)
        elif fault.kind is Kind.FULL:
            with FILLER.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(FILLER.parent).free)
            loop.call_later(fault.stopped_s, FILLER.unlink)
        else:
            links = self._target.links
            assert links is not None, f"{fault.label} needs two nodes"
            await asyncio.to_thread(links.disturb, fault.kind)
            loop.call_later(fault.stopped_s, links.mend)

    async def _whole(self) -> float | None:
        """When everything served again."""
        end_s = time.monotonic() + WHOLE_S
        while time.monotonic() < end_s:
            if await asyncio.to_thread(lambda: self._target.is_whole):
                return time.monotonic()
            await asyncio.sleep(POLL_S)
        return None

    async def _answers_come_on(self, at_s: float) -> None:
        """Wait until the requests in progress at `at_s` have received more: a request that meets
        three faults in succession fails."""
        end_s = at_s + WHOLE_S
        while time.monotonic() < end_s and not self.clients.have_come_on(at_s, PIECES):
            await asyncio.sleep(POLL_S)

    async def _count(self, label: str) -> None:
        """What everybody holds after a fault. What has only not been let go of yet has time."""
        end_s = time.monotonic() + SETTLE_S
        while True:
            counts = await asyncio.to_thread(self._held)
            late = time.monotonic() > end_s
            if not self._leaks.grown(label, counts, last=False) or late:
                self.wrong += self._leaks.grown(label, counts)
                return
            await asyncio.sleep(10 * POLL_S)

    def _places(self) -> Places:
        try:
            epochs = {rank.name: rank.epoch for rank in self._target.status() if rank.healthy}
        except (TandemError, httpx.HTTPError, TimeoutError):
            epochs = {}
        return Places(self._target.processes(), self._target.others, epochs)

    def _held(self) -> dict[tuple[str, int], dict[str, int]]:
        roles = self._target.processes()
        ports = {int(url.rpartition(":")[2]) for url in self._target.urls}
        found = held(roles, ports) | shared(self._target.others, self._own_shm)
        return {key: dict(counts) for key, counts in found.items()}

    def _done(self, fault: Fault, at_s: float, whole_at_s: float | None) -> Done:
        found = [s for name, s in self._target.replaced if name == fault.target and s >= at_s]
        whole_s = None if whole_at_s is None else whole_at_s - at_s
        return Done(fault, at_s, whole_s, found[0] - at_s if found else None)

    async def _wait_free(self) -> None:
        """Until no block is in use, or for so long."""
        end_s = time.monotonic() + DRAIN_S
        while True:
            try:
                ranks = await asyncio.to_thread(self._target.status)
            except (TandemError, httpx.HTTPError, TimeoutError) as error:
                if time.monotonic() > end_s:
                    self.wrong.append(f"no status after the last fault: {error}")
                    return
                await asyncio.sleep(10 * POLL_S)
                continue
            self.used_blocks = {
                rank.name: rank.sections["kv_blocks"]["used"]
                for rank in ranks
                if "kv_blocks" in rank.sections
            }
            if not any(self.used_blocks.values()) or time.monotonic() > end_s:
                return
            await asyncio.sleep(POLL_S)


def _signalled(pid: int, number: signal.Signals) -> bool:
    """Whether the process is there still."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
