"""What the tests of this folder share."""

from __future__ import annotations

import pytest

import actors.ranks.process
from tests.support.fork_server import start_forked


@pytest.fixture
def ranks_are_forked(forked_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test starts as processes come without the seconds of an import."""
    start_forked(monkeypatch, actors.ranks.process)
