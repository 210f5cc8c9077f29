"""Batching policies and user policies."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from benchmarks.support.policy_rank import static_batching
from contracts.errors import ConfigError
from contracts.requests import Priority
from planner.scheduling.batching import (
    ALL,
    ALL_DECODES,
    BE_BATCH,
    BEST_EFFORT_STARTS,
    LS_DECODES,
    LS_PROMPTS,
    BatchSelection,
    LiveBatch,
    Phase,
    SequenceView,
    WaitingWork,
    by_class,
    coalesce_decodes,
    joining,
    one_at_a_time,
    preempt_if_profitable,
)
from planner.scheduling.task_order import PolicyFallbackError, Preemption, Task
from planner.scheduling.user_policy import (
    MAX_FAILURES,
    MAX_HOLD_S,
    MAX_LIVE_BATCHES,
    SLOW_CALLS,
    GuardedPolicy,
    guarded_choice,
    load_policy,
    sample_views,
    user_batching,
)
from tests.support.manual_clock import ManualClock
from tests.support.one_line_errors import one_line_error


def passes(*left: int) -> Classes:
    """Return live batches of one class, by the remaining ones of 8 layers."""
    return Classes(1, 0, tuple(LiveBatch(Priority.LS, 16, layers) for layers in left))


@pytest.mark.parametrize(
    ("left", "forms"),
    [
        ((), True),
        ((8,), True),
        ((6,), True),
        ((5,), False),  # one more layer than another may have to catch up
        ((8, 5), False),
        ((8, 8), False),  # there are as many as may be
        ((1, 2), False),
    ],
)
def test_batch_joins_within_the_layer_limit(left: tuple[int, ...], forms: bool) -> None:
    assert bool(joining(most=2, within_layers=2)(passes(*left))) is forms
    assert bool(one_at_a_time(passes(*left))) is (not left)
    if forms:
        assert joining(most=3, within_layers=8)(passes(*left, 1))


class Classes(NamedTuple):
    """Sequences of each class and live batches."""

    ls: int
    be: int
    live: tuple[LiveBatch, ...] = ()
    layers: int = 8
    free_blocks: int = 4
    running: int = 0
    idle: tuple[SequenceView, ...] = ()

    @property
    def in_flight(self) -> int:
        return len(self.live)

    def count(self, priority: Priority) -> int:
        return self.ls if priority is Priority.LS else self.be

    def waiting(self, priority: Priority) -> WaitingWork:
        return WaitingWork(self.count(priority), 16)


def live(priority: Priority, phase: Phase | None = None) -> LiveBatch:
    return LiveBatch(priority, 16, 4, phase=phase)


@pytest.mark.parametrize(("ls", "be"), [(3, 0), (0, 3), (0, 0)])
def test_single_class_runs_one_mixed_batch_at_a_time(ls: int, be: int) -> None:
    assert tuple(by_class(Classes(ls, be))) == (ALL,)
    runs = live(Priority.LS if ls else Priority.BE)
    assert not tuple(by_class(Classes(ls, be, (runs,))))


@pytest.mark.parametrize(
    ("running", "forms"),
    [
        ((), [LS_DECODES, LS_PROMPTS, BE_BATCH]),
        ((live(Priority.BE),), [LS_DECODES, LS_PROMPTS]),
        ((live(Priority.LS, Phase.DECODE),), [LS_PROMPTS, BE_BATCH]),
        ((live(Priority.LS, Phase.PREFILL),), [LS_DECODES, BE_BATCH]),
        ((live(Priority.LS),), [BE_BATCH]),  # of both phases, from when LS was alone
        ((*(live(Priority.LS, phase) for phase in Phase), live(Priority.BE)), []),
    ],
)
def test_two_classes_form_missing_batches_with_be_last(
    running: tuple[LiveBatch, ...], forms: list[BatchSelection]
) -> None:
    assert list(by_class(Classes(2, 2, running))) == forms


def be_prompts(starts: int) -> BatchSelection:
    return BatchSelection((Priority.BE,), Phase.PREFILL, starts)


LS_DECODE_RUNS = live(Priority.LS, Phase.DECODE)


@pytest.mark.parametrize(
    ("running", "left_s", "places", "forms"),
    [
        # LS has room for no BE decode, or would be late
        ((live(Priority.BE),), 0.05, -1, [LS_PROMPTS]),
        ((live(Priority.BE),), -0.01, -1, [LS_DECODES, LS_PROMPTS]),
        ((), 0.05, -1, [LS_DECODES, LS_PROMPTS, BE_BATCH]),  # the ranks have nothing else to do
        ((live(Priority.LS, Phase.PREFILL),), 0.05, -1, [LS_DECODES, BE_BATCH]),
        ((LS_DECODE_RUNS,), math.inf, -1, [LS_PROMPTS, BE_BATCH]),
        ((), 0.05, 5, [ALL_DECODES, LS_PROMPTS, be_prompts(5)]),
        ((), 0.05, 0, [ALL_DECODES, LS_PROMPTS, be_prompts(0)]),
        ((), 0.05, 999, [ALL_DECODES, LS_PROMPTS, be_prompts(BEST_EFFORT_STARTS)]),
        ((live(Priority.BE),), -0.01, 5, [ALL_DECODES, LS_PROMPTS]),
        ((live(Priority.BE),), 0.05, 5, [LS_PROMPTS]),
        ((LS_DECODE_RUNS,), math.inf, 5, [LS_PROMPTS, be_prompts(5)]),  # the rest waits for it
        # nobody of LS decodes: a batch of BE is of both phases
        ((), math.inf, 5, [LS_DECODES, LS_PROMPTS, BE_BATCH]),
        ((live(Priority.LS, Phase.PREFILL),), math.inf, 5, [LS_DECODES, BE_BATCH]),
    ],
)
def test_ls_decodes_coalesce_in_time_and_be_decodes_fill_them(
    running: tuple[LiveBatch, ...], left_s: float, places: int, forms: list[BatchSelection]
) -> None:
    policy = coalesce_decodes(lambda: left_s, lambda: places)
    assert list(policy(Classes(2, 2, running))) == forms
    if not running:
        assert tuple(policy(Classes(2, 0))) == (ALL,)
        assert not tuple(policy(Classes(2, 0, (LS_DECODE_RUNS,))))


@pytest.mark.parametrize(
    ("left_s", "copy_s", "ran_s", "overtakes"),
    [
        (1.0, 0.05, 0.5, True),  # two copies lost, and eight of the pass itself: half a second
        (0.4, 0.05, 0.5, False),
        (1.0, 0.11, 0.5, False),
        (1.0, 0.05, 0.09, False),  # others had nine tenths of its time
        (0.001, 0.0, 0.5, True),
    ],
)
def test_ls_preempts_a_copied_pass_only_if_profitable(
    left_s: float, copy_s: float, ran_s: float, overtakes: bool
) -> None:
    policy = preempt_if_profitable(lambda: copy_s, 0.1)
    running = LiveBatch(Priority.BE, 4096, 8, ran_s=ran_s, age_s=1.0, remaining_s=left_s)
    forms = [BatchSelection((Priority.LS,))] if overtakes else []
    assert list(policy(Classes(1, 1, (running,)))) == forms
    overtaking = LiveBatch(Priority.LS, 64, 8)
    assert not list(policy(Classes(1, 1, (running, overtaking)))), "nobody overtakes who overtakes"
    assert list(policy(Classes(1, 1))) == [ALL]


TASKS: Sequence[Task] = sample_views()["pick"]
SEQUENCES: Sequence[SequenceView] = sample_views()["form"]


@pytest.fixture(autouse=True)
def policy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = ModuleType("mine"), itertools.count()
    methods: dict[str, dict[str, Any]] = {
        "Good": {"pick": lambda self, tasks: tasks[-1]},
        "Random": {"pick": lambda self, tasks: tasks[next(calls) % 2]},
        "Raises": {"form": lambda self, sequences: dict[str, int]()["tenant"]},
        "Invents": {"form": lambda self, sequences: ["somebody"]},
        "NeedsArguments": {"__init__": lambda self, weight: None},
        "wrong": {"serve": 5},
    }
    kinds = {name: type(name, (), each) for name, each in methods.items()}
    vars(module).update(kinds, instance=kinds["Good"](), is_hold=3)
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
    with one_line_error(ConfigError, expected_message, start=f"priority.policy={path!r}: "):
        load_policy(path)


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
    clock, reasons = ManualClock(), list[str]()

    def pick(tasks: Sequence[Task]) -> Task:
        clock.advance(0.002)
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
    clock = ManualClock()
    guarded: GuardedPolicy[Task, None] = GuardedPolicy(
        "pick", lambda _: None, lambda *_: True, clock=clock
    )
    guarded.check_hold(is_hold=True)
    clock.advance(MAX_HOLD_S / 2)
    guarded.check_hold(is_hold=True)
    clock.advance(MAX_HOLD_S)
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


def test_static_batch_admits_no_sequence_before_it_ends() -> None:
    """The baseline of benchmarks/support/batching_baselines.py."""
    assert tuple(static_batching(Classes(1, 1))) == (ALL,)
    assert tuple(static_batching(Classes(1, 1, running=3))) == (BatchSelection(starts=0),)
    assert not tuple(static_batching(Classes(1, 1, (live(Priority.LS),), running=3)))
