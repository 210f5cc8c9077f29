"""Ranks that come and go while others serve, without Ray: who is in the directory when, who is told
of whom, and what is left of those that fail, hang or are lost meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import ray

from actors.ranks.expert_resize import RunningRank
from actors.ranks.rendezvous import GroupSpec
from cluster.fleet import membership, resizing
from cluster.fleet.launch import launch_pipeline
from cluster.fleet.nodes import RankRequest
from cluster.fleet.resizing import Resizer
from cluster.fleet.supervisor import Supervisor
from contracts.errors import NotReadyError, OverloadError, RequestError, ResourceError
from contracts.loading import config_from
from contracts.ranks import Group, RankReady
from contracts.scaling import ScaleCheckpoint, ScaleState, ScaleTarget
from planner.placement.slots import contiguous
from tests.support.started_ranks import StartedRanks
from tests.support.waiting import wait_until

CPU = 0.5  # of each rank


class Rig(StartedRanks):
    """Two attention ranks, two expert ranks. free: CPUs of the cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.free = 10.0
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": self.free})
        monkeypatch.setattr(membership, "REPLY_TIMEOUT_S", 0.01)
        monkeypatch.setattr(membership, "LATE_S", 0.05)
        self.config = config_from(
            {"groups": {"attention_ranks": 2, "expert_ranks": 2, "drain_timeout_s": 0.1}},
            source="test",
        )
        kinds = [(Group.ATTENTION, 0), (Group.ATTENTION, 1), (Group.EXPERT, 0), (Group.EXPERT, 1)]
        placed = self.place([RankRequest(*each, {"CPU": CPU}) for each in kinds])
        self.moves: list[tuple[int, list[str]]] = []
        self.move_fails = ""
        monkeypatch.setattr(resizing, "place_experts", self.move)
        experts = {Group.EXPERT: contiguous(4, 2, num_layers=1, moe_layers=[0])}
        group_spec = GroupSpec(self.config, "", b"", 1, "shm", None, experts)
        (self.group,) = launch_pipeline(group_spec, placed, Counter())
        self.kept: list[ScaleCheckpoint] = []
        self.resizing = Resizer([self.group], self.config, keep=self.keep)

    def keep(self) -> None:
        self.kept.append(self.resizing.kept)

    def move(self, find: Callable[[], list[RunningRank]], ranks: int, *_: Any) -> None:
        """Experts, to so many ranks of those that work."""
        names = [one.ready.name for one in find()]
        self.moves.append((ranks, [name for name in names if name.startswith("expert")]))
        if self.move_fails:
            raise ResourceError(self.move_fails)

    def scale(self, **requested: int) -> ScaleState:
        self.resizing.begin(ScaleTarget(**requested))
        return self.ended()

    def ended(self) -> ScaleState:
        wait_until(lambda: self.resizing.state.state != "running", "it never ended", 20.0, 0.002)
        return self.resizing.state

    @property
    def killed(self) -> list[str]:
        return [rank.name for rank in self.ended_ranks]

    @property
    def names(self) -> list[str]:
        """Those that take requests."""
        return list(self.group.client_addresses)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_added_rank_joins_under_higher_epoch_and_no_other_starts(rig: Rig) -> None:
    state = rig.scale(attention_ranks=3)
    assert (state.state, state.ranks) == ("done", {"attention_ranks": 3, "expert_ranks": 2})
    assert rig.names == ["attention-0", "attention-1", "attention-2"]
    assert [rank.name for rank in rig.started[4:]] == ["attention-2"]
    new = rig.rank("attention-2")
    assert (new.spec.rank, new.spec.epoch, new.spec.group) == (2, 2, Group.ATTENTION)
    assert set(new.calls_of("connect")[0][0]) == {"expert-0", "expert-1"}
    assert [step.partition(",")[0] for step in state.steps] == [
        "attention-2 starts",
        "attention-2 serves",
    ]


def test_those_that_go_leave_first_and_only_room_of_their_own_is_free_again(rig: Rig) -> None:
    rig.scale(attention_ranks=3)
    state = rig.scale(attention_ranks=1)
    assert (state.state, rig.names) == ("done", ["attention-0"])
    for name in ("attention-2", "attention-1"):
        calls = [each[0] for each in rig.rank(name).calls]
        assert calls.index("leave") < calls.index("stop")
        assert rig.rank(name).calls_of("leave")[0][0] <= 0.1
    assert rig.killed == ["attention-2", "attention-1"]
    assert rig.released == [["attention-2"]], "the other's is among those of the launch"
    rig.free = 0.0
    assert rig.scale(attention_ranks=2).state == "done", "its place was kept"
    assert rig.rank("attention-1").spec.epoch == 3


def test_what_cannot_be_is_refused_by_name_and_number(rig: Rig) -> None:
    for requested, message in (
        ({}, "give one of attention_ranks, expert_ranks, prefill_workers"),
        ({"attention_ranks": 0}, "attention_ranks=0: give 1 to 1024"),
        ({"prefill_workers": 2}, "prefill_workers=2: this server was started without any"),
    ):
        with pytest.raises(RequestError, match=message):
            rig.resizing.begin(ScaleTarget(**requested))
    rig.free = 0.9
    with pytest.raises(
        NotReadyError, match=r"attention_ranks=4: 2 more need 1 CPU, the Ray cluster has 0.9 free"
    ):
        rig.resizing.begin(ScaleTarget(attention_ranks=4))
    assert rig.resizing.state == ScaleState(ranks={"attention_ranks": 2, "expert_ranks": 2})
    assert len(rig.started) == 4


def test_so_many_that_are_there_already_are_no_work(rig: Rig) -> None:
    state = rig.scale(attention_ranks=2)
    assert (state.state, state.number) == ("done", 1)
    assert state.steps == ["there are so many already"]
    assert len(rig.started) == 4


def test_a_second_one_is_refused_while_one_is_under_way(rig: Rig) -> None:
    held: Future[Any] = Future()
    rig.next = lambda rank: setattr(rank, "hold", held)
    rig.resizing.begin(ScaleTarget(attention_ranks=3))
    with pytest.raises(
        OverloadError, match=r"another scale is in progress \(attention_ranks=3, for"
    ):
        rig.resizing.begin(ScaleTarget(attention_ranks=1))
    held.set_result(RankReady(name="attention-2", pid=1, channel_address="tcp:here"))
    assert rig.ended().state == "done"
    assert rig.scale(attention_ranks=2).number == 2


def test_one_that_dies_while_it_starts_leaves_nothing(rig: Rig) -> None:
    rig.next = lambda rank: setattr(rank, "fails", True)
    state = rig.scale(attention_ranks=4)
    assert (state.state, state.reason) == ("failed", "attention-2: its actor died")
    assert state.ranks["attention_ranks"] == 2
    assert (rig.killed, rig.released) == (["attention-2"], [["attention-2"]])
    rig.next = lambda rank: None
    assert rig.scale(attention_ranks=3).state == "done"


def test_one_that_finds_no_room_fails_by_name(rig: Rig) -> None:
    rig.has_no_room = True
    assert rig.scale(attention_ranks=3).reason == "1 ranks could not be placed within 3 s"


@pytest.mark.parametrize("fault", ["hangs", "dies"])
def test_one_that_hangs_or_dies_while_it_leaves_is_ended_in_its_time(rig: Rig, fault: str) -> None:
    setattr(rig.rank("attention-1"), fault, True)
    state = rig.scale(attention_ranks=1)
    assert (state.state, rig.names) == ("done", ["attention-0"])
    assert rig.killed == ["attention-1"]


def test_a_rank_that_is_being_replaced_is_left_out_and_may_be_let_go_of(rig: Rig) -> None:
    """The second attention rank is lost, and whoever comes in its place loads for ever."""
    lost = rig.group.members[1]
    held: Future[Any] = Future()
    rig.next = lambda rank: setattr(rank, "hold", held if rank.name == lost.name else None)
    supervisor = Supervisor([rig.group])
    lost.replacement_reason = "its actor died"
    replacing = threading.Thread(target=supervisor._replace, args=(rig.group, [lost]))
    replacing.start()
    wait_until(lambda: len(rig.started) == 5, "it was not replaced", 20.0, 0.002)
    assert rig.scale(attention_ranks=3).state == "done"
    assert rig.scale(attention_ranks=1).state == "done"
    assert not rig.started[1].calls_of("leave"), "nobody is there who could"
    ready = RankReady(name=lost.name, pid=7, channel_address="tcp:x", client_address="tcp:y")
    held.set_result(ready)
    replacing.join(20.0)
    assert not replacing.is_alive()
    assert rig.names == ["attention-0"], "nobody has come back"
    assert rig.started[4] in rig.ended_ranks, "the late one is ended"


def test_when_all_end_a_scale_ends(rig: Rig) -> None:
    held: Future[Any] = Future()
    rig.next = lambda rank: setattr(rank, "hold", held)
    rig.resizing.begin(ScaleTarget(attention_ranks=3))
    closing = threading.Thread(target=rig.resizing.close, args=(20.0,))
    closing.start()
    wait_until(lambda: len(rig.started) == 5, "none has started", 20.0, 0.002)
    wait_until(lambda: rig.resizing._closing.is_set(), "it does not end", 20.0, 0.002)
    held.set_result(RankReady(name="attention-2", pid=1, channel_address="tcp:here"))
    closing.join(20.0)
    assert rig.names == ["attention-0", "attention-1"]
    assert rig.released == [["attention-2"]]


def test_the_wanted_number_of_prefill_workers_has_a_bound(rig: Rig) -> None:
    groups = msgspec.structs.replace(rig.config.groups, prefill_ranks=2)
    config = msgspec.structs.replace(rig.config, groups=groups)
    placed = rig.place([RankRequest(Group.PREFILL, rank, {"CPU": CPU}) for rank in range(2)])
    (workers,) = launch_pipeline(GroupSpec(config, "", b"", 1, "auto"), placed, Counter())
    made = Resizer([rig.group, workers], config)
    with pytest.raises(RequestError, match=r"prefill_workers=3: .* 2 at most \(groups.prefill_ran"):
        made.begin(ScaleTarget(prefill_workers=3))
    gathered = msgspec.structs.replace(config.prefill, experts="gathered")
    divided = msgspec.structs.replace(config, prefill=gathered)
    with pytest.raises(RequestError, match=r"prefill.experts=gathered: its workers divide"):
        Resizer([workers], divided).begin(ScaleTarget(prefill_workers=1))
    made.begin(ScaleTarget(prefill_workers=1))
    wait_until(lambda: made.state.state == "done", "it never ended", 20.0, 0.002)
    assert list(workers.client_addresses) == ["prefill-0"]


def expert_ranks(rig: Rig) -> list[str]:
    return [member.name for member in rig.group.of_kind(Group.EXPERT)]


def test_experts_move_to_those_that_have_come_and_from_those_that_go_first(rig: Rig) -> None:
    three = ["expert-0", "expert-1", "expert-2"]
    assert rig.scale(expert_ranks=3).state == "done"
    assert (expert_ranks(rig), rig.moves) == (three, [(3, three)])
    assert "experts move to 3 ranks" in rig.resizing.state.steps
    assert rig.scale(expert_ranks=1).state == "done"
    assert rig.moves[1:] == [(1, three)], "before anybody has gone"
    assert expert_ranks(rig) == ["expert-0"]
    assert rig.killed == ["expert-2", "expert-1"]
    assert rig.names == ["attention-0", "attention-1"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_where_experts_cannot_move_all_is_as_it_was(rig: Rig, ranks: int) -> None:
    rig.move_fails = "expert-0 has 5 MB free, 9 MB are needed"
    state = rig.scale(expert_ranks=ranks)
    assert (state.state, state.reason) == ("failed", rig.move_fails)
    assert expert_ranks(rig) == ["expert-0", "expert-1"]
    assert sorted(rig.killed) == ["expert-2", "expert-3"][: max(0, ranks - 2)]
    assert len(rig.released) == max(0, ranks - 2)


def test_more_expert_ranks_than_experts_are_refused(rig: Rig) -> None:
    with pytest.raises(RequestError, match=r"expert_ranks=5: the model has 4 experts per layer"):
        rig.resizing.begin(ScaleTarget(expert_ranks=5))


def taken_over(
    rig: Rig, state: ScaleState, monkeypatch: pytest.MonkeyPatch, *, used: int = 2, resumed: int = 0
) -> ScaleState:
    """By another launcher, to which one that had come so far has left that. used: expert ranks that
    attention ranks ask."""
    monkeypatch.setattr(resizing, "expert_ranks_in_use", lambda find: used)
    rig.kept.clear()
    rig.resizing = Resizer([rig.group], rig.config, keep=rig.keep)
    rig.resizing.resume(ScaleCheckpoint(state, resumed))
    return rig.ended()


def test_change_is_saved_before_start_and_at_end(rig: Rig) -> None:
    at_start: list[ScaleCheckpoint] = []
    rig.next = lambda rank: at_start.append(rig.kept[-1])
    rig.scale(attention_ranks=3)
    (first_save,) = at_start
    assert (first_save.state.state, first_save.state.requested) == (
        "running",
        ScaleTarget(attention_ranks=3),
    )
    assert (rig.kept[-1].state.state, rig.kept[-1].state.number) == ("done", 1)
    assert rig.kept[-1] == rig.resizing.kept


def test_new_launcher_resumes_from_present_ranks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its predecessor had started one of two."""
    rig.scale(attention_ranks=3)
    half = ScaleState(
        state="running",
        number=7,
        requested=ScaleTarget(attention_ranks=4),
        steps=["attention-2 ..."],
    )
    state = taken_over(rig, half, monkeypatch)
    assert (state.state, state.number) == ("done", 7)
    assert state.steps[:2] == ["attention-2 ...", "another launcher of the ranks has taken over"]
    assert rig.names == [f"attention-{rank}" for rank in range(4)]
    assert [rank.name for rank in rig.started[5:]] == ["attention-3"]
    assert rig.kept[0].resumed == 1, "before anything is done"
    assert rig.scale(attention_ranks=4).number == 8
    assert rig.resizing.kept.resumed == 0


@pytest.mark.parametrize("fails", ["", "no memory"])
def test_experts_go_on_to_ranks_that_had_come_for_them_or_these_go_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    rig.scale(expert_ranks=3)
    rig.moves.clear()
    rig.move_fails = fails
    half = ScaleState(state="running", number=1, requested=ScaleTarget(expert_ranks=3))
    state = taken_over(rig, half, monkeypatch, used=2)
    assert [count for count, _ in rig.moves] == [3]
    assert (state.state, state.reason) == ("failed" if fails else "done", fails)
    assert expert_ranks(rig) == ["expert-0", "expert-1", "expert-2"][: 2 if fails else 3]


def test_a_change_that_ends_one_launcher_after_the_other_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert ranks that nobody asks go; what else has come stays."""
    rig.scale(attention_ranks=3, expert_ranks=3)
    requested = ScaleTarget(attention_ranks=4, expert_ranks=3)
    half = ScaleState(state="running", number=1, requested=requested)
    state = taken_over(rig, half, monkeypatch, resumed=resizing.MAX_RESUMES)
    assert state.state == "failed"
    assert "launchers of the ranks have ended 3 times in this change" in state.reason
    assert expert_ranks(rig) == ["expert-0", "expert-1"]
    assert len(rig.names) == 3


@pytest.mark.parametrize("progress", ["running", "done"])
def test_a_rank_that_was_leaving_goes_on_leaving_and_its_room_is_free_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, progress: Any
) -> None:
    rig.scale(attention_ranks=3)
    rig.group.leave(rig.group.members[-1])
    half = ScaleState(state=progress, number=1, requested=ScaleTarget(attention_ranks=2))
    assert taken_over(rig, half, monkeypatch).state == "done"
    wait_until(lambda: not rig.group.draining, "it leaves for ever", 20.0, 0.002)
    calls = [each[0] for each in rig.rank("attention-2").calls]
    assert calls.index("leave") < calls.index("stop")
    assert (rig.killed, rig.released) == (["attention-2"], [["attention-2"]])
    assert rig.names == ["attention-0", "attention-1"]


def test_one_that_is_over_stays_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    over = ScaleState(
        state="failed", number=3, requested=ScaleTarget(expert_ranks=3), reason="no room"
    )
    state = taken_over(rig, over, monkeypatch)
    assert (state.state, state.number, state.reason) == ("failed", 3, "no room")
    assert len(rig.started) == 4
    assert rig.resizing.kept.resumed == 0


def test_step_reports_kept_bundle(rig: Rig) -> None:
    rig.scale(attention_ranks=3)
    last, launched = [step for step in rig.scale(attention_ranks=1).steps if "is gone" in step]
    assert "seat" not in last
    assert launched.endswith("; its seat is kept (CPU=0.5)")
