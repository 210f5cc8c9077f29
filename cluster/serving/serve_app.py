"""Serve application: `Groups` owns the ranks, `Ingress` serves HTTP.

    proxy ── HTTP ──> Ingress replica ── sockets ──> attention ranks, prefill workers
                          │ at start, and while a rank is missing: directory()
                          └────────────────────────> Groups replica ── owns ──> rank actors

Behind the ingress Ray carries no request data. A stopped Groups replica ends its actors. After a
kill its successor adopts them (cluster/fleet/adoption.py); without one they end by themselves.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from actors.channels.heartbeat import EventLoopWatchdog
from actors.telemetry.telemetry import Telemetry, merge_expositions
from cluster.batch.store import has_unfinished
from cluster.fleet.adoption import adopt, kill_orphans
from cluster.fleet.fleet import Fleet
from cluster.fleet.fleet_store import FleetStore
from cluster.fleet.launch import launch
from cluster.fleet.metrics_endpoint import MetricsEndpoint
from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.replies import Directory, ScrapeTarget, checked, failure_reply
from cluster.fleet.tracing import ROUNDS, TraceLock, estimate_offset
from cluster.http.admin import FIRST_RANK_PID
from cluster.http.app import App
from cluster.http.server import HttpServer
from cluster.serving.batch_actor import BatchClient, batch_store, start_batch_actor
from cluster.serving.ingress_app import build_ingress_app
from cluster.serving.log_folder import log_folder
from cluster.serving.settings import with_environment
from cluster.serving.shutdown import wait_idle
from contracts.clock import monotonic_s
from contracts.config import TandemConfig
from contracts.errors import (
    ConfigError,
    LaunchError,
    NotReadyError,
    ResourceError,
    TandemError,
)
from contracts.interpreter import watch_interpreter
from contracts.logs import event, set_up_logging
from contracts.ranks import RankStatus
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import ClockOffset, TaskSpan, TraceResponse, boot_identity

log = logging.getLogger("tandem.serve")
_ingress_log = logging.getLogger("tandem.ingress")

ON_HEAD = {"node:__internal_head__": 0.001}  # a resource of Ray's head node only
STATUS_TIMEOUT_S = 2.0
SPANS_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
HEALTH_PERIOD_S = 1.0  # Serve's default of ten delays replacements
FIRST_PLACE_S = 20.0  # then `serve status` shows the reason; Serve makes three attempts
PLACE_S = 600.0  # for nodes to join, in a later attempt
PLACE_PERIOD_S = 2.0


class Groups:
    """Launcher of the ranks.

    Under `tandem serve` it reports failures to the launching process. Otherwise it is healthy once
    the ranks run, and Serve starts it again after a failure, three times.
    """

    def __init__(
        self, config: TandemConfig, launch_id: str = "", application: str | None = None
    ) -> None:
        """Start the launch.

        application: None: that of this replica; empty: an actor of a bulk job, whose ranks end with
        it and are not adopted.
        """
        self._config = config
        self._launch_id = launch_id
        self._launcher_waits = self._is_direct = config.http.front == "direct"
        self._ingress_reported = asyncio.Event()
        self._ingress_failure: TandemError | None = None
        if application is None:
            context = serve.get_replica_context()
            application, options = context.app_name, context._deployment_config
            if options.autoscaling_config is not None or options.num_replicas != 1:
                raise ConfigError("deployments: Groups: give it one replica, which owns all ranks")
        self._resources = contextlib.ExitStack()
        if not self._is_direct:  # `tandem serve` has done the same
            self._config = with_environment(config, os.environ, application)
            if config.log.folder is not None:
                folder = log_folder(self._config, os.environ)
                self._config = self._resources.enter_context(folder)
        set_up_logging("groups", self._config.log)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="groups")
        self._tracing = TraceLock(monotonic_s)
        self._is_closed = False
        self._batches: Any | None = None
        self._starting = threading.Lock()
        self._application = application
        self._launch = self._threads.submit(self._run, config)

    def _run(self, given: TandemConfig) -> Fleet:
        """Adopt the ranks of a previous replica, or launch new ones."""
        folder = str(resolve_model_folder(self._config.model.path))
        if not self._application:
            return launch(self._config, folder)
        store = FleetStore(self._application, self._launch_id, given)
        fleet = adopt(self._config, folder, store)
        if fleet is None:
            fleet = self._launch_when_placed(folder, store)
        else:
            self._launcher_waits = False  # it knows that the ingress listens
        self._threads.submit(self._continue_batches)
        return fleet

    def _launch_when_placed(self, folder: str, store: FleetStore) -> Fleet:
        """Launch; behind Serve try until the cluster has room, at most PLACE_S."""
        if self._is_direct:
            return launch(self._config, folder, store)
        limit_s = PLACE_S if _has_failed(self._application) else FIRST_PLACE_S
        end_s = time.monotonic() + limit_s
        while True:
            timeout_s = max(1.0, end_s - time.monotonic())
            try:
                return launch(self._config, folder, store, place_timeout_s=timeout_s)
            except ResourceError as error:
                event(log, "waiting_for_resources", logging.WARNING, reason=error)
                if time.monotonic() > end_s or self._is_closed:
                    raise
            time.sleep(PLACE_PERIOD_S)

    async def _fleet(self) -> Fleet:
        return await asyncio.wrap_future(self._launch)

    async def launch_id(self) -> str:
        """Id of the launcher; empty for `serve run`."""
        return self._launch_id

    async def ingress_failed(self, failure: TandemError) -> bool:
        """Record why an ingress did not start.

        Returns whether a launcher waits and will report it.
        """
        self._ingress_failure = failure
        self._ingress_reported.set()
        return self._launcher_waits

    async def ingress_listens(self) -> None:
        """Record that the ingress has bound the port."""
        self._ingress_reported.set()

    async def ingress(self) -> TandemError | None:
        """Wait until the ingress has bound the port; return the error if it has not."""
        await self._fleet()
        if self._launcher_waits:
            await self._ingress_reported.wait()
        return self._ingress_failure

    async def served(self) -> None:
        """Record that the launcher has reported the server as ready."""
        self._launcher_waits = False

    async def config(self) -> TandemConfig:
        return self._config

    async def directory(self, suspects: dict[str, str] | None = None) -> Directory | TandemError:
        """Return the addresses of the ranks once they run, or the launch error.

        suspects: client addresses of prefill workers that a router has lost, with reasons;
        replaced.
        """
        try:
            fleet = await self._fleet()
        except Exception as error:  # noqa: BLE001 - raised by every caller of directory()
            return failure_reply(error)
        fleet.replace(suspects or {})
        return fleet.directory

    async def scale(self, requested: ScaleTarget | None) -> ScaleState | TandemError:
        """Start a scale and return its progress, or the error.

        requested: None: only return the progress.
        """
        fleet = await self._fleet()
        try:
            if requested is not None:
                return await asyncio.to_thread(fleet.scale, requested)
        except TandemError as error:
            return error
        return fleet.scale_state

    async def export(self, target: ScrapeTarget) -> None:
        """Register a process that is not a rank as a scrape target; repeated while it lives."""
        fleet = await self._fleet()
        if fleet.scrape_targets is not None:
            fleet.scrape_targets.lease(target)

    async def problem(self, token: bytes) -> str:
        """Return why the ranks launched with this token cannot serve, or an empty string."""
        if not self._launch.done():
            return ""  # possibly adopted: checked again
        if (error := self._launch.exception()) is not None:
            return f"the launcher of the ranks (Groups) has ended, and cannot start anew: {error}"
        fleet = self._launch.result()
        if fleet.directory.token != token:
            return "the launcher of the ranks (Groups) has ended, and they with it"
        return fleet.beyond_repair

    async def check_health(self) -> None:
        """Health check for Serve, which replaces a failing replica and with it all ranks.

        The first one, before which Serve shows it as starting, waits for the ranks. Under
        `tandem serve` the launching process ends the server instead.
        """
        if not self._is_direct and (reason := (await self._fleet()).beyond_repair):
            raise LaunchError(reason)

    async def batches(self) -> Any:
        """Return the handle of the batch service's actor, started by the first call."""
        await self._fleet()
        return self._batch_actor()

    def _batch_actor(self) -> Any:
        with self._starting:
            if self._batches is None:
                self._batches = start_batch_actor(self._config, ON_HEAD)
            return self._batches

    def _continue_batches(self) -> None:
        if has_unfinished(batch_store(self._config)[0]):
            self._batch_actor().start.remote()

    async def status(self) -> list[RankStatus]:
        fleet = await self._fleet()
        return await asyncio.to_thread(fleet.status, STATUS_TIMEOUT_S)

    async def metrics(self) -> list[str]:
        fleet = await self._fleet()
        return await asyncio.to_thread(fleet.metrics, STATUS_TIMEOUT_S)

    async def spans(self) -> list[TaskSpan]:
        """Return the recorded task spans of all ranks."""
        fleet = await self._fleet()
        return await asyncio.to_thread(fleet.spans, SPANS_TIMEOUT_S)

    async def trace(self, seconds: float, first_pid: int) -> TraceResponse:
        """Record a trace of the next seconds on this process's clock; one at a time."""
        fleet, since_s = await self._fleet(), monotonic_s()
        if (refused_s := self._tracing.begin(seconds)) is not None:
            return TraceResponse(refused_s=refused_s)
        try:
            await asyncio.sleep(seconds)
            return await asyncio.to_thread(fleet.trace, seconds, since_s, first_pid)
        finally:
            self._tracing.end()

    async def clock(self) -> tuple[float, str]:
        return monotonic_s(), boot_identity()

    async def drain_and_close(self) -> None:
        """Drain, then end the ranks, if they have not ended already."""
        if not self._launch.done():
            self._is_closed = True
            await asyncio.to_thread(kill_orphans, self._application)
            return
        if self._launch.exception() is None:
            await asyncio.to_thread(self._launch.result().block_adoption)
        works = self._launch.exception() is None and not self._launch.result().beyond_repair
        if works and not self._is_direct:
            limit_s = self._config.http.drain_timeout_s
            if left := await wait_idle(self.status, limit_s):
                event(log, "sequences_aborted", logging.WARNING, left=left, after_s=limit_s)
        await self.close()

    async def close(self) -> None:
        """End the ranks in order; called by the launcher of `tandem serve`."""
        self._ingress_reported.set()  # ends a call that would delay the removal of this replica
        if self._is_closed or (self._launch.done() and self._launch.exception() is not None):
            return  # a failed launch has cleaned up
        fleet = await self._fleet()
        self._is_closed = True
        await asyncio.to_thread(fleet.close, CLOSE_TIMEOUT_S)


class ServedGroups(Groups):
    """Groups as a deployment. For a bulk job's actor Ray would call `__del__` in the driver."""

    async def __del__(self) -> None:
        """Drain and close; Serve calls this when it removes or redeploys the application.

        Under `tandem serve` the ranks have ended already, unless another process removes the
        application.
        """
        await self.drain_and_close()


class Launcher:
    """Client of the launcher for the HTTP application. Raises NotReadyError without a reply.

    groups: handle of the deployment `Groups`.
    """

    def __init__(self, groups: Any) -> None:
        self._groups = groups

    async def metrics(self) -> str:
        try:
            return merge_expositions(await self._groups.metrics.remote())
        except RayError as error:
            event(_ingress_log, "rank_metrics_failed", logging.WARNING, error=error)
            return ""

    async def status(self) -> list[RankStatus]:
        with _answers("rank_status_failed"):
            found: list[RankStatus] = await self._groups.status.remote()
        return found

    async def trace(self, seconds: float) -> TraceResponse:
        with _answers("trace_failed"):
            found: TraceResponse = await self._groups.trace.remote(seconds, FIRST_RANK_PID)
        return found

    async def scale(self, requested: ScaleTarget | None) -> ScaleState:
        with _answers("scale_request_failed"):
            found: ScaleState = checked(await self._groups.scale.remote(requested))
        return found

    async def offset(self) -> ClockOffset:
        """Return by how much this process's clock is ahead of the launcher's."""
        rounds, boot = [], ""
        with _answers("trace_failed"):
            for _ in range(ROUNDS):
                sent_s = monotonic_s()
                shown_s, boot = await self._groups.clock.remote()
                # Negated: this clock, as seen by the launcher.
                rounds.append((-monotonic_s(), -shown_s, -sent_s))
        return estimate_offset(rounds, same_boot=bool(boot) and boot == boot_identity())


@contextlib.contextmanager
def _answers(event_name: str) -> Iterator[None]:
    try:
        yield
    except RayError as error:
        event(_ingress_log, event_name, logging.WARNING, error=error)
        raise NotReadyError("the launcher of the ranks does not answer") from None


class Ingress:
    """HTTP front. Each replica has its own connections to the ranks."""

    def __init__(self, config: TandemConfig, groups: DeploymentHandle) -> None:
        self._config = config
        self._groups = groups
        self._front: HttpServer | None = None
        self._app: App | None = None
        set_up_logging("ingress", self._config.log)
        self._metrics_endpoint: MetricsEndpoint | None = None
        watch_interpreter(2 * self._config.log.stall_threshold_s)
        self._token = b""  # of its ranks, once connected
        self._found: dict[str, str] = {}  # their addresses

    async def check_health(self) -> None:
        """Health check for Serve, which replaces a failing replica.

        Behind Serve's proxy it also fails if its ranks have been replaced by a new launch.
        """
        if self._front is not None:
            self._front.check()
        elif self._token and (reason := await self._ranks_problem(self._token)):
            raise LaunchError(reason)

    async def _ranks_problem(self, token: bytes) -> str:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                reason: str = await self._groups.problem.remote(token)
        except Exception as error:  # noqa: BLE001 - Serve replaces Groups; retried
            event(log, "groups_unreachable", logging.WARNING, error=error)
            return ""
        return reason

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Build the connected application.

        Errors are reported through Groups: a waiting launcher prints one line and ends; otherwise
        they are raised and Serve retries.
        """
        try:
            return await self._build()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raised = None if isinstance(error, TandemError) else traceback.format_exception(error)
            event(log, "ingress_failed", reason=reason, trace="".join(raised or ()))
            if not await self._groups.ingress_failed.remote(failure_reply(error)):
                raise
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def _build(self) -> ASGIApp:
        directory: Directory = checked(await self._groups.directory.remote())
        config: TandemConfig = await self._groups.config.remote()  # of the launcher's environment
        self._config = with_environment(config, os.environ, config.serve.name)
        set_up_logging("ingress", self._config.log)
        telemetry = Telemetry()
        watch = EventLoopWatchdog("ingress", self._config.log.stall_threshold_s)
        watch.start(asyncio.get_running_loop())
        app = self._app = await build_ingress_app(
            self._config,
            directory,
            Launcher(self._groups),
            self._addresses,
            BatchClient(self._groups.batches.remote),
            telemetry,
        )
        name = f"ingress-{serve.get_replica_context().replica_id.unique_id}"
        self._metrics_endpoint = MetricsEndpoint(
            self._config, telemetry, "ingress", name, self._groups.export.remote
        )
        await self._metrics_endpoint.open()
        if self._config.http.front == "direct":
            several = self._config.groups.ingress_replicas > 1
            self._front = HttpServer(app, self._config.http, shares_port=several)
            await self._front.start()
            await self._groups.ingress_listens.remote()
        self._token = directory.token
        return app

    async def drain(self) -> tuple[str, int]:
        """Stop admission. Returns this replica's id and its number of open requests."""
        logging.getLogger("tandem.rank_client").setLevel(logging.ERROR)  # the ranks end next
        left = 0 if self._app is None else await self._app.drain(0.0)
        return serve.get_replica_context().replica_id.unique_id, left

    async def _addresses(self, suspects: dict[str, str]) -> dict[str, str]:
        """Return the current client addresses; `suspects` are replaced.

        After a redeployment, addresses of the new ranks are ignored.
        """
        found: Directory = checked(await self._groups.directory.remote(suspects))
        if self._token in (b"", found.token):
            self._found = found.client_addresses | found.prefill_addresses
        return self._found


def _has_failed(application: str) -> bool:
    """Return whether `serve status` shows a failed start of the launcher."""
    found = serve.status().applications.get(application)
    return found is not None and any(
        "failed to start" in one.message for one in found.deployments.values()
    )


def build_serve_app(config: TandemConfig, launch_id: str = "") -> serve.Application:
    """Return the application for `serve.run`. launch_id: of the caller."""
    is_direct = config.http.front == "direct"
    drain_timeout_s = 0.0 if is_direct else config.http.drain_timeout_s
    wait_loop_s = 0.1 if is_direct else 2.0  # its clients have left; Serve's default
    on_head = {"num_cpus": 0, "resources": ON_HEAD}
    groups = serve.deployment(
        name="Groups",
        num_replicas=1,
        max_ongoing_requests=64,
        ray_actor_options=on_head,  # all ranks depend on it
        graceful_shutdown_timeout_s=15 + drain_timeout_s,
        graceful_shutdown_wait_loop_s=wait_loop_s,
        health_check_period_s=HEALTH_PERIOD_S,
    )(ServedGroups)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.groups.ingress_replicas,
        max_ongoing_requests=10_000,  # admission is cluster.routing's: 429, not Serve's 503
        # host:port refers to the head node
        ray_actor_options=on_head if is_direct else {"num_cpus": 0},
        graceful_shutdown_timeout_s=5 + drain_timeout_s,
        graceful_shutdown_wait_loop_s=wait_loop_s,
        health_check_period_s=HEALTH_PERIOD_S,
    )(serve.ingress()(Ingress))
    return ingress.bind(config, groups.bind(config, launch_id))
