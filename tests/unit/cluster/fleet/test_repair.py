"""Lost ranks: detection, restart, introduction to the others, failure of a group."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import pytest

import cluster.fleet.fleet
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from cluster.fleet.fleet import Fleet, PlannerDiscovery, Supervisor
from cluster.fleet.rank_group import CHECK_PERIOD_S, HUNG_AFTER_S, Member, RankGroup
from cluster.fleet.repair import MAJORITY_TIMEOUT_S, TIE_TIMEOUT_S
from contracts.config import TandemConfig
from contracts.errors import ChannelError
from contracts.loading import config_from, load_config
from contracts.ranks import Group, RankStatus
from tests.support.started_ranks import StartedRank, StartedRanks, rank_of, started_member
from tests.support.waiting import wait_until

RECOVERY_S = 10.0

wait = partial(wait_until, otherwise="it never came true", deadline_s=20.0, look_period_s=0.005)


def make_group(attention: int, expert: int, planner: int = 0) -> tuple[RankGroup, RankGroup | None]:
    """Return the attention and expert ranks, and the planner."""
    config = load_config(None, [f"groups.recovery_timeout_s={RECOVERY_S}"])
    seats, group_spec = [Seat("cpu", "127.0.0.1", 1)], GroupSpec(config, "", b"", 1, "shm")
    specs = make_specs(group_spec, seats * attention, seats * expert, seats * planner)
    members = [started_member(spec) for spec in specs]
    serving = RankGroup(members[: attention + expert], group_spec)
    return serving, RankGroup(members[-1:], group_spec) if planner else None


# --- the health of one rank


@pytest.fixture
def member() -> Member:
    return make_group(1, 1)[0].members[0]


def test_rank_without_answer_is_hung_except_while_the_supervisor_stalls(member: Member) -> None:
    rank_of(member).answers["status"] = Future()
    member.check(0.0, 0.0)
    assert member.check(HUNG_AFTER_S - 0.1, 0.0) == ""
    assert member.check(HUNG_AFTER_S + 10.0, stalled_s=10.0) == ""
    assert "no answer for 3.1 s" in member.check(HUNG_AFTER_S + 10.1, 0.0)


def test_answer_of_a_lost_process_does_not_count_for_its_replacement(member: Member) -> None:
    rank = rank_of(member)
    rank.answers["status"] = rank.death
    member.check(0.0, 0.0)
    member.replacement_reason = "its actor died"
    member.assign(member.spec, StartedRank(rank.name), member.ready)
    assert member.replacement_reason == ""
    assert member.check(100.0, 0.0) == ""


# --- expert ranks that attention ranks have lost and that report no problem


class Watched:
    """A group of attention ranks and two expert ranks."""

    def __init__(self, attention: int) -> None:
        self.group, _ = make_group(attention, 2)
        self.ranks = {one.name: rank_of(one) for one in self.group.members}
        self.now_s = 100.0
        self.problems()

    def problems(self, after_s: float = 0.0) -> set[str]:
        """Return the ranks to replace at that time, by the reports of all."""
        self.now_s += after_s
        for _ in range(3):  # requested, answered, read
            health = self.group.health(self.now_s, 0.0)
        return set(health.problems)

    @property
    def is_introduced_again(self) -> bool:
        return bool(self.ranks["attention-0"].calls_of("connect"))


def test_half_cut_link_replaces_no_rank_before_timeout() -> None:
    watched = Watched(attention=2)
    watched.ranks["attention-0"].lost = {"expert-1": 1}
    watched.ranks["attention-1"].lost = {"expert-0": 1}
    assert not watched.problems(0.25)
    assert not watched.problems(TIE_TIMEOUT_S - 0.1)
    assert watched.is_introduced_again
    assert watched.problems(0.2) == {"expert-0", "expert-1"}


@pytest.mark.parametrize("reports", [({"expert-1": 1.0}, {}) * 2, ({"expert-1": 0.0},) * 3])
def test_returned_link_or_loss_of_an_earlier_epoch_replaces_no_rank(
    reports: tuple[dict[str, float], ...],
) -> None:
    watched = Watched(attention=2)
    for lost in reports:
        watched.ranks["attention-0"].lost = lost
        assert not watched.problems(TIE_TIMEOUT_S - 1)


@pytest.mark.parametrize("attention", [1, 2, 3])
def test_rank_lost_by_majority_is_replaced_unless_it_returns(attention: int) -> None:
    watched = Watched(attention)
    for number in range(attention // 2 + 1):
        watched.ranks[f"attention-{number}"].lost = {"expert-1": 1}
    assert not watched.problems(0.25)
    assert watched.is_introduced_again
    assert not watched.problems(MAJORITY_TIMEOUT_S - 0.1)
    assert watched.problems(0.2) == {"expert-1"}


# --- groups whose lost rank is not replaced


class UnplaceableRank(Supervisor):
    """A supervisor that finds no place for a replacement."""

    def _replace(self, group: RankGroup, lost: Sequence[Member]) -> None:
        assert len(lost) == 1, "each alone"
        assert lost[0] in group.members


class Unrepaired:
    """One attention rank, one expert rank, and the planner."""

    def __init__(self) -> None:
        self.group, self.planner = make_group(1, 1, 1)
        assert self.planner is not None
        members = [*self.group.members, *self.planner.members]
        self.attention, self.expert, self.planner_rank = map(rank_of, members)
        self.supervisor = UnplaceableRank([self.group, self.planner])
        self.now_s = 0.0

    def pass_time(self, seconds: float, *, stalled_s: float = 0.0) -> str:
        for _ in range(int(seconds / CHECK_PERIOD_S)):
            self.supervisor.check(self.now_s, stalled_s)
            self.now_s, stalled_s = self.now_s + CHECK_PERIOD_S, 0.0
        return self.group.beyond_repair


def test_group_fails_by_name_after_recovery_timeout() -> None:
    rig = Unrepaired()
    assert rig.pass_time(100.0) == ""
    rig.expert.answers["status"] = rig.expert.death
    reason = "expert-0 closed its connection"
    rig.attention.answers["status"] = RankStatus(name="attention-0", healthy=False, reason=reason)
    assert rig.pass_time(RECOVERY_S - 1.0) == ""
    found = rig.pass_time(2.0)
    assert "expert-0: its actor died" in found
    assert f"attention-0: {reason}" in found


def test_recovery_timeout_excludes_time_of_a_stalled_supervisor() -> None:
    rig = Unrepaired()
    rig.expert.answers["status"] = rig.expert.death
    assert rig.pass_time(1.0) == ""
    rig.now_s += 100.0
    assert rig.pass_time(1.0, stalled_s=100.0) == ""
    assert rig.pass_time(RECOVERY_S) != ""


def test_lost_planner_is_replaced_and_never_fails_a_group() -> None:
    rig = Unrepaired()
    rig.planner_rank.answers["status"] = rig.planner_rank.death
    assert rig.pass_time(10 * RECOVERY_S) == ""
    assert rig.planner is not None
    assert rig.planner.beyond_repair == ""
    assert rig.planner.members[0].replacement_reason == "planner-0: its actor died"


def test_supervision_continues_after_a_failed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.fleet.fleet, "CHECK_PERIOD_S", 0.01)
    rounds: list[int] = []
    again = threading.Event()

    def fail() -> None:
        rounds.append(len(rounds))
        if len(rounds) > 1:
            again.set()
        raise RuntimeError("the cluster does not answer")

    supervisor = UnplaceableRank([], fail)
    supervisor.start()
    assert again.wait(10.0)
    supervisor.close(10.0)


# --- restarts of prefill workers


class Rig(StartedRanks):
    """Three prefill workers under supervision. next_answers: of the next worker with that name."""

    def __init__(self, experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.next_answers: dict[str, dict[str, Any]] = {}
        self.next = lambda rank: rank.answers.update(self.next_answers.pop(rank.name, {}))
        for period in ("RETRY_S", "CHECK_PERIOD_S"):
            monkeypatch.setattr(cluster.fleet.fleet, period, 0.01)
        config: TandemConfig = config_from(
            {
                "groups": {"attention_ranks": 0, "expert_ranks": 0, "prefill_ranks": 3},
                "prefill": {"experts": experts},
            },
            source="test",
        )
        self.group = self.launch(config, *[Group.PREFILL] * 3, backend="auto")
        self.fleet = Fleet(b"", [self.group], config)

    def lose(self, place: int) -> None:
        name = self.started[place].name
        self.started[place].answers["status"] = RankStatus(name=name, healthy=False, reason="broke")


@pytest.fixture
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(request.param, monkeypatch)
    yield made
    made.fleet.close()


@pytest.mark.parametrize("rig", ["gathered"], indirect=True)
def test_lost_members_are_skipped_and_introduced_when_replaced(rig: Rig) -> None:
    late: Future[Any] = Future()
    rig.next_answers["prefill-1"] = {"prepare": late}
    rig.lose(1)
    wait(lambda: len(rig.started) == 4)
    rig.lose(0)
    wait(lambda: rig.group.restarts == 1)
    second, fresh = rig.started[3:]
    assert fresh.name == "prefill-0"
    assert fresh.calls_of("connect")[0][0].keys() == {"prefill-0", "prefill-2"}
    late.set_result(second.ready)
    wait(lambda: rig.group.restarts == 2)
    addresses = [rig.group.client_addresses]
    for rank in (fresh, rig.started[2], second):
        wait(lambda rank=rank: rank.calls_of("connect")[-1:] == [addresses])  # type: ignore[misc]


@pytest.mark.parametrize("rig", ["all_to_all"], indirect=True)
def test_workers_in_lockstep_are_replaced_together_under_one_epoch(rig: Rig) -> None:
    rig.lose(1)
    wait(lambda: rig.group.restarts == 3)
    fresh = rig.started[3:]
    assert [rank.name for rank in fresh] == ["prefill-0", "prefill-1", "prefill-2"]
    assert {rank.spec.epoch for rank in fresh} == {rig.group.epoch} == {2}
    addresses = {f"prefill-{i}": f"tcp:prefill-{i}:2" for i in range(3)}
    assert all(rank.calls_of("connect") == [[addresses]] for rank in fresh)


@pytest.mark.parametrize(("rig", "count"), [("gathered", 1), ("all_to_all", 6)], indirect=["rig"])
def test_worker_that_cannot_reach_another_starts_without_it_except_in_lockstep(
    rig: Rig, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.ranks.rendezvous.REACH_TIMEOUT_S", 0.0)
    monkeypatch.setattr("actors.ranks.rendezvous.DEGRADED_REACH_TIMEOUT_S", 0.0)
    rig.next_answers["prefill-1"] = {"connect": ChannelError("cannot join prefill-2")}
    rig.lose(1)
    wait(lambda: rig.group.restarts > 0)
    assert len(rig.started[3:]) == count


@pytest.mark.parametrize("rig", ["gathered"], indirect=True)
def test_replacement_lost_while_it_loads_is_replaced_under_a_later_epoch(rig: Rig) -> None:
    lost_too: Future[Any] = Future()
    rig.next_answers["prefill-1"] = {"prepare": lost_too}
    rig.lose(1)
    wait(lambda: len(rig.started) == 4 and bool(rig.started[3].calls_of("prepare")))
    lost_too.set_exception(rig.started[3].death)
    wait(lambda: rig.group.restarts == 1)
    between, fresh = rig.started[3:]
    assert rig.ended_ranks == [rig.started[1], between]
    assert (between.spec.epoch, fresh.spec.epoch) == (2, 3)
    assert rig.group.client_addresses["prefill-1"] == "tcp:prefill-1:3"
    others = (rig.started[0], rig.started[2])
    wait(lambda: all(rank.calls_of("connect")[1:] for rank in others))
    for rank in others:
        assert len(rank.calls_of("prepare")) == 1, "the others are not restarted"
        connects = rank.calls_of("connect")[1:]
        assert {addresses["prefill-1"] for (addresses,) in connects} == {"tcp:prefill-1:3"}


# --- notifications about a replaced planner and about group sizes


class Discovery:
    """An attention rank, an expert rank, a prefill worker without need of a planner, a planner."""

    def __init__(self) -> None:
        seats = [Seat("cpu", "127.0.0.1", 1)]
        group_spec = GroupSpec(load_config(None, ["groups.prefill_ranks=1"]), "", b"", 1, "shm")
        specs = make_specs(group_spec, seats, seats, seats, seats)
        self.members = [started_member(spec) for spec in specs]
        parts = (self.members[:2], self.members[2:3], self.members[3:])
        self.groups = [RankGroup(members, group_spec) for members in parts]
        self.planner = self.members[-1]
        self.discovery = PlannerDiscovery(self.groups)

    def calls(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return the calls of one round by rank."""
        self.discovery.update()
        found = {}
        for member in self.members:
            if (rank := rank_of(member)).calls:
                found[member.name], rank.calls = rank.calls, []
        return found

    def replace(self, member: Member) -> None:
        """Replace the process by another one elsewhere."""
        pid = member.ready.pid + 100
        ready = msgspec.structs.replace(member.ready, pid=pid, channel_address=f"tcp:here:{pid}")
        member.assign(member.spec, StartedRank(member.name), ready)

    def add_attention_rank(self) -> Member:
        added = started_member(msgspec.structs.replace(self.members[0].spec, rank=1))
        self.groups[0].join(added)
        return added


def test_ranks_are_notified_once_of_a_new_planner() -> None:
    rig = Discovery()
    assert not rig.calls()
    rig.planner.replacement_reason = "its actor died"
    assert not rig.calls(), "there is none"
    rig.replace(rig.planner)
    calls = [("join_planner", rig.planner.ready.channel_address)]
    assert rig.calls() == {"attention-0": calls, "expert-0": calls}
    assert not rig.calls()


def test_rank_added_later_is_notified() -> None:
    rig = Discovery()
    attention, expert, *_ = rig.members
    rig.replace(attention)
    assert list(rig.calls()) == ["attention-0"]
    expert.replacement_reason = "it hangs"
    rig.replace(rig.planner)
    assert list(rig.calls()) == ["attention-0"]
    rig.replace(expert)
    assert list(rig.calls()) == ["expert-0"]


def test_planner_is_resized_once_per_change_and_when_replaced_with_an_old_size() -> None:
    rig = Discovery()
    assert not rig.calls()
    made_before = rig.planner.spec
    added = rig.add_attention_rank()
    assert rig.calls()["planner-0"] == [("resize", 2, 1)]
    assert not rig.calls()
    assert [one.spec.attention_ranks for one in (rig.members[0], added, rig.planner)] == [2] * 3
    rig.replace(rig.planner)
    assert "planner-0" not in rig.calls()
    rig.planner.spec = made_before
    rig.replace(rig.planner)
    assert rig.calls()["planner-0"] == [("resize", 2, 1)]
    rig.groups[0].leave(added)
    assert rig.calls()["planner-0"] == [("resize", 1, 1)]
