"""A rank that was stopped and out of reach while another came in its place, and wakes up again."""

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from contracts.errors import LaunchError, TandemError
from tests.support.rank_process import RankProcess

WAKE_S = 60.0
STATUS_S = 10.0
LOOK_S = 0.1
REFUSED = "has been replaced by"


def retries_refused(
    stray: RankProcess,
    experts: Mapping[str, str],
    kill_its_successor: Callable[[], None],
    is_whole: Callable[[], bool],
) -> str:
    """Wake a replaced rank and end it. Return a failure: an expert rank accepted it, or rejected it
    for another reason than its replacement. experts: addresses by name."""
    end_s = time.monotonic() + WAKE_S
    stray.send_signal(signal.SIGCONT)
    try:
        while _linked(stray, experts) and time.monotonic() < end_s:
            time.sleep(LOOK_S)  # it finds out that it has been left
        kill_its_successor()
        while True:
            error = _connect_error(stray, experts)
            if linked := _linked(stray, experts):
                return f"{stray.name}, which had been replaced, was taken back by {linked}"
            if REFUSED not in error:
                return f"{stray.name}, which had been replaced, received {error or 'nothing'}"
            if time.monotonic() > end_s or is_whole():
                return ""
            time.sleep(LOOK_S)
    finally:
        stray.send_signal(signal.SIGKILL)
        stray.close()


def _connect_error(stray: RankProcess, experts: Mapping[str, str]) -> str:
    """Why they do not take it back."""
    try:
        stray.call("connect", experts).result(STATUS_S)
    except TandemError as error:
        return error.message
    return ""


def _linked(stray: RankProcess, experts: Mapping[str, str]) -> list[str]:
    """Expert ranks that it has not lost."""
    lost = stray.call("status").result(STATUS_S).sections.get("lost", {})
    return [name for name in experts if name not in lost]


class OutOfReach(RankProcess):
    """Stands for a rank that its supervisor cannot reach and considers lost."""

    def __init__(self, rank: RankProcess) -> None:
        self.name, self._process = rank.name, _Gone(rank.pid)  # type: ignore[assignment]

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(LaunchError(f"{self.name}: out of reach"))
        return future

    def send_signal(self, number: signal.Signals) -> None: ...

    def close(self, timeout_s: float = 10.0) -> int:
        return 0


class _Gone(NamedTuple):
    pid: int

    def poll(self) -> int:
        return 0
