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
from contracts.errors import LaunchError, OverloadError, PeerHungError, RankError, TandemError
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
    """What a client is told of it, and what our own code asks it."""
    names = ("message", "code", "status", "retryable", "param", "retry_after_s", "peer", "args")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def across_a_pipe(error: Exception) -> BaseException | None:
    """What a caller gets of an error that a rank in a plain process raises."""

    def fail() -> None:
        raise error

    answer: Future[Any] = Future()
    line = rank_process._execute(SimpleNamespace(status=fail), b'{"method": "status"}')
    rank_process._resolve(answer, "status", line)
    return answer.exception(0)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_error_pickles(kind: type[TandemError]) -> None:
    """FINDINGS B14."""
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert described(again) == described(error)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_error_round_trips_through_a_pipe(kind: type[TandemError]) -> None:
    """FINDINGS B14: RankError takes three arguments, and was made again of one."""
    error = made(kind)
    again = across_a_pipe(error)
    assert again is not None
    if kind.__module__ == "contracts.errors":
        assert type(again) is kind
    else:  # the other side has never heard of it
        assert type(again) in kind.__mro__
    assert described(again) == described(error) or kind.__module__ != "contracts.errors"


def test_foreign_error_is_reported_by_class_name() -> None:
    answer = across_a_pipe(ZeroDivisionError("by zero"))
    assert isinstance(answer, LaunchError)
    assert str(answer) == "ZeroDivisionError: by zero"


def test_error_attributes_survive_pickle() -> None:
    """FINDINGS B14."""
    hung = across_a_pipe(PeerHungError("expert-1 is silent", "expert-1"))
    assert isinstance(hung, PeerHungError)
    assert hung.peer == "expert-1"
    full = across_a_pipe(OverloadError("full", 7.0))
    assert isinstance(full, OverloadError)
    assert full.retry_after_s == 7.0
    rank = across_a_pipe(RankError("no", "peer_dead", 503))
    assert isinstance(rank, RankError)
    assert (rank.code, rank.status, rank.retryable) == ("peer_dead", 503, True)
