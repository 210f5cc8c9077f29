"""Loading of user policies and fallback on failure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest

from contracts.errors import ConfigError
from contracts.requests import Priority
from planner.scheduling.batching import ALL, BatchSelection, SequenceView, one_at_a_time
from planner.scheduling.preemption import PolicyFallbackError, Preemption
from planner.scheduling.task_order import Task
from planner.scheduling.user_policy import (
    MAX_FAILURES,
    MAX_HOLD_S,
    MAX_LIVE_BATCHES,
    SLOW_CALLS,
    GuardedPolicy,
    are_keys,
    guarded_choice,
    load_policy,
    sample_views,
    user_batching,
)
from tests.unit.planner.scheduling.test_batching import Classes, live

TASKS: Sequence[Task] = sample_views()["pick"]
SEQUENCES: Sequence[SequenceView] = sample_views()["form"]


class Good:
    def pick(self, tasks: Sequence[Task]) -> Task | None:
        return tasks[-1]


class Random:
    calls = 0

    def pick(self, tasks: Sequence[Task]) -> Task | None:
        Random.calls += 1
        return tasks[Random.calls % 2]


class Raises:
    def form(self, sequences: Sequence[SequenceView]) -> list[object]:
        raise KeyError("no tenant")


class Invents:
    def form(self, sequences: Sequence[SequenceView]) -> list[object]:
        return ["somebody"]


class NeedsArguments:
    def __init__(self, weight: int) -> None: ...


@pytest.fixture(autouse=True)
def policy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mine")
    for kind in (Good, Random, Raises, Invents, NeedsArguments):
        setattr(module, kind.__name__, kind)
    vars(module).update(instance=Good(), is_hold=3, wrong=type("W", (), {"serve": 5}))
    monkeypatch.setitem(sys.modules, "mine", module)


def test_class_or_object_is_loaded_with_missing_functions_as_none() -> None:
    for path in ("mine:Good", "mine:instance"):
        policy = load_policy(path)
        assert policy.pick is not None
        assert policy.pick(TASKS) is TASKS[-1]
        assert policy.form is None
        assert policy.serve is None


@pytest.mark.parametrize(
    ("path", "expected_message"),
    [
        ("policy_module", "give package.module:name"),
        ("mine:", "give package.module:name"),
        ("no_such_module_x:name", "PYTHONPATH"),
        ("mine:Absent", "Absent"),
        ("mine:NeedsArguments", "weight"),
        ("mine:is_hold", "none of form, pick, serve"),
        ("mine:wrong", "its serve cannot be called"),
        ("mine:Raises", "form raised KeyError"),
        ("mine:Invents", "form returned an unknown element"),
        ("mine:Random", "pick is not repeatable"),
    ],
)
def test_unusable_policy_is_rejected_in_one_line(path: str, expected_message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert caught.value.message.startswith(f"priority.policy={path!r}: ")
    assert expected_message in caught.value.message
    assert "\n" not in caught.value.message


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_raising_policy_falls_back_and_is_disabled_after_max_failures() -> None:
    reasons: list[str] = []
    calls = []

    def pick(tasks: Sequence[Task]) -> Task | None:
        calls.append(tasks)
        raise ValueError("what")

    choice = guarded_choice(pick, reasons.append)
    for _ in range(MAX_FAILURES + 5):
        with pytest.raises(PolicyFallbackError):
            choice(TASKS)
    assert len(calls) == len(reasons) == MAX_FAILURES
    assert reasons[0] == "pick raised ValueError: what"
    assert reasons[-1].endswith("; the policy is disabled")


def test_slow_policy_is_disabled() -> None:
    clock, reasons = Clock(), list[str]()

    def pick(tasks: Sequence[Task]) -> Task:
        clock.now_s += 0.002
        return tasks[0]

    guarded: GuardedPolicy[Task, Task] = GuardedPolicy(
        "pick", pick, lambda tasks, one: one in tasks, reasons.append, clock
    )
    for _ in range(SLOW_CALLS - 1):
        assert guarded(TASKS) is TASKS[0]
    for _ in range(2):
        with pytest.raises(PolicyFallbackError):
            guarded(TASKS)
    assert reasons == ["pick takes 2.0 ms a call; the policy is disabled"]


def test_long_hold_falls_back_once() -> None:
    clock = Clock()
    guarded: GuardedPolicy[Task, None] = GuardedPolicy(
        "pick", lambda _: None, lambda *_: True, clock=clock
    )
    guarded.check_hold(is_hold=True)
    clock.now_s += MAX_HOLD_S / 2
    guarded.check_hold(is_hold=True)
    clock.now_s += MAX_HOLD_S
    with pytest.raises(PolicyFallbackError):
        guarded.check_hold(is_hold=True)
    guarded.check_hold(is_hold=True)
    guarded.check_hold(is_hold=False)


def test_be_keeps_its_share_under_any_policy() -> None:
    def never_be(tasks: Sequence[Task]) -> Task | None:
        return next((task for task in tasks if task.priority == Priority.LS), None)

    def raising(tasks: Sequence[Task]) -> Any:
        raise OSError

    def run(choose: Any) -> float:
        choice: Preemption[Task] = Preemption(
            lambda tasks: tasks[0], be_share=0.1, choose=guarded_choice(choose)
        )
        be_s, now_s = 0.0, 0.0
        for _ in range(2000):
            task = choice.pick(TASKS, (), now_s)
            assert task is not None
            choice.ran(task, now_s, now_s + 0.001)
            be_s += 0.001 * (task.priority == Priority.BE)
            now_s += 0.001
        return be_s / now_s

    for choose in (never_be, raising):
        assert run(choose) == pytest.approx(0.1, abs=0.01)


def test_user_batching_takes_named_sequences_or_default() -> None:
    idle = tuple(SEQUENCES)

    def policy_of(form: Any) -> Any:
        return user_batching(form, one_at_a_time)

    named = policy_of(lambda views: (view.key for view in reversed(views)))
    keys = tuple(each.key for each in reversed(SEQUENCES))
    assert list(named(Classes(2, 1, idle=idle))) == [BatchSelection(keys=keys)]
    running = live(Priority.LS)
    assert list(named(Classes(2, 1, (running,), idle=idle))) == [BatchSelection(keys=keys)]
    assert not list(named(Classes(2, 1, (running,) * MAX_LIVE_BATCHES, idle=idle)))
    none = policy_of(lambda _: ())
    assert list(none(Classes(2, 1, idle=idle))) == [ALL], "nothing would ask it again"
    assert not list(none(Classes(2, 1, (running,), idle=idle)))
    twice = policy_of(lambda views: [views[0].key, views[0].key])
    assert list(twice(Classes(2, 1, idle=idle))) == [ALL]


def test_keys_must_be_known_and_unique() -> None:
    first, second, _ = (each.key for each in SEQUENCES)
    cases: list[tuple[Iterable[Any], bool]] = [
        ((), True), ((second, first), True), ((first, first), False), (("x",), False)
    ]  # fmt: skip
    for keys, fine in cases:
        assert are_keys(SEQUENCES, keys) is fine
