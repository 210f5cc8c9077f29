"""Expert ranks are added and removed; every stream ends with the expected tokens."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.ranks.expert_resize import RunningRank, _check_room, expert_ranks_in_use, place_experts
from actors.ranks.rank import Rank
from contracts.errors import TandemError
from contracts.placement import Placement, PlacementState
from contracts.ranks import Group
from models.spec.model import read_spec
from planner.placement.resize import resize_placement
from planner.placement.slots import contiguous
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.fake_planner import FakePlanner
from tests.support.group_harness import (
    DEADLINE_S,
    RankConnection,
    ThreadGroup,
    experts_in_memory,
    greedy,
    group_config,
    until,
)
from tests.support.known_streams import PROMPTS, TOKENS
from tests.support.local_group import LocalGroup
from tests.support.placements import another

pytestmark = pytest.mark.usefixtures("ranks_are_forked")
FAST, SLOW = 1e9, 3e5  # bytes a second: at once; seconds


class Streams:
    """Repeated generations with known tokens on each attention rank."""

    def __init__(self, clients: list[RankConnection], right: list[list[int]]) -> None:
        self._right, self._ending = right, threading.Event()
        self.wrong: list[str] = []
        self.count = 0
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in clients]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        assert not self.wrong
        assert self.count

    def _run(self, client: RankConnection) -> None:
        while not self._ending.is_set() and not self.wrong:
            try:
                submitted = [client.submit(prompt, sampling=greedy(TOKENS)) for prompt in PROMPTS]
                found = [client.generated(request)[0] for request in submitted]
            except (AssertionError, OSError, TandemError) as error:
                self.wrong.append(repr(error))
                return
            if found != self._right:
                self.wrong.append(f"{found} instead of {self._right}")
            self.count += len(found)


@contextlib.contextmanager
def processes(
    folder: Path,
    right: list[list[int]],
    attention: int,
    expert_ranks: int,
    *,
    bytes_per_s: float = FAST,
    idle: int = 0,
    placed: Placement | None = None,
    **sections: Any,
) -> Iterator[tuple[LocalGroup, Streams]]:
    """Start a group with streams. idle: number of attention ranks without streams."""
    placement = {"bytes_per_s": bytes_per_s, **sections.pop("placement", {})}
    config = group_config(attention + idle, expert_ranks, placement=placement, **sections)
    placements = None if placed is None else {Group.EXPERT: placed}
    with (
        LocalGroup(str(folder), config, placements=placements) as group,
        contextlib.ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(RankConnection(*item, group.token))
            for item in list(group.client_addresses.items())[:attention]
        ]
        streams = Streams(clients, right)
        stack.callback(streams.end)
        yield group, streams


def check_settled(group: LocalGroup, folder: Path, ranks: int) -> None:
    """Wait until all ranks have the same placement and its experts; check that none is missing."""
    moe_layers = len(read_spec(folder).moe_layers)
    assert expert_ranks_in_use(group.working) == ranks
    until(lambda: len(set(placements(group, ranks))) == 1)
    slots = placements(group, ranks)[0].slots_per_rank
    until(lambda: experts_of(group, ranks) == [count * moe_layers for count in slots])
    for name in group.client_addresses:
        status = group.rank_status(name)
        assert "lost" not in status.sections
        assert "experts" not in status.notes
        assert status.sections["placement"]["ranks"] == ranks


@pytest.mark.parametrize(
    "placement",
    [{}, pytest.param({"rebalance": "continuous"}, marks=pytest.mark.slow)],
    ids=["off", "continuous"],
)
@pytest.mark.parametrize("is_replicated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_streams_continue_through_resizes(
    deep: Path, right: list[list[int]], placement: dict[str, Any], is_replicated: bool
) -> None:
    placed = msgspec.structs.replace(another(read_spec(deep), 1), generation=0)
    launch = placed if is_replicated else None
    with processes(deep, right, 2, 2, placement=placement, placed=launch) as (group, _):
        for ranks in (3, 1, 2):
            group.resize_experts(ranks)
            check_settled(group, deep, ranks)
            assert f"expert-{ranks}" not in group.processes


def test_replacement_adopts_current_placement(deep: Path, right: list[list[int]]) -> None:
    with processes(deep, right, 2, 2) as (group, _):
        group.resize_experts(3)
        for name in ("expert-0", "expert-2"):
            group.replace(name)
            until(lambda: "experts" not in group.rank_status("attention-1").notes)
        until(lambda: not any(group.rank_status(f"expert-{n}").notes for n in range(3)))
        until(lambda: sum(experts_of(group, 3)) == len(read_spec(deep).moe_layers) * 8)
        check_settled(group, deep, 3)


def placements(group: LocalGroup, ranks: int) -> list[Placement]:
    answers = [group.processes[f"expert-{n}"].call("placed") for n in range(ranks)]
    return [answer.result(DEADLINE_S).placement for answer in answers]


def experts_of(group: LocalGroup, ranks: int) -> list[float]:
    found = [group.rank_status(f"expert-{n}").sections["placement"] for n in range(ranks)]
    return [each["experts"] for each in found]


@pytest.mark.parametrize(
    ("ranks", "victim"),
    [
        (3, "expert-2"),
        (1, "expert-0"),
        pytest.param(3, "expert-0", marks=pytest.mark.slow),
        pytest.param(1, "expert-1", marks=pytest.mark.slow),
    ],
    ids=["new one", "taker", "giver", "leaver"],
)
def test_loss_aborts_resize_and_keeps_old_placement(
    deep: Path, right: list[list[int]], ranks: int, victim: str
) -> None:
    with processes(deep, right, 1, 2, bytes_per_s=SLOW) as (group, _):
        killer = threading.Thread(target=kill_in_the_middle, args=(group, victim))
        killer.start()
        # The ranks may or may not know yet, or one knows before the placement arrives.
        lost = f"{victim}( is lost|: its process ended| is not in service)"
        with pytest.raises(TandemError, match=rf"{ranks} expert ranks: .*{lost}"):
            group.resize_experts(ranks)
        killer.join()
        assert sorted(group.processes) == ["attention-0", "expert-0", "expert-1"]
        if victim != "expert-2":
            group.replace(victim)
        until(lambda: sum(experts_of(group, 2)) == len(read_spec(deep).moe_layers) * 8)
        check_settled(group, deep, 2)


def kill_in_the_middle(group: LocalGroup, victim: str) -> None:
    until(lambda: victim in group.processes and bool(coming(group)))
    group.processes[victim].send_signal(signal.SIGKILL)


def coming(group: LocalGroup) -> list[str]:
    """Return the expert ranks that load experts."""
    there = [name for name in list(group.processes) if name.startswith("expert")]
    return [name for name in there if "placement" in group.rank_status(name).notes]


def test_impossible_resize_is_rejected_first(
    deep: Path, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with processes(deep, right, 1, 2) as (group, _):
        for ranks in (0, 9):
            with pytest.raises(TandemError, match=f"{ranks} expert ranks for 8 experts: give 1 to"):
                place_experts(group.working, ranks, group_config())
        with pytest.raises(TandemError, match="expert-2 is not in service"):
            place_experts(group.working, 3, group_config())
        few = PlacementState(placement=Placement(), newest=0, expert_bytes=1000, free_bytes=9)
        before = contiguous(8, 2, num_layers=1, moe_layers=[0])
        with pytest.raises(TandemError, match="load 4000 bytes of experts into 9 bytes of free"):
            _check_room(before, resize_placement(before, 1, generation=1), {"expert-0": few})
        check_settled(group, deep, 2)


@contextlib.contextmanager
def resizing(group: LocalGroup, ranks: int) -> Iterator[None]:
    """Resize in the background inside the context."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(group.resize_experts, ranks)
        until(lambda: done.done() or bool(coming(group)))
        assert not done.done()
        yield
        done.result(60.0)


def test_attention_rank_added_during_resize_switches_too(
    deep: Path, right: list[list[int]]
) -> None:
    with processes(deep, right, 1, 2, bytes_per_s=SLOW, idle=1) as (group, _):
        with resizing(group, 3):
            group.replace("attention-1")
        name, address = "attention-1", group.client_addresses["attention-1"]
        with RankConnection(name, address, group.token) as client:
            request = client.submit(PROMPTS[0], sampling=greedy(TOKENS))
            assert client.generated(request)[0] == right[0]
        check_settled(group, deep, 3)


@pytest.mark.slow
def test_second_resize_waits_and_proposals_are_rejected(deep: Path, right: list[list[int]]) -> None:
    placing = {"rebalance": "continuous"}
    with (
        processes(deep, right, 1, 3, bytes_per_s=SLOW, placement=placing) as (group, _),
        FakePlanner(token=group.token) as planner,
    ):
        for process in group.processes.values():
            process.call("join_planner", planner.address).result(DEADLINE_S)
        planner.wait_held("expert-0", "expert-1", "expert-2")
        with resizing(group, 2):
            planner.propose(another(read_spec(deep), 5, ranks=3))
            for name in ("expert-0", "expert-1"):
                assert "generation 1 is under way" in planner.outcome(name, 5).reason
            placed = place_experts(group.working, 1, group_config())  # waits
            assert (placed.ranks, placed.generation) == (1, 6)
        assert sorted(planner.held) == ["expert-0", "expert-1", "expert-2"]
        until(lambda: planner.held["expert-0"].placement.generation == 6)


@pytest.mark.slow
@pytest.mark.parametrize("rebalance", ["off", "continuous"])
def test_cached_expert_ranks_can_be_resized(
    deep: Path, right: list[list[int]], rebalance: str
) -> None:
    sections: dict[str, Any] = {"experts": {"slots": 4}, "placement": {"rebalance": rebalance}}
    with processes(deep, right, 1, 2, **sections) as (group, _):
        for ranks in (3, 1):
            group.resize_experts(ranks)
            check_settled(group, deep, ranks)


def test_resized_experts_free_their_memory(deep: Path, right: list[list[int]]) -> None:
    spec = read_spec(deep)
    with ThreadGroup(deep, group_config(1, 3)) as group:
        working = [RunningRank(rank.ready, ThreadHandle(rank)) for rank in group.ranks]
        every = spec.num_experts * len(spec.moe_layers)
        others = experts_in_memory() - every
        assert others >= 0
        for ranks in (2, 1):
            place_experts(lambda: working, ranks, group_config())
            until(lambda: experts_in_memory() - others == every)
        with group.client() as client:
            request = client.submit(PROMPTS[0], sampling=greedy(TOKENS))
            assert client.generated(request)[0] == right[0]


class ThreadHandle:
    """A `WorkerHandle` of a rank in this process."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(getattr(self._rank.hooks, method)(*arguments))
        return done
