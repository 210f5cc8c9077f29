"""User-defined scheduling policies (docs/policies.md).

A policy is loaded by import path, checked before use and disabled if it fails. It affects order,
never answers.
"""

import copy
import importlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from contracts.clock import Clock, monotonic_s
from contracts.errors import ConfigError
from contracts.plan import Order
from contracts.requests import Priority
from planner.scheduling.batching import (
    BatchingPolicy,
    BatchingView,
    BatchSelection,
    Phase,
    SequenceView,
)
from planner.scheduling.task_order import PolicyFallbackError, QueueHead, Task, TaskStage

MAX_FAILURES = 10  # failures after which it is disabled
SLOW_S, SLOW_CALLS = 0.001, 100  # mean time per call, over this many calls
MAX_LIVE_BATCHES = 3  # of a user policy
MAX_HOLD_S = 1.0  # longest hold of all work


class UserPolicy(NamedTuple):
    """Functions of a user policy; None: the default applies.

    form: sequences in no batch → keys of the next batch in order, empty for no batch. pick:
    runnable tasks → one, or None to run nothing yet. serve: queues of an expert rank → one or None.
    """

    form: Callable[[Sequence[SequenceView]], Iterable[Hashable]] | None = None
    pick: Callable[[Sequence[Task]], Task | None] | None = None
    serve: Callable[[Sequence[QueueHead]], QueueHead | None] | None = None


G = TypeVar("G")
R = TypeVar("R")


class GuardedPolicy(Generic[G, R]):
    """A policy function with checks.

    Exceptions, unknown results and slowness are failures: the call raises PolicyFallbackError, and
    after MAX_FAILURES all calls do.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Sequence[G]], R],
        is_one: Callable[[Sequence[G], R], bool],
        failed: Callable[[str], None] = lambda _: None,
        clock: Clock = monotonic_s,
    ) -> None:
        """Create a guard; is_one: validates a result. failed: called with each failure's reason."""
        self._name, self._function, self._is_one = name, function, is_one
        self._failed, self._clock = failed, clock
        self._calls, self._spent_s = 0, 0.0
        self._hold_since_s: float | None = None
        self._disabled = False
        self.failures = 0

    def __call__(self, given: Sequence[G]) -> R:
        if self._disabled:
            raise PolicyFallbackError
        start_s = self._clock()
        try:
            result = self._function(given)
        except Exception as error:  # noqa: BLE001 - user code
            raise self._fail(f"raised {type(error).__name__}: {error}") from None
        self._take_time(start_s)
        if not self._is_one(given, result):
            raise self._fail(f"returned an unknown element: {result!r:.100}")
        return result

    def _take_time(self, start_s: float) -> None:
        self._calls += 1
        self._spent_s += self._clock() - start_s
        if self._calls >= SLOW_CALLS:
            if self._spent_s > SLOW_S * self._calls:
                self._disabled = True
                raise self._fail(f"takes {1e3 * self._spent_s / self._calls:.1f} ms a call")
            self._calls, self._spent_s = 0, 0.0

    def check_hold(self, *, is_hold: bool) -> None:
        """Record a hold. Raises PolicyFallbackError after MAX_HOLD_S."""
        if not is_hold:
            self._hold_since_s = None
            return
        now_s = self._clock()
        if self._hold_since_s is None:
            self._hold_since_s = now_s
        elif now_s - self._hold_since_s > MAX_HOLD_S:
            self._hold_since_s = None
            raise self._fail(f"held all work for {MAX_HOLD_S:g} s")

    def _fail(self, reason: str) -> PolicyFallbackError:
        self.failures += 1
        self._disabled = self._disabled or self.failures >= MAX_FAILURES
        more = "; the policy is disabled" if self._disabled else ""
        self._failed(f"{self._name} {reason}{more}")
        return PolicyFallbackError(reason)


def user_batching(
    form: Callable[[Sequence[SequenceView]], Iterable[Hashable]],
    default: BatchingPolicy,
    failed: Callable[[str], None] = lambda _: None,
) -> BatchingPolicy:
    """Return a batching policy that takes the sequences named by `form`."""

    def named(given: Sequence[SequenceView]) -> tuple[Hashable, ...]:
        return tuple(form(given))

    guarded = GuardedPolicy("form", named, are_keys, failed)

    def policy(view: BatchingView) -> Iterable[BatchSelection]:
        idle = view.idle if view.in_flight < MAX_LIVE_BATCHES else ()
        if not idle:
            return ()
        try:
            keys = guarded(idle)
        except PolicyFallbackError:
            return default(view)
        if keys:
            return (BatchSelection(keys=keys),)
        return () if view.in_flight else default(view)  # else there would be no further call

    return policy


def guarded_choice(
    function: Callable[[Sequence[G]], G | None], failed: Callable[[str], None] = lambda _: None
) -> Callable[[Sequence[G]], G | None]:
    """Return the guarded `pick` or `serve`; it raises PolicyFallbackError for the default."""
    name = getattr(function, "__name__", "a function")
    guarded = GuardedPolicy(name, function, _is_member, failed)

    def choice(given: Sequence[G]) -> G | None:
        one = guarded(given)
        guarded.check_hold(is_hold=one is None)
        return one

    return choice


def load_policy(path: str) -> UserPolicy:
    """Load package.module:name, an object or a class without arguments. Raises ConfigError."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise _invalid(path, "give package.module:name")
    try:
        found = getattr(importlib.import_module(module), name)
        policy = found() if isinstance(found, type) else found
    except Exception as error:  # noqa: BLE001 - any error of its import
        message = str(error).partition("\n")[0]
        raise _invalid(path, f"{type(error).__name__}: {message}; is it on PYTHONPATH?") from None
    functions = {field: getattr(policy, field, None) for field in UserPolicy._fields}
    if not any(functions.values()):
        raise _invalid(path, f"it has none of {', '.join(UserPolicy._fields)}")
    for field, function in functions.items():
        if function is not None and not callable(function):
            raise _invalid(path, f"its {field} cannot be called")
    _check(path, policy, functions)
    return UserPolicy(**functions)


def _check(path: str, policy: Any, functions: dict[str, Any]) -> None:
    """Check that each function returns valid and repeatable results on a sample view."""
    for field, given in sample_views().items():
        if functions[field] is None:
            continue
        results = []
        for policy_copy in (_copy(policy), _copy(policy)):
            try:
                result = getattr(policy_copy, field)(given)
                results.append(list(result) if field == "form" else result)
            except Exception as error:  # noqa: BLE001
                raise _invalid(path, f"{field} raised {type(error).__name__}: {error}") from None
        is_one: Any = are_keys if field == "form" else _is_member
        if not is_one(given, results[0]):
            raise _invalid(path, f"{field} returned an unknown element: {results[0]!r:.80}")
        if results[0] != results[1]:
            raise _invalid(
                path, f"{field} is not repeatable: equal arguments gave different results"
            )


def _copy(policy: Any) -> Any:
    try:
        return copy.deepcopy(policy)
    except Exception:  # noqa: BLE001 - a module, for example, has no state
        return policy


def are_keys(given: Sequence[SequenceView], keys: Iterable[Hashable]) -> bool:
    listed = list(keys)
    return len(set(listed)) == len(listed) and {each.key for each in given}.issuperset(listed)


def _is_member(given: Sequence[object], one: object) -> bool:
    return one is None or one in given


def sample_views() -> dict[str, Sequence[Any]]:
    """Return an example argument of each function, by name."""
    ls, be = Priority.LS, Priority.BE
    tasks = [
        Task(ls, 2, 0, 0, TaskStage.ATTENTION, Order.ASAS, due_s=5.0),
        Task(ls, 3, 1, 0, TaskStage.ATTENTION, Order.ASAS, due_s=4.0),
        Task(be, 1, 3, 0, TaskStage.ATTENTION, Order.ASAS, is_started=True, slice_s=0.002),
        Task(be, 1, 3, 1, TaskStage.SHARED, Order.ASAS),
    ]
    heads = [QueueHead(ls, 2, 10.0, 1, 16), QueueHead(be, 2, 9.0, 2, 512, is_started=True)]
    sequences = [
        SequenceView((0, 1), ls, Phase.DECODE, 1, 4, 5.0, 1.0, b"a"),
        SequenceView((0, 2), ls, Phase.PREFILL, 64, 0, 4.0, 3.0, b"b"),
        SequenceView((1, 1), be, Phase.PREFILL, 512, 0, math.inf, 2.0, b"a"),
    ]
    return {"form": sequences, "pick": tasks, "serve": heads}


def _invalid(path: str, why: str) -> ConfigError:
    return ConfigError(f"priority.policy={path!r}: {why}", "priority.policy")
