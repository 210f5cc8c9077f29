"""A server and a real Prometheus with the committed rules at a faster pace."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple

import httpx
import psutil

from cluster.serving.server import RunningServer, serving
from contracts.loading import load_config
from tests.support.prometheus import Prometheus, config_of
from tests.support.ray_support import rank_pids
from tests.support.waiting import wait_until

DEADLINE_S = 150.0
LONG_PROMPT = "a long story that is told again and again and again. " * 20


class Watched(NamedTuple):
    """faster: pace of the rules. targets: "host:port" scraped beside the server's processes."""

    faster: float
    scrape_s: float = 1.0
    targets: Sequence[str] = ()


class World:
    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, watched: Watched, settings: Sequence[str]
    ) -> None:
        ours = ["groups.ready_timeout_s=100", f"metrics.targets={folder}"]
        self.served: RunningServer = stack.enter_context(
            serving(load_config(None, [*ours, *settings]))
        )
        self.http = stack.enter_context(httpx.Client(base_url=self.served.url, timeout=DEADLINE_S))
        config = config_of(
            folder,
            list(watched.targets),
            listed=folder,
            scrape_s=watched.scrape_s,
            faster=watched.faster,
        )
        self.prometheus = stack.enter_context(Prometheus(folder, config))
        self._numbers = itertools.count()
        self._known: dict[str, int] = {}

    def complete(self, priority: str, prompt: str = LONG_PROMPT, tokens: int = 2) -> None:
        """Send a prompt without a cached prefix; it may be refused."""
        body = {
            "model": "bundled",
            "prompt": f"{next(self._numbers)} {prompt}",
            "max_tokens": tokens,
            "ignore_eos": True,
            "priority": priority,
        }
        self.http.post("/v1/completions", json=body)

    def kill(self, name: str) -> int:
        """Kill a rank and return its pid."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def pids(self) -> dict[str, int]:
        return rank_pids(self.served)

    def compute(self, name: str, cpu_s: float) -> int:
        """Wait until a rank has used cpu_s, is replaced, or a second is over; return its pid."""
        pid, end_s = self._known.get(name, 0), time.monotonic() + 1.0
        try:
            process = psutil.Process(pid)
            had_s = sum(process.cpu_times()[:2])
            while sum(process.cpu_times()[:2]) < had_s + cpu_s and time.monotonic() < end_s:
                time.sleep(0.002)
        except psutil.Error:
            self._known = self.pids()
        return self._known[name]

    def fires(self, *names: str) -> None:
        """Wait until each has fired, not necessarily at the same time."""
        seen: set[str] = set()

        def have_fired() -> bool:
            seen.update(self.prometheus.firing())
            return seen.issuperset(names)

        until(have_fired, f"{names} have not fired")

    def resolves(self, *names: str) -> None:
        until(lambda: not self.prometheus.firing() & set(names), f"{names} have not resolved")


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    wait_until(is_so, otherwise, DEADLINE_S)


@contextlib.contextmanager
def stopped(pid: int, seconds: float) -> Iterator[None]:
    """Stop a process that may have been replaced, for some seconds more than the block takes."""
    _send(pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(seconds)
    finally:
        _send(pid, signal.SIGCONT)


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


@contextlib.contextmanager
def again_and_again(does: Callable[[], object], at_once: int = 1) -> Iterator[None]:
    """Inside so many threads do that, one time after the other."""
    ending = Event()

    def repeat() -> None:
        while not ending.is_set():
            does()

    with ThreadPoolExecutor(at_once) as pool:
        repeated = [pool.submit(repeat) for _ in range(at_once)]
        try:
            yield
        finally:
            ending.set()
    for each in repeated:
        each.result()
