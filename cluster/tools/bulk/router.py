"""The router of a bulk job: an actor that tokenizes, routes, and awaits the workers' answers.

    driver ── chunk of rows, one actor call ──> BulkRouter ── sockets ──> prefill workers
           <── their answers ──────────────────

It holds no state worth keeping: when it dies, or does not answer for `ROUTER_TIMEOUT_S`, the driver
starts another one and sends unanswered rows again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.replies import Directory, checked
from cluster.routing.pipeline_backend import Backend
from cluster.serving.application import groups_handle
from cluster.serving.ingress_app import build_row_app, pipelines, served_model
from cluster.tools.bulk.answering import RowClassifier, RowRequester
from cluster.tools.bulk.driver import RouterLostError
from cluster.tools.bulk.job import BulkJob, model_digest
from cluster.tools.bulk.records import RowOutcome, RowRequest
from contracts.config import TandemConfig
from contracts.errors import JobError, TandemError
from contracts.interpreter import freeze_heap
from contracts.logs import event

log = logging.getLogger("tandem.bulk")

READY_TIMEOUT_S = 120.0
PING_EVERY_S = 1.0
APPLICATION_WAIT_S = 60.0  # until it is deployed again
WORKER_WAIT_S = 5.0  # for the last workers, when the router starts
ROUTER_TIMEOUT_S = 15.0  # it shares cores with workers, and imports torch at its start
MAX_LOSSES = 5  # consecutive, without an answer in between


class BulkRouter:
    """Router actor. groups: the actor that owns the workers; None: the running application's."""

    def __init__(self, config: TandemConfig, job: BulkJob, groups: Any | None) -> None:
        self._config, self._job = config, job
        self._groups = groups
        self._answering: RowClassifier | RowRequester | None = None
        self._backend: Backend | None = None
        self._directory: Directory | None = None
        self._is_replaced = False  # the application has been deployed again: its ranks are others

    async def open(self) -> str:
        """Connect to the workers; return why that failed, or an empty string."""
        try:
            self._answering = await self._open()
        except TandemError as error:
            return error.message
        except RayError as error:
            reason = f"the launcher of the workers does not answer: {type(error).__name__}"
            return f"{reason}; run again with --resume"
        return ""

    async def _open(self) -> RowClassifier | RowRequester:
        groups = self._groups or await self._find_groups()

        async def directory(suspects: dict[str, str]) -> Directory:
            found: Directory = checked(await groups.directory.remote(suspects))
            known = self._directory or found
            self._is_replaced |= found.token != known.token
            self._directory = known if self._is_replaced else found
            return self._directory

        if (requests := self._job.requests) is not None:
            app = await build_row_app(self._config, directory)
            self._backend = app.app_state.backend
            is_chat = app.app_state.tokenizer.has_chat_template
            limit_s = self._job.unavailable_s
            return RowRequester(app, requests, is_chat=is_chat, unavailable_s=limit_s)
        model, tokenizer = await asyncio.to_thread(served_model, self._config)

        async def find(suspects: dict[str, str]) -> dict[str, str]:
            return (await directory(suspects)).prefill_addresses

        scorer = pipelines(self._config, await directory({}), find)
        self._backend = scorer
        scorer.start()
        await scorer.wait_serving(WORKER_WAIT_S)
        freeze_heap()
        return RowClassifier(scorer, tokenizer, self._job, model.max_context_tokens)

    async def _find_groups(self) -> Any:
        """Return the application's launcher; it may be deployed again now. Raises JobError."""
        name, end_s = self._config.serve.name, time.monotonic() + APPLICATION_WAIT_S
        while True:
            try:
                groups = await asyncio.to_thread(groups_handle, name)
                self._adopt_config(await asyncio.wait_for(groups.config.remote(), ROUTER_TIMEOUT_S))
            except (KeyError, TimeoutError, RayError, RayServeException):
                if time.monotonic() > end_s:
                    raise JobError(
                        f"the application {name} has been removed from the Ray cluster: "
                        "start it again, then run with --resume"
                    ) from None
                await asyncio.sleep(PING_EVERY_S)
            else:
                return groups

    def _adopt_config(self, served: TandemConfig) -> None:
        """Use the application's present settings. Raises JobError if its model is another one."""
        folders = [resolve_model_folder(one.model.path) for one in (self._config, served)]
        if folders[0] != folders[1] and len({model_digest(folder) for folder in folders}) > 1:
            raise JobError(
                f"the application {self._config.serve.name} now serves another model "
                f"({served.model.path}): deploy the job's model again, then run with --resume"
            )
        self._config = msgspec.structs.replace(served, serve=self._config.serve)

    async def answer(self, rows: list[RowRequest]) -> list[RowOutcome] | TandemError:
        """Return the outcomes, or an error: an exception would arrive with its traceback."""
        assert self._answering is not None, "open() comes first"
        try:
            return await self._answering.answer(rows)
        except TandemError as error:
            return error

    async def ping(self) -> list[str] | None:
        """Show that the event loop runs; return one line for each unavailable worker.

        None: another router is needed.
        """
        if self._is_replaced:
            return None
        return self._backend.problems() if self._backend is not None else []


class RayRouter:
    """Client of the router. make: starts a BulkRouter. notify: reports a line to the user."""

    def __init__(self, make: Callable[[], Any], notify: Callable[[str], None]) -> None:
        self._make = make
        self._notify = notify
        self._missing = 0  # unavailable workers
        self._actor: Any | None = None
        self._starting = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._losses = 0
        self._starts = 0

    @property
    def restarts(self) -> int:
        return max(0, self._starts - 1)

    async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
        actor = await self._ready()
        try:
            found: list[RowOutcome] | TandemError = await actor.answer.remote(rows)
        except RayActorError as error:
            if self._actor is actor:  # several calls may report one loss
                self._actor = None
                self._count_loss(error)
                ray.kill(actor)  # it may be unreachable only
            raise RouterLostError("the router is lost") from None
        except RayTaskError as error:
            raise JobError(f"the router failed: {error.cause!r}") from None
        except RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise JobError(f"the Ray cluster is lost: {reason}; run again with --resume") from None
        if isinstance(found, TandemError):
            raise JobError(f"the router gave up: {found}; run again with --resume")
        self._losses = 0
        return found

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None

    async def _ready(self) -> Any:
        async with self._starting:
            while self._actor is None:
                if self._losses > MAX_LOSSES:
                    raise JobError(
                        f"the router was lost {self._losses} times without an answer in between; "
                        "see its log, then run again with --resume"
                    )
                actor = self._make()
                try:
                    await self._open(actor)
                except RayActorError as error:
                    self._count_loss(error)
                    continue
                self._starts += 1
                self._actor = actor
                self._watch = asyncio.create_task(self._monitor(actor))
            return self._actor

    async def _open(self, actor: Any) -> None:
        try:
            failure = await asyncio.wait_for(actor.open.remote(), READY_TIMEOUT_S)
        except TimeoutError:
            ray.kill(actor)
            raise JobError(
                f"the router was not connected to the workers within {READY_TIMEOUT_S:g} s; see "
                "their log, then run again with --resume"
            ) from None
        if failure:
            raise JobError(failure)

    def _count_loss(self, error: BaseException) -> None:
        self._losses += 1
        event(log, "router_lost", logging.WARNING, reason=str(error).strip().partition("\n")[0])

    async def _monitor(self, actor: Any) -> None:
        """Kill a router that hangs or has old ranks; pending calls then fail."""
        ping = actor.ping
        while self._actor is actor:
            await asyncio.sleep(PING_EVERY_S)
            try:
                problems = await asyncio.wait_for(ping.remote(), ROUTER_TIMEOUT_S)
                if problems is None:
                    self._notify("the application was deployed again: continues with its new ranks")
                    self._actor = None
                    ray.kill(actor)
                    return
                self._report_missing(problems)
            except TimeoutError:
                event(log, "router_hung", logging.WARNING, silent_s=ROUTER_TIMEOUT_S)
                ray.kill(actor)
                return
            except RayActorError:
                return

    def _report_missing(self, problems: list[str]) -> None:
        """Report once when workers become unavailable, and once when all are back."""
        before, self._missing = self._missing, len(problems)
        if self._missing > before:
            self._notify(f"continues without: {'; '.join(problems)}")
        elif before and not problems:
            self._notify("all workers are available again")


def router_actor(config: TandemConfig, job: BulkJob, groups: Any | None) -> Any:
    remote = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(BulkRouter)
    return remote.remote(config, job, groups)
