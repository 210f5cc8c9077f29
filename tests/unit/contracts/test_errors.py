"""Errors keep their attributes across Ray (pickle) and between processes (JSON)."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import actors
import cluster
import models
import planner
from contracts.errors import LaunchError, TandemError
from tests.support import rank_process

ARGUMENTS: dict[str, tuple[object, ...]] = {
    "RankError": ("it is full", "overloaded", 429),
    "OverloadError": ("it is full", 2.5),
    "RequestError": ("no such field", "prompt"),
    "PeerError": ("expert-1 is lost", "expert-1"),
}


def all_errors() -> list[type[TandemError]]:
    for package in (actors, cluster, models, planner):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found: list[type[TandemError]] = []
    waiting: list[type[TandemError]] = [TandemError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    ours = ("contracts", "actors", "cluster", "models", "planner")
    return sorted((k for k in found if k.__module__.split(".")[0] in ours), key=str)


def made(kind: type[TandemError]) -> TandemError:
    known = [ARGUMENTS[base.__name__] for base in kind.__mro__ if base.__name__ in ARGUMENTS]
    return kind(*(known[0] if known else ("it went wrong",)))


def described(error: BaseException) -> dict[str, Any]:
    """Return the attributes that clients or callers read."""
    names = ("message", "code", "status", "retryable", "param", "retry_after_s", "peer", "args")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def across_a_pipe(error: Exception) -> BaseException | None:
    """Return the error that a caller receives if a rank process raises `error`."""

    def fail() -> None:
        raise error

    answer: Future[Any] = Future()
    line = rank_process._execute(SimpleNamespace(status=fail), b'{"method": "status"}')
    rank_process._resolve(answer, "status", line)
    return answer.exception(0)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_error_keeps_attributes_through_pickle_and_pipe(kind: type[TandemError]) -> None:
    error = made(kind)
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is kind
    assert described(unpickled) == described(error)
    received = across_a_pipe(error)
    assert received is not None
    if kind.__module__ == "contracts.errors":
        assert type(received) is kind
        assert described(received) == described(error)
    else:  # the other side has not imported it
        assert type(received) in kind.__mro__


def test_foreign_error_is_reported_by_class_name() -> None:
    answer = across_a_pipe(ZeroDivisionError("by zero"))
    assert isinstance(answer, LaunchError)
    assert str(answer) == "ZeroDivisionError: by zero"
