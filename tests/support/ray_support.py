"""Ray clusters of a test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@contextlib.contextmanager
def ray_of_our_own(state: Path | None = None) -> Iterator[None]:
    """What starts inside finds no other cluster. state: where it keeps its logs; None: where a
    user's would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
        if state is not None:
            patch.setenv("XDG_STATE_HOME", str(state))
        yield


def processes_of(title: str) -> list[psutil.Process]:
    """Children of ours with this in their titles."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()[:1]):
                found.append(process)
        except psutil.Error:
            continue
    return found
