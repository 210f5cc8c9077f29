"""What chaos draws, and what it does not let pass."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.robustness import verdict
from benchmarks.robustness.__main__ import LINK_WEIGHTS, ROLES, WEIGHTS
from benchmarks.robustness.clients import WRONG, Outcome, Stream, compared
from benchmarks.robustness.leaks import GROWS, Leaks
from benchmarks.robustness.places import Places, not_adopted, not_newer
from benchmarks.robustness.run import Done
from benchmarks.robustness.schedule import Fault, Kind, Mix, drawn, read

MIX = Mix(WEIGHTS | LINK_WEIGHTS)
ALL_PROCESSES = [*ROLES, "ingress-0", "ingress-1"]
STREAM = {0: {"text": "a b c", "tokens": [], "finish": "length"}, -2: {"usage": [4, 3]}}


def test_a_seed_draws_the_same_faults_of_every_kind_alone_and_two_at_once() -> None:
    faults = drawn(7, 200, ALL_PROCESSES, MIX)
    assert faults == drawn(7, 200, ALL_PROCESSES, MIX) != drawn(8, 200, ALL_PROCESSES, MIX)
    assert {one.kind_and_role for one in faults} == set(MIX.weights)
    pairs = [(one, other) for one, other in itertools.pairwise(faults) if one.with_next]
    assert len(pairs) > 5
    for one, other in pairs:
        assert (one.kind, one.target) != (other.kind, other.target)
        assert one.target != other.target or not one.target
        assert not other.with_next, "two, and not three"
    stops = [one.stopped_s for one in faults if one.kind is Kind.STOP]
    assert 0.5 <= min(stops) < 1.5 < 10 < max(stops) <= 20
    assert not any(one.stopped_s for one in faults if one.kind is Kind.KILL)


@pytest.mark.parametrize(
    ("changed", "how"),
    [
        ({}, "same"),
        ({0: {"text": "a b", "tokens": [], "finish": "length"}}, "shorter"),
        ({0: {"text": "a b b c", "tokens": [], "finish": "length"}}, "longer"),
        ({0: {"text": "a b d", "tokens": [], "finish": "length"}}, "changed"),
        ({0: {"text": "a b c", "tokens": [], "finish": "stop"}}, "changed"),
        ({-2: {"usage": [5, 3]}}, "changed"),
        ({-1: {"error": "attention-0 is gone"}}, "lost"),
    ],
    ids=str,
)
def test_whatever_differs_of_a_stream_is_found(changed: dict[int, Any], how: str) -> None:
    assert compared({**STREAM, **changed}, STREAM)[0] == how


def test_whatever_differs_of_a_classification_is_found() -> None:
    expected = [["no", [0.9, 0.1]]]
    assert compared([["no", [0.9, 0.1]]], expected)[0] == "same"
    assert compared([["no", [0.8, 0.2]]], expected)[0] == "changed"
    assert compared({"error": "503"}, expected)[0] == "lost"


def test_a_run_fails_for_each_thing_that_must_not_be() -> None:
    fault = Fault(Kind.KILL, "expert-1", 0.0, 0.1)
    same = Outcome("greedy", "same", "", 0.0, 1.0)

    def failures(
        how: str = "same",
        whole_s: float | None = 1.0,
        used: float = 0.0,
        left: str = "",
        wrong: str = "",
    ) -> list[str]:
        clients = SimpleNamespace(outcomes=[same, same._replace(how=how)], streams=[])
        run: Any = SimpleNamespace(
            clients=clients,
            done=[Done(fault, 0.0, whole_s, None)],
            used_blocks={"attention-0": used},
            wrong=[wrong] if wrong else [],
        )
        return verdict.failures(run, [left] if left else [])

    assert not failures()
    for how in WRONG:
        assert failures(how=how)
    assert failures(whole_s=None)
    assert failures(used=1.0)
    assert failures(left="a segment")
    assert failures(wrong="attention-0 was taken back")


def test_a_stream_waits_from_the_fault_to_its_next_piece() -> None:
    stream = Stream("greedy")
    stream.began_s, stream.ended_s, stream.arrived_s = 10.0, 20.0, [11.0, 12.5, 19.0]
    assert stream.after(12.0) == 0.5
    assert stream.after(9.0) is None, "it had not begun"
    assert stream.after(19.5) is None, "nothing came after it"
    done = [Done(Fault(Kind.STOP, "attention-0", 2.0, 0.1), 12.0, 3.0, 0.2)]
    other = Stream("seeded")
    other.began_s, other.ended_s, other.arrived_s = 10.0, 20.0, [14.0]
    found = verdict.waits(done, [stream, other])["stop attention over 1.5 s"]
    assert found["last_token"] == [2.0]
    assert found["next_token"] == [0.5, 2.0]


def test_where_it_need_not_be_exact_other_words_are_rounding_and_another_length_is_not() -> None:
    other = {**STREAM, 0: {"text": "a b d e", "tokens": [], "finish": "length"}}
    assert compared(other, STREAM, exact=False)[0] == "rounded"
    assert compared({**other, -2: {"usage": [4, 4]}}, STREAM, exact=False)[0] == "longer"
    assert compared({**STREAM, -1: {"error": "gone"}}, STREAM, exact=False)[0] == "lost"


@pytest.mark.parametrize("only", ["full", "wake", "kill planner"])
def test_one_kind_alone_is_drawn_too(only: str) -> None:
    weights = {name: 1.0 for name in {**WEIGHTS, "full_shm": 1.0} if only in name}
    faults = drawn(3, 40, ALL_PROCESSES, Mix(weights))
    assert len(faults) == 40
    assert not any(one.with_next for one in faults)


def test_a_schedule_may_be_written_down() -> None:
    kill, stop, cut = read("kill expert-0,stop attention-1 2.5,cut_link 3")
    assert (kill.kind, kill.target, kill.stopped_s) == (Kind.KILL, "expert-0", 0.0)
    assert (stop.kind, stop.target, stop.stopped_s) == (Kind.STOP, "attention-1", 2.5)
    assert (cut.kind, cut.target, cut.stopped_s) == (Kind.CUT, "", 3.0)
    assert not any(one.with_next for one in (kill, stop, cut))
    both = read("cut_link 3+kill expert-1,kill expert-0")
    assert [(one.kind.value, one.with_next) for one in both] == [
        ("cut_link", True), ("kill", False), ("kill", False),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="burn"):
        read("burn expert-0")


def test_what_grows_with_each_fault_is_a_leak_and_what_a_first_one_leaves_is_none() -> None:
    leaks, key = Leaks(), ("planner-0", 7)

    def after(count: int, label: str = "kill expert") -> list[str]:
        return leaks.grown(label, {key: {"sockets": count}})

    assert not after(4)
    assert not after(9, "stop expert"), "the first one of its kind"
    for count in (9, 5, 10, 9, 11, 10):
        assert not after(count), "it has grown twice"
    (leak,) = after(12)
    assert leak == "planner-0 holds 12 sockets after kill expert, and 11 before"


def test_each_process_that_leaks_one_with_every_fault_is_found() -> None:
    leaks = Leaks()
    found = [
        leaks.grown("kill expert", {("ingress-0", 7): {"threads": n}}) for n in range(GROWS + 2)
    ]
    assert [bool(each) for each in found] == [False] * (GROWS) + [True] * 2


def test_a_launcher_that_does_not_take_over_what_lives_is_found() -> None:
    pids = {"attention-0": 1, "expert-0": 2, "ingress-0": 3, "launcher-0": 4}
    before, adopted = Places(pids, 0, {}), pids | {"ingress-0": 5, "launcher-0": 6}
    assert not not_adopted(before, Places(adopted, 0, {}))
    assert not_adopted(before, Places(adopted | {"expert-0": 7}, 0, {})) == [
        "expert-0 was another process after its launcher was killed"
    ]
    assert not_adopted(before, Places(adopted, 1, {}))


def test_replacement_under_an_epoch_in_use_before_is_found() -> None:
    before = Places({"attention-0": 1, "expert-0": 2}, 0, {"attention-0": 1, "expert-0": 2})

    def replaced(**epochs: int) -> list[str]:
        now = {"attention-0": 1} | {name.replace("_", "-"): e for name, e in epochs.items()}
        return not_newer(before, Places({"attention-0": 1, "expert-0": 7}, 0, now))

    assert not not_newer(before, before)
    assert not replaced(expert_0=3)
    assert not replaced(), "it has not said"
    assert replaced(expert_0=2) == ["expert-0 was replaced under epoch 2, and 2 was there before"]
