"""Ranks as Ray actors. The only module below cluster/ that imports ray."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.ranks.shell import WorkerShell
from contracts.errors import LaunchError, TandemError
from contracts.logs import event
from contracts.ranks import RankReady, RankSpec, RankStatus

log = logging.getLogger("tandem.worker")

NAMESPACE = "tandem"  # of actors that outlive their launcher
CHECK_INTERVAL_S = 1.0

_STATUS, _QUERIES = "status", "looks"
# Calls answered while another one, such as `connect`, runs. `status` has its own thread, because
# supervisors use it as the liveness check.
_GROUP_OF = {"status": _STATUS} | dict.fromkeys(
    ("metrics", "clock_s", "trace", "identity", "drain", "place", "placed"), _QUERIES
)


def rank_class(name: str, shell: type[WorkerShell] = WorkerShell) -> Any:
    """Return the actor class of one rank, with the rank's name for `ps` and `ray list actors`."""
    return ray.remote(concurrency_groups={_STATUS: 1, _QUERIES: 1})(type(name, (shell,), {}))


class OrphanGuardShell(WorkerShell):
    """Shell of an actor that outlives its launcher, so that another launcher can adopt it.

    Without a status request for groups.orphan_timeout_s it ends and removes its placement group.
    Before the first request, loading may take groups.ready_timeout_s in addition.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spec: RankSpec | None = None
        self._orphaned_s = 0.0  # time that this process ran since the last request
        self._is_known = False
        threading.Thread(target=self._watch, name="alone", daemon=True).start()

    def prepare(self, spec: RankSpec) -> RankReady:
        self._spec = spec
        return super().prepare(spec)

    def status(self) -> RankStatus:
        self._orphaned_s, self._is_known = 0.0, True
        return super().status()

    def identity(self) -> tuple[str, int, bytes]:
        """Return name, epoch and a digest of the cluster's token, and count as a request."""
        self._orphaned_s = 0.0
        spec = self._made.spec
        return spec.name, spec.epoch, hashlib.sha256(spec.token).digest()

    def _watch(self) -> None:
        while True:
            time.sleep(CHECK_INTERVAL_S)
            self._orphaned_s += CHECK_INTERVAL_S
            if self._spec is not None and self._orphaned_s > self._limit_s(self._spec):
                self._end(self._spec.name)

    def _limit_s(self, spec: RankSpec) -> float:
        groups = spec.config.groups
        return groups.orphan_timeout_s + (0.0 if self._is_known else groups.ready_timeout_s)

    def _end(self, name: str) -> None:
        event(log, "rank_orphaned", logging.ERROR, rank=name, seconds=round(self._orphaned_s))
        placement_group = ray.util.get_current_placement_group()
        if placement_group is not None:
            ray.util.remove_placement_group(placement_group)
        os._exit(0)


class RayRank:
    """A `rendezvous.WorkerHandle` of a Ray actor. key: its name in Ray, or empty."""

    def __init__(self, name: str, actor: Any, key: str = "") -> None:
        self.name = name
        self.actor = actor
        self.key = key

    def started(self) -> Future[Any]:
        """Return a future that is done when the process runs."""
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
    """Copy the outcome without Ray's wrapping."""
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
    """Unwrap an error that Ray raises as a subclass of its own error and of ours."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, TandemError) else error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
