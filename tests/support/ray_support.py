"""Local Ray clusters, and the processes of a served application."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.fleet.replies import Directory, checked
from cluster.serving.server import RunningServer

REPLY_TIMEOUT_S = 60.0


@contextlib.contextmanager
def own_ray(state: Path) -> Iterator[None]:
    """Hide other clusters and keep logs in `state`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
        patch.setenv("XDG_STATE_HOME", str(state))
        yield


def processes_of(title: str) -> list[psutil.Process]:
    """Return the children of this process with `title` in their titles."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()[:1]):
                found.append(process)
        except psutil.Error:
            continue
    return found


def rank_pids(served: RunningServer) -> dict[str, int]:
    """Return the process ids of the application's ranks by name."""
    found: Directory = checked(served.groups.directory.remote().result(timeout_s=REPLY_TIMEOUT_S))
    return {rank.name: rank.pid for rank in found.ranks}
