"""Ranks as Ray actors. The only module below cluster/ that imports ray."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.ranks.shell import LoggedShell, WorkerShell
from contracts.errors import LaunchError, TandemError

_STATUS, _LOOKS = "status", "looks"
# What is answered whatever else runs in the actor, `connect` for example. The status has a thread
# to itself: by it a supervisor tells whether the rank lives.
_GROUP_OF = {"status": _STATUS} | dict.fromkeys(("metrics", "spans", "clock_s", "trace"), _LOOKS)


def rank_class(name: str, shell: type[WorkerShell] = LoggedShell) -> Any:
    """The actor class of one rank, for `RayRank`. It has the rank's name, which `ps` and `ray list
    actors` show: "ray::expert-1"."""
    return ray.remote(concurrency_groups={_STATUS: 1, _LOOKS: 1})(type(name, (shell,), {}))


class RayRank:
    """A `rendezvous.WorkerHandle` on a Ray actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    def started(self) -> Future[Any]:
        """Done once its process is there, on whichever node."""
        return self.call("__ray_ready__")

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        bound = getattr(self.actor, method)
        if method in _GROUP_OF:
            bound = bound.options(concurrency_group=_GROUP_OF[method])
        raw = bound.remote(*arguments).future()
        raw.add_done_callback(lambda done: _copy(done, answer, self.name))
        return answer


def _copy(done: Future[Any], answer: Future[Any], name: str) -> None:
    """Moves the outcome over, with Ray's wrapping taken off."""
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    elif isinstance(error, TandemError):
        answer.set_exception(_plain(error))
    elif isinstance(error, RayTaskError):
        cause = error.cause
        known = isinstance(cause, TandemError)
        answer.set_exception(
            cause if known else LaunchError(f"{name}: {type(cause).__name__}: {cause}")
        )
    elif isinstance(error, RayActorError):
        answer.set_exception(LaunchError(f"{name}: its actor died: {_first_line(error)}"))
    else:
        answer.set_exception(error)


def _plain(error: TandemError) -> TandemError:
    """Ray raises a subclass of both its own error and ours; its text is a traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, TandemError) else error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
