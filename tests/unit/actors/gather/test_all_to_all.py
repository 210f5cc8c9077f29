"""Waits of the exchange between workers."""

from types import SimpleNamespace
from typing import Any

from actors.channels.base import PacketKind
from actors.gather.all_to_all import AllToAll
from kernels.steps import run_to_end


def test_packet_that_arrives_during_a_yield_is_not_waited_for() -> None:
    """Otherwise both workers sleep for the time of a poll, with their packets at hand."""
    polls: list[float] = []
    exchange: Any = SimpleNamespace(
        _peers=["other"], _pass=1, _arrived={}, _clock=lambda: 0.0, _poll=polls.append
    )
    steps = AllToAll._receive(exchange, PacketKind.A2E, 3)
    next(steps)
    exchange._arrived[PacketKind.A2E, 1, 3, "other"] = packet = object()
    found: Any = run_to_end(steps)
    assert found == {"other": packet}
    assert not polls
