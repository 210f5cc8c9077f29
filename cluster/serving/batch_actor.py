"""Actor of the batch service, on the head node, and its client in the ingress.

    Ingress ── calls ──> BatchActor ── sockets ──> attention ranks, prefill workers

`Groups` starts it when it is first used, or when there are unfinished batches. Ray restarts it when
it dies; it then continues from the files of `batch.storage`.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from actors.telemetry.telemetry import Telemetry
from cluster.batch.service import Batches
from cluster.batch.store import LockedError, Store
from cluster.fleet.metrics_endpoint import MetricsEndpoint
from cluster.fleet.model_folder import public_name, resolve_model_folder
from cluster.fleet.replies import Directory, checked
from cluster.http.row_client import RowClient
from cluster.serving.ingress_app import build_row_app
from cluster.serving.log_folder import state_folder
from contracts.config import TandemConfig
from contracts.errors import NotReadyError, TandemError
from contracts.logs import event, set_up_logging

log = logging.getLogger("tandem.batch")

MAX_CALLS = 256  # at a time
LOCK_TRIES = 10


def batch_store(config: TandemConfig) -> tuple[str, Path]:
    """Return the URL and the local work folder of `batch.storage`."""
    folder = state_folder(os.environ) / config.serve.name / "batches"
    url = config.batch.storage or str(folder)
    return url, (folder if "://" in url else Path(url)) / "work"


class BatchActor:
    """The batch service of the application config.serve.name."""

    def __init__(self, config: TandemConfig) -> None:
        self._config = config
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._groups = serve.get_deployment_handle("Groups", self._config.serve.name)
        set_up_logging("batches", self._config.log)
        self._opening: asyncio.Task[Batches] | None = None
        self._metrics: MetricsEndpoint | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the method's result, or its TandemError: Ray would add a traceback."""
        try:
            return await getattr(await self._batches(), method)(*arguments)
        except TandemError as error:
            return error
        except Exception as error:  # the caller reports a restart
            event(log, "batch_call_failed", logging.ERROR, error, method=method)
            raise

    async def start(self) -> None:
        """Continue unfinished batches."""
        await self._batches()

    async def _batches(self) -> Batches:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        try:
            return await asyncio.shield(self._opening)
        except TandemError:
            self._opening = None  # the next call tries again
            raise

    async def _open(self) -> Batches:
        config = self._config
        store = await self._store()
        folder = resolve_model_folder(config.model.path)
        model = config.model.name or public_name(config.model.path, folder)
        batches = Batches(store, config.batch, model, self._connect)
        await batches.open()
        return batches

    async def _store(self) -> Store:
        """Open the store; a predecessor may still be ending. Raises ConfigError."""
        for _ in range(LOCK_TRIES):
            try:
                return await asyncio.to_thread(Store, *batch_store(self._config))
            except LockedError:
                await asyncio.sleep(1.0)
        return await asyncio.to_thread(Store, *batch_store(self._config))

    async def _connect(self) -> RowClient:
        """Connect to the ranks. Raises TandemError."""

        async def directory(suspects: dict[str, str]) -> Directory:
            try:
                found: Directory = checked(await self._groups.directory.remote(suspects))
            except RayError as error:
                raise NotReadyError(
                    f"the launcher does not answer: {type(error).__name__}"
                ) from None
            return found

        telemetry = Telemetry()
        app = await build_row_app(self._config, directory, telemetry)
        self._metrics = MetricsEndpoint(
            self._config, telemetry, "batches", f"batches-{os.getpid()}", self._groups.export.remote
        )
        await self._metrics.open()
        return RowClient(app)


def start_batch_actor(config: TandemConfig, on_head: dict[str, float]) -> Any:
    """Start the actor, which ends with the caller's process."""
    options = {"num_cpus": 0, "resources": on_head, "max_restarts": -1}
    remote = ray.remote(max_concurrency=MAX_CALLS, **options)(BatchActor)
    return remote.remote(config)


class BatchClient:
    """Client of the actor, a `BatchCall`.

    find: returns the actor's handle, anew after it was lost.
    """

    def __init__(self, find: Callable[[], Awaitable[Any]]) -> None:
        self._find = find
        self._actor: Any | None = None

    async def __call__(self, method: str, *arguments: Any) -> Any:
        try:
            if self._actor is None:
                self._actor = await self._find()
            result = await self._actor.call.remote(method, *arguments)
        except (RayError, RayServeException):
            self._actor = None
            raise NotReadyError(
                "the batch service is being restarted: try again in some seconds"
            ) from None
        return checked(result)
