"""Recovery of a group: streams end with the expected tokens whatever ranks are lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.ranks.expert_rank import ExpertLoop, expert_rank
from actors.ranks.rank import Rank
from contracts.config import ChannelConfig
from contracts.errors import ChannelError
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.group_harness import (
    RankConnection,
    ThreadGroup,
    connections,
    greedy,
    group_config,
    until,
)
from tests.support.known_streams import PROMPTS, TOKENS
from tests.support.local_group import LocalGroup

pytestmark = pytest.mark.usefixtures("ranks_are_forked")


class Load:
    """Generations with known tokens on each attention rank."""

    def __init__(self, clients: list[RankConnection], right: list[list[int]]) -> None:
        self._right = right
        self._submitted = [
            (client, [client.submit(prompt, sampling=greedy(TOKENS)) for prompt in PROMPTS])
            for client in clients
        ]

    @staticmethod
    def started(clients: list[RankConnection], right: list[list[int]]) -> Load:
        load = Load(clients, right)
        load.wait_started()
        return load

    def wait_started(self) -> None:
        for client, requests in self._submitted:
            client.wait_started(requests[0])

    def check(self) -> None:
        for client, requests in self._submitted:
            assert [client.generated(request)[0] for request in requests] == self._right


def experts_there(rank: Rank) -> int:
    assert isinstance(rank.loop, ExpertLoop)
    return rank.loop.rebalancer.store.count


@contextlib.contextmanager
def threads(
    folder: Path, right: list[list[int]], *ranks: int, **sections: Any
) -> Iterator[tuple[ThreadGroup, Callable[[], Load]]]:
    config = group_config(*ranks, **sections)
    with ThreadGroup(folder, config) as group, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(group.client(n)) for n in range(ranks[0])]
        yield group, lambda: Load.started(clients, right)


# --- expert ranks, each a thread


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_streams_continue_through_expert_rank_loss_and_recovery(
    deep: Path, right: list[list[int]], experts: int
) -> None:
    with threads(deep, right, 2, experts) as (group, load):
        before = [experts_there(rank) for rank in group.experts]
        running = load()
        group.experts[0].stop()
        if experts > 1:
            running.check()
            running = load()
        group.replace("expert-0")
        running.check()
        load().check()
        until(lambda: [experts_there(rank) for rank in group.experts] == before)
        for rank in group.attention:
            status = rank.status()
            assert "experts" not in status.notes
            assert "lost" not in status.sections
            placement = status.sections["placement"]
            assert (placement["stand_in"], placement["return"]) == (int(experts > 1), 1)


def test_streams_continue_through_two_losses(deep: Path, right: list[list[int]]) -> None:
    with threads(deep, right, 1, 3) as (group, load):
        before = [experts_there(rank) for rank in group.experts]
        running = load()
        group.experts[0].stop()
        group.experts[2].stop()
        running.check()
        group.replace("expert-2")
        running = load()
        group.experts[1].stop()
        running.check()
        group.replace("expert-0")
        group.replace("expert-1")
        load().check()
        until(lambda: [experts_there(rank) for rank in group.experts] == before)


def test_requests_wait_without_memory_for_failover(
    deep: Path, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.rebalance.expert_loading.available_bytes", lambda: 0)
    with threads(deep, right, 1, 2) as (group, load):
        running = load()
        group.experts[1].stop()
        until(lambda: "requests wait" in group.attention[0].status().notes.get("experts", ""))
        group.replace("expert-1")
        running.check()
        assert group.attention[0].status().sections["placement"]["stand_in"] == 0


def test_expert_rank_with_old_epoch_is_rejected(deep: Path, right: list[list[int]]) -> None:
    with threads(deep, right, 1, 1) as (group, load):
        address = group.experts[0].ready.channel_address
        old = group.experts[0].spec
        group.replace("expert-0")
        load().check()
        late = expert_rank(old)
        try:
            assert late.ready.channel_address != address
            with pytest.raises(ChannelError, match=r"expert-0 is at epoch 1, which has been rep"):
                group.attention[0].hooks.connect({"expert-0": late.ready.channel_address})
        finally:
            late.stop()
        load().check()


# --- attention ranks


def test_lost_attention_rank_is_replaced(deep: Path, right: list[list[int]]) -> None:
    with ThreadGroup(deep, group_config(2, 2)) as group, group.client(1) as other:
        doomed = group.client(0)
        lost = Load([doomed], right)
        running = Load([other], right)
        lost.wait_started()
        running.wait_started()
        group.replace("attention-0")
        running.check()
        doomed.close()
        with group.client(0) as again:
            Load([again, other], right).check()
        assert group.attention[0].status().epoch == 2


# --- processes


@contextlib.contextmanager
def processes(
    folder: Path, right: list[list[int]], *ranks: int, backend: str = "shm", **sections: Any
) -> Iterator[tuple[LocalGroup, Callable[[], Load]]]:
    config = group_config(*ranks, **sections)
    with LocalGroup(str(folder), config, backend=backend) as group, contextlib.ExitStack() as stack:
        connected = connections(group.client_addresses, group.token)
        clients = [stack.enter_context(client) for client in connected]
        yield group, lambda: Load.started(clients, right)


@pytest.mark.parametrize(("fault", "backend"), [(signal.SIGKILL, "shm"), (signal.SIGSTOP, "tcp")])
def test_expert_rank_losses_do_not_change_streams(
    deep: Path, right: list[list[int]], fault: signal.Signals, backend: str
) -> None:
    channel = (
        {"heartbeat_timeout_s": ChannelConfig().heartbeat_timeout_s}
        if fault is signal.SIGSTOP
        else {}
    )
    with processes(deep, right, 2, 2, backend=backend, channel=channel) as (group, load):
        running = load()
        group.processes["expert-1"].send_signal(fault)
        running.check()
        assert "failover active" in group.rank_status("attention-0").notes["experts"]
        running = load()
        group.replace("expert-1")
        running.check()
        until(lambda: "experts" not in group.rank_status("attention-1").notes)
        load().check()
        assert "experts" not in group.rank_status("attention-1").notes
