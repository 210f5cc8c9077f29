"""Ranks that are added and removed while others serve, by request and by load, without Ray."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import pytest
import ray

from actors.ranks.expert_resize import RunningRank
from cluster.fleet import membership, resizing
from cluster.fleet.fleet import Supervisor
from cluster.fleet.membership import Autoscaler
from cluster.fleet.resizing import Resizer
from contracts.errors import LaunchError, NotReadyError, OverloadError, RequestError, ResourceError
from contracts.loading import config_from
from contracts.ranks import Group
from contracts.scaling import ScaleCheckpoint, ScaleState, ScaleTarget
from planner.placement.slots import contiguous
from tests.support.started_ranks import StartedRank, StartedRanks
from tests.support.waiting import wait_until

wait = partial(wait_until, deadline_s=20.0, look_period_s=0.002)


class Rig(StartedRanks):
    """Two ranks of each group. free: CPUs. moves: rank counts and names of expert ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.free = 10.0
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": self.free})
        monkeypatch.setattr(membership, "REPLY_TIMEOUT_S", 0.01)
        monkeypatch.setattr(membership, "LATE_S", 0.05)
        groups = {"attention_ranks": 2, "expert_ranks": 2, "drain_timeout_s": 0.1}
        self.config = config_from({"groups": groups}, source="test")
        self.moves: list[tuple[int, list[str]]] = []
        self.move_fails = ""
        monkeypatch.setattr(resizing, "place_experts", self.move)
        experts = {Group.EXPERT: contiguous(4, 2, num_layers=1, moe_layers=[0])}
        kinds = [Group.ATTENTION] * 2 + [Group.EXPERT] * 2
        self.group = self.launch(self.config, *kinds, placements=experts)
        self.kept: list[ScaleCheckpoint] = []
        self.resizing = Resizer([self.group], self.config, keep=self.keep)

    def keep(self) -> None:
        self.kept.append(self.resizing.kept)

    def move(self, find: Callable[[], list[RunningRank]], ranks: int, *_: Any) -> None:
        names = [one.ready.name for one in find()]
        self.moves.append((ranks, [name for name in names if name.startswith("expert")]))
        if self.move_fails:
            raise ResourceError(self.move_fails)

    def scale(self, **requested: int) -> ScaleState:
        self.resizing.begin(ScaleTarget(**requested))
        return self.ended()

    def ended(self) -> ScaleState:
        wait(lambda: self.resizing.state.state != "running", "it never ended")
        return self.resizing.state

    def hold_next(self, name: str) -> Future[Any]:
        """Hold the start of the next rank with that name until the result."""
        held: Future[Any] = Future()

        def hold(rank: StartedRank) -> None:
            if rank.name == name:
                rank.answers["prepare"] = held

        self.next = hold
        return held

    def adopted(self, state: ScaleState, *, resumed: int = 0) -> ScaleState:
        """Continue as another launcher, with what the previous one has saved."""
        self.kept.clear()
        self.resizing = Resizer([self.group], self.config, keep=self.keep)
        self.resizing.resume(ScaleCheckpoint(state, resumed))
        return self.ended()

    @property
    def killed(self) -> list[str]:
        return [rank.name for rank in self.ended_ranks]

    @property
    def names(self) -> list[str]:
        """Return the ranks that accept requests."""
        return list(self.group.client_addresses)

    @property
    def expert_names(self) -> list[str]:
        return [member.name for member in self.group.of_kind(Group.EXPERT)]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(resizing, "expert_ranks_in_use", lambda find: 2)
    return Rig(monkeypatch)


def running(**requested: int) -> ScaleState:
    return ScaleState(state="running", number=7, requested=ScaleTarget(**requested))


def assert_drained(rank: StartedRank) -> None:
    calls = [each[0] for each in rank.calls]
    assert calls.index("drain") < calls.index("stop")


def test_added_ranks_serve_and_removed_ones_leave_first(rig: Rig) -> None:
    state = rig.scale(attention_ranks=3)
    assert (state.state, state.ranks) == ("done", {"attention_ranks": 3, "expert_ranks": 2})
    assert rig.names == ["attention-0", "attention-1", "attention-2"]
    assert [rank.name for rank in rig.started[4:]] == ["attention-2"], "no other starts"
    new = rig.rank("attention-2")
    assert (new.spec.rank, new.spec.epoch, new.spec.group) == (2, 2, Group.ATTENTION)
    assert set(new.calls_of("connect")[0][0]) == {"expert-0", "expert-1"}
    state = rig.scale(attention_ranks=1)
    assert (state.state, rig.names) == ("done", ["attention-0"])
    assert rig.killed == ["attention-2", "attention-1"]
    for name in rig.killed:
        assert_drained(rig.rank(name))
        assert rig.rank(name).calls_of("drain")[0][0] <= 0.1
    assert rig.released == [["attention-2"]], "the other bundle is of the launch"
    assert [step for step in state.steps if step.endswith("; its seat is kept (CPU=0.5)")]
    rig.free = 0.0
    assert rig.scale(attention_ranks=2).state == "done", "its bundle was kept"
    assert rig.rank("attention-1").spec.epoch == 3
    assert rig.scale(attention_ranks=2).steps == ["there are so many already"]


def test_impossible_scale_is_refused_with_the_key_and_both_numbers(rig: Rig) -> None:
    for requested, message in (
        ({}, "give one of attention_ranks, expert_ranks, prefill_workers"),
        ({"attention_ranks": 0}, "attention_ranks=0: give 1 to 1024"),
        ({"prefill_workers": 2}, "prefill_workers=2: this server was started without any"),
        ({"expert_ranks": 5}, "expert_ranks=5: the model has 4 experts per layer"),
    ):
        with pytest.raises(RequestError, match=message):
            rig.resizing.begin(ScaleTarget(**requested))
    rig.free = 0.9
    message = r"attention_ranks=4: 2 more need 1 CPU, the Ray cluster has 0.9 free"
    with pytest.raises(NotReadyError, match=message):
        rig.resizing.begin(ScaleTarget(attention_ranks=4))
    assert rig.resizing.state == ScaleState(ranks={"attention_ranks": 2, "expert_ranks": 2})
    assert len(rig.started) == 4


def test_second_scale_is_refused_while_one_is_in_progress(rig: Rig) -> None:
    held = rig.hold_next("attention-2")
    rig.resizing.begin(ScaleTarget(attention_ranks=3))
    message = r"another scale is in progress \(attention_ranks=3, for"
    with pytest.raises(OverloadError, match=message):
        rig.resizing.begin(ScaleTarget(attention_ranks=1))
    wait(lambda: rig.started[-1].spec is not None, "it never started")
    held.set_result(rig.started[-1].ready)
    assert rig.ended().state == "done"
    assert rig.scale(attention_ranks=2).number == 2


def test_rank_that_fails_to_start_leaves_nothing(rig: Rig) -> None:
    rig.next = lambda rank: rank.answers.update(prepare=rank.death)
    state = rig.scale(attention_ranks=4)
    assert (state.state, state.reason) == ("failed", "attention-2: its actor died")
    assert state.ranks["attention_ranks"] == 2
    assert (rig.killed, rig.released) == (["attention-2"], [["attention-2"]])
    rig.next = lambda rank: None
    rig.has_no_room = True
    assert rig.scale(attention_ranks=3).reason == "1 ranks could not be placed within 3 s"
    rig.has_no_room = False
    assert rig.scale(attention_ranks=3).state == "done"


@pytest.mark.parametrize("fault", ["hangs", "dies"])
def test_rank_that_hangs_or_dies_while_leaving_is_killed_at_its_deadline(
    rig: Rig, fault: str
) -> None:
    setattr(rig.rank("attention-1"), fault, True)
    state = rig.scale(attention_ranks=1)
    assert (state.state, rig.names) == ("done", ["attention-0"])
    assert rig.killed == ["attention-1"]


def test_rank_removed_during_its_replacement_does_not_return(rig: Rig) -> None:
    lost = rig.group.members[1]
    held = rig.hold_next(lost.name)
    supervisor = Supervisor([rig.group])
    lost.replacement_reason = "its actor died"
    replacing = threading.Thread(target=supervisor._replace, args=(rig.group, [lost]))
    replacing.start()
    wait(lambda: len(rig.started) == 5 and rig.started[4].spec is not None, "it was not replaced")
    assert rig.scale(attention_ranks=3).state == "done"
    assert rig.scale(attention_ranks=1).state == "done"
    assert not rig.started[1].calls_of("drain"), "its process is lost"
    held.set_result(rig.started[4].ready)
    replacing.join(20.0)
    assert not replacing.is_alive()
    assert rig.names == ["attention-0"]
    assert rig.started[4] in rig.ended_ranks, "the late one is killed"


def test_scale_ends_when_the_fleet_closes(rig: Rig) -> None:
    held = rig.hold_next("attention-2")
    rig.resizing.begin(ScaleTarget(attention_ranks=3))
    closing = threading.Thread(target=rig.resizing.close, args=(20.0,))
    closing.start()
    wait(lambda: len(rig.started) == 5 and rig.started[4].spec is not None, "none has started")
    wait(lambda: rig.resizing._closing.is_set(), "it does not end")
    held.set_result(rig.started[4].ready)
    closing.join(20.0)
    assert rig.names == ["attention-0", "attention-1"]
    assert rig.released == [["attention-2"]]


def test_number_of_prefill_workers_is_bounded(rig: Rig) -> None:
    groups = msgspec.structs.replace(rig.config.groups, prefill_ranks=2)
    config = msgspec.structs.replace(rig.config, groups=groups)
    workers = rig.launch(config, *[Group.PREFILL] * 2, backend="auto")
    made = Resizer([rig.group, workers], config)
    with pytest.raises(RequestError, match=r"prefill_workers=3: .* 2 at most \(groups.prefill_ran"):
        made.begin(ScaleTarget(prefill_workers=3))
    gathered = msgspec.structs.replace(config.prefill, experts="gathered")
    divided = msgspec.structs.replace(config, prefill=gathered)
    with pytest.raises(RequestError, match=r"prefill.experts=gathered: its workers divide"):
        Resizer([workers], divided).begin(ScaleTarget(prefill_workers=1))
    made.begin(ScaleTarget(prefill_workers=1))
    wait(lambda: made.state.state == "done", "it never ended")
    assert list(workers.client_addresses) == ["prefill-0"]


def test_experts_move_after_ranks_are_added_and_before_they_are_removed(rig: Rig) -> None:
    three = ["expert-0", "expert-1", "expert-2"]
    assert rig.scale(expert_ranks=3).state == "done"
    assert (rig.expert_names, rig.moves) == (three, [(3, three)])
    assert rig.scale(expert_ranks=1).state == "done"
    assert rig.moves[1:] == [(1, three)], "before any is removed"
    assert rig.expert_names == ["expert-0"]
    assert rig.killed == ["expert-2", "expert-1"]
    assert rig.names == ["attention-0", "attention-1"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_are_restored_if_experts_cannot_move(rig: Rig, ranks: int) -> None:
    rig.move_fails = "expert-0 has 5 MB free, 9 MB are needed"
    state = rig.scale(expert_ranks=ranks)
    assert (state.state, state.reason) == ("failed", rig.move_fails)
    assert rig.expert_names == ["expert-0", "expert-1"]
    assert sorted(rig.killed) == ["expert-2", "expert-3"][: max(0, ranks - 2)]
    assert len(rig.released) == max(0, ranks - 2)


# --- another launcher continues


def test_scale_is_saved_before_start_and_at_end(rig: Rig) -> None:
    at_start: list[ScaleCheckpoint] = []
    rig.next = lambda rank: at_start.append(rig.kept[-1])
    rig.scale(attention_ranks=3)
    (first,) = at_start
    assert first.state.state == "running"
    assert first.state.requested == ScaleTarget(attention_ranks=3)
    assert (rig.kept[-1].state.state, rig.kept[-1].state.number) == ("done", 1)
    assert rig.kept[-1] == rig.resizing.kept


def test_new_launcher_resumes_from_present_ranks(rig: Rig) -> None:
    rig.scale(attention_ranks=3)
    state = rig.adopted(running(attention_ranks=4))
    assert (state.state, state.number) == ("done", 7)
    assert rig.names == [f"attention-{rank}" for rank in range(4)]
    assert [rank.name for rank in rig.started[5:]] == ["attention-3"]
    assert rig.kept[0].resumed == 1, "before anything is done"
    assert rig.scale(attention_ranks=4).number == 8
    assert rig.resizing.kept.resumed == 0


@pytest.mark.parametrize("fails", ["", "no memory"])
def test_new_launcher_moves_experts_to_added_ranks_or_removes_these(rig: Rig, fails: str) -> None:
    rig.scale(expert_ranks=3)
    rig.moves.clear()
    rig.move_fails = fails
    state = rig.adopted(running(expert_ranks=3))
    assert [count for count, _ in rig.moves] == [3]
    assert (state.state, state.reason) == ("failed" if fails else "done", fails)
    assert rig.expert_names == ["expert-0", "expert-1", "expert-2"][: 2 if fails else 3]


def test_scale_during_which_launchers_end_repeatedly_is_abandoned(rig: Rig) -> None:
    """Unused expert ranks are removed; other added ranks stay."""
    rig.scale(attention_ranks=3, expert_ranks=3)
    state = rig.adopted(running(attention_ranks=4, expert_ranks=3), resumed=resizing.MAX_RESUMES)
    assert state.state == "failed"
    assert "launchers of the ranks have ended 3 times in this change" in state.reason
    assert rig.expert_names == ["expert-0", "expert-1"]
    assert len(rig.names) == 3


@pytest.mark.parametrize(("before", "after"), [("running", "done"), ("failed", "failed")])
def test_leaving_rank_continues_to_leave_and_a_failed_scale_is_not_resumed(
    rig: Rig, before: Any, after: str
) -> None:
    rig.scale(attention_ranks=3)
    rig.group.leave(rig.group.members[-1])
    requested = ScaleTarget(attention_ranks=2 if before == "running" else 4)
    state = rig.adopted(ScaleState(state=before, number=3, requested=requested, reason="no room"))
    assert (state.state, state.number) == (after, 3)
    assert rig.resizing.kept.resumed == (before == "running")
    wait(lambda: not rig.group.draining, "it never left")
    assert_drained(rig.rank("attention-2"))
    assert (rig.killed, rig.released) == (["attention-2"], [["attention-2"]])
    assert rig.names == ["attention-0", "attention-1"]
    assert len(rig.started) == 5, "none is started"


# --- prefill workers by load

FULL, EMPTY = 900.0, 0.0  # of a threshold of 1,000


class LoadRig(StartedRanks):
    """One prefill worker, three at most. Started workers are full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.now_s = 0.0
        self.next = lambda rank: setattr(rank, "load", FULL)
        monkeypatch.setattr(membership, "POLL_PERIOD_S", 0.001)
        scaling = {"max_prefill_ranks": 3, "look_back_period_s": 2, "downscale_delay_s": 5}
        groups = {"attention_ranks": 0, "expert_ranks": 0, "prefill_ranks": 1}
        config = config_from({"groups": groups, "scaling": scaling}, source="test")
        self.group = self.launch(config, Group.PREFILL, backend="auto")
        self.scaler = Autoscaler(self.group, config)

    def poll(self, count: int) -> list[str]:
        """Return the workers in the directory after some polls, a second apart."""
        for _ in range(count):
            self.now_s += 1.0
            for member in self.group.members:
                for _ in range(2):  # requested, then received
                    member.check(self.now_s, 0.0)
            self.scaler.poll(self.now_s)
        return list(self.group.client_addresses)


@pytest.fixture
def load_rig(monkeypatch: pytest.MonkeyPatch) -> LoadRig:
    return LoadRig(monkeypatch)


def test_workers_are_added_when_full_and_removed_when_idle_last_first(load_rig: LoadRig) -> None:
    rig = load_rig
    assert rig.poll(1) == ["prefill-0"]
    assert rig.poll(20) == ["prefill-0", "prefill-1", "prefill-2"]
    assert [rank.spec.epoch for rank in rig.started] == [1, 2, 3]
    for rank in rig.started:
        rank.load = EMPTY
    rig.started[2].open = 500  # it completes its requests first
    assert rig.poll(60) == ["prefill-0"]
    assert [rank.ends for rank in rig.started] == [[], *[["stop, 0 open", "killed"]] * 2]
    assert len(rig.released) == 2
    rig.started[0].load = FULL
    assert rig.poll(5) == ["prefill-0", "prefill-1"]
    assert rig.started[-1].spec.epoch == 4


def test_failed_start_of_a_worker_is_retried(load_rig: LoadRig) -> None:
    rig, start = load_rig, load_rig.next
    rig.next = lambda rank: rank.answers.update(prepare=rank.death)
    with pytest.raises(LaunchError, match="its actor died"):
        rig.poll(10)
    assert rig.started[1].ends == ["killed"]
    assert len(rig.released) == 1
    rig.next = start
    assert rig.poll(10)[:2] == ["prefill-0", "prefill-1"]


def test_no_worker_is_added_during_a_replacement(load_rig: LoadRig) -> None:
    load_rig.group.members[0].replacement_reason = "it hung"
    assert load_rig.poll(50) == ["prefill-0"]
