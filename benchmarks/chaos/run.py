"""One run: faults one after the other, and now and then two at once, under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.chaos.clients import Clients
from benchmarks.chaos.questions import questions
from benchmarks.chaos.schedule import Fault, Kind
from contracts.worker import RankStatus

FILLER = Path("/dev/shm/chaos-fills-it")
AT_ONCE = {"greedy": 2, "seeded": 2, "classify": 1, "bulk": 1}
WHOLE_S = 60.0  # until everything serves again after a fault
POLL_S = 0.05
DRAIN_S = 60.0


class Target(Protocol):
    """What faults are done to. replaced: who, and when his loss was found, where that is known."""

    replaced: list[tuple[str, float]]

    @property
    def urls(self) -> Sequence[str]: ...

    @property
    def is_whole(self) -> bool: ...

    def ended(self, url: str, since_s: float) -> bool: ...

    def processes(self) -> dict[str, int]: ...

    def kill(self, role: str) -> None: ...

    def status(self) -> list[RankStatus]: ...


class Done(NamedTuple):
    """A fault that was done, at that time. whole_s: how long until everything served again; None:
    it never did. found_s: until the loss was found, where it was one."""

    fault: Fault
    at_s: float
    whole_s: float | None
    found_s: float | None


class Run:
    """differed: of the undisturbed answers, those that were others the second time, by kind."""

    def __init__(self, target: Target, faults: Sequence[Fault]) -> None:
        self._target, self._faults = target, faults
        self.clients = Clients(lambda: target.urls, target.ended)
        self.done: list[Done] = []
        self.differed: dict[str, int] = {}
        self.used_blocks: dict[str, float] = {}  # by rank, at the end

    async def go(self) -> None:
        by_kind = questions()
        everything = [question for some in by_kind.values() for question in some]
        self.differed = dict(await self.clients.learn(everything))
        load = asyncio.create_task(self.clients.run(by_kind, AT_ONCE))
        try:
            await self._faults_in_turn()
        finally:
            self.clients.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(load, DRAIN_S)
        await self._wait_free()

    async def _faults_in_turn(self) -> None:
        pending: list[tuple[Fault, float]] = []
        for fault in self._faults:
            if not pending:
                await asyncio.sleep(fault.pause_s)
            pending.append((fault, time.monotonic()))
            await self._do(fault)
            if fault.with_next:
                continue
            longest_s = max(each.stopped_s for each, _ in pending)
            await asyncio.sleep(max(0.3, longest_s))
            whole_at_s = await self._whole()
            self.done += [self._told(each, at_s, whole_at_s) for each, at_s in pending]
            await self._streams_end(time.monotonic())
            pending = []

    async def _do(self, fault: Fault) -> None:
        if fault.kind is Kind.KILL:
            await asyncio.to_thread(self._target.kill, fault.target)
        elif fault.kind is Kind.STOP:
            pid = (await asyncio.to_thread(self._target.processes)).get(fault.target)
            if pid is not None and _signalled(pid, signal.SIGSTOP):
                asyncio.get_running_loop().call_later(
                    fault.stopped_s, _signalled, pid, signal.SIGCONT
                )
        else:
            with FILLER.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(FILLER.parent).free)
            loop = asyncio.get_running_loop()
            loop.call_later(fault.stopped_s, FILLER.unlink)

    async def _whole(self) -> float | None:
        """When everything served again."""
        end_s = time.monotonic() + WHOLE_S
        while time.monotonic() < end_s:
            if await asyncio.to_thread(lambda: self._target.is_whole):
                return time.monotonic()
            await asyncio.sleep(POLL_S)
        return None

    async def _streams_end(self, at_s: float) -> None:
        """Those that were open then: nobody meets more than two faults, for a request whose third
        rank is lost is given up."""
        end_s = at_s + WHOLE_S
        while time.monotonic() < end_s:
            if all(
                one.ended_s < float("inf") for one in self.clients.streams if one.began_s < at_s
            ):
                return
            await asyncio.sleep(POLL_S)

    def _told(self, fault: Fault, at_s: float, whole_at_s: float | None) -> Done:
        found = [s for name, s in self._target.replaced if name == fault.target and s >= at_s]
        whole_s = None if whole_at_s is None else whole_at_s - at_s
        return Done(fault, at_s, whole_s, found[0] - at_s if found else None)

    async def _wait_free(self) -> None:
        """Until no block is in use, or for so long."""
        end_s = time.monotonic() + DRAIN_S
        while True:
            ranks = await asyncio.to_thread(self._target.status)
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
