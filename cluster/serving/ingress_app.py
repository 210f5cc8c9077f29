"""Assembly of the ingress: tokenizer, rank clients, pipelines, HTTP application."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from starlette.applications import Starlette

from actors.channels.handshake import Identity
from actors.planning.planner_inputs import shape_of
from actors.telemetry.telemetry import Telemetry
from cluster.fleet.colocation import colocated_gain
from cluster.fleet.model_folder import public_name, resolve_model_folder
from cluster.fleet.placements import read_local_shares
from cluster.fleet.replies import Directory
from cluster.http.app import App, build_app
from cluster.http.authenticator import ApiKeyReloader
from cluster.http.batch_types import BatchCall
from cluster.http.request_context import LauncherApi
from cluster.http.schemas import ModelInfo
from cluster.http.spans import RequestTracer, build_tracer
from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend, Pipelines
from cluster.routing.prefill_placer import PrefillPlacer
from cluster.routing.rank_client import RankClient, RankClientConfig
from cluster.routing.rank_set import FindRanks, RoutingConfig
from contracts.config import ChannelConfig, HttpConfig, TandemConfig
from contracts.errors import NotReadyError
from contracts.interpreter import freeze_heap
from contracts.messages import STATE_PERIOD_S
from contracts.ranks import Group, rank_name
from contracts.requests import Sampling
from models.spec.model import ModelSpec, read_sampling
from models.text.tokenizer import Tokenizer
from models.weights.checkpoint import check_checkpoint, element_bytes
from planner.routing.backlog import Locality
from planner.routing.open_requests import work_of
from planner.routing.worker_state import saturation_of

CONNECT_DEADLINE_S = 30.0
DAY_S = 86400.0
RANK_WAIT_S = 1.0  # for missing ranks; a replacement takes longer
MIN_SILENCE_S = 4 * STATE_PERIOD_S


def served_model(config: TandemConfig) -> tuple[ModelInfo, Tokenizer]:
    """Return the served model's name and limits. Raises CheckpointError."""
    folder = resolve_model_folder(config.model.path)
    spec = check_checkpoint(folder)
    tokenizer = Tokenizer.load(folder)
    ignored = config.model.generation_config == "ignore"
    model = ModelInfo(
        name=config.model.name or public_name(config.model.path, folder),
        max_context_tokens=config.model.context_tokens(spec.max_context_tokens),
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *tokenizer.eos_token_ids))),
        sampling=Sampling(max_tokens=0) if ignored else read_sampling(folder),
        created=int(time.time()),
        expert_execution=config.experts.speculative,
        colocated=config.groups.attention_ranks == 0,
        colocated_gain=colocated_gain(config, spec),
    )
    return model, tokenizer


def rank_clients(
    addresses: Mapping[str, str],
    token: bytes,
    channel: ChannelConfig = ChannelConfig(),  # noqa: B008
) -> list[RankClient]:
    """Return one client per rank, which authenticates with the cluster's token."""
    heartbeat_timeout_s = max(channel.heartbeat_timeout_s, MIN_SILENCE_S)
    identity = Identity(name="ingress", token=token, epoch=None)
    settings = RankClientConfig(heartbeat_timeout_s=heartbeat_timeout_s)
    return [RankClient(name, address, identity, settings) for name, address in addresses.items()]


def pipelines(
    config: TandemConfig, directory: Directory, find: FindRanks | None = None
) -> Pipelines:
    """Return the deployed pipelines, not yet connected. find: see `RankSet`.

    Raises CheckpointError.
    """
    settings = RoutingConfig(
        block_tokens=config.kv.block_tokens,
        max_waiting=-(-config.schedule.max_waiting // config.groups.ingress_replicas),
        request_share=config.schedule.request_share,
        ls_max_wait_s=config.priority.ls_max_wait_s,
        be_max_wait_s=min(config.priority.be_max_wait_s, config.http.request_timeout_s),
        be_share=config.priority.be_share,
        no_rank_timeout_s=config.groups.ready_timeout_s,
    )
    generating = prefilling = None
    if directory.client_addresses:
        clients = rank_clients(directory.client_addresses, directory.token, config.channel)

        def connect(name: str, address: str) -> RankClient:
            return rank_clients({name: address}, directory.token, config.channel)[0]

        generating = PipelineBackend(LeastWorkPlacer(clients, settings, find, connect))
    if directory.prefill_addresses:
        folder = resolve_model_folder(config.model.path)
        spec = check_checkpoint(folder)
        context_tokens = config.model.context_tokens(spec.max_context_tokens)
        names = [rank_name(Group.PREFILL, rank) for rank in range(config.prefill_slots)]
        worker_addresses = {name: directory.prefill_addresses.get(name, "") for name in names}
        backlog = PrefillPlacer(
            rank_clients(worker_addresses, directory.token, config.channel),
            settings,
            saturation_of(config.prefill, context_tokens),
            work_of(shape_of(spec, element_bytes(spec, config.model.dtype))),
            find,
            locality=_locality(config, folder, spec),
        )
        prefilling = PipelineBackend(backlog)
    return Pipelines(generating, prefilling)


def _locality(config: TandemConfig, folder: Path, spec: ModelSpec) -> Locality | None:
    predicted, weight = read_local_shares(config, folder, spec), config.prefill.locality_weight
    if predicted is None:
        return None
    return lambda ids, start: [weight * share for share in predicted.of_tokens(ids, start)]


async def _connect(
    config: TandemConfig, directory: Directory, find: FindRanks
) -> tuple[ModelInfo, Tokenizer, RequestTracer | None, Pipelines]:
    """Return the parts of an application. Raises NotReadyError if no rank serves in time."""
    model, tokenizer = await asyncio.to_thread(served_model, config)
    tracer = await asyncio.to_thread(build_tracer, config, model.name)
    backend = pipelines(config, directory, find)
    backend.start()
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            await backend.wait_serving(RANK_WAIT_S)
    except TimeoutError:
        await backend.close()
        raise NotReadyError("; ".join(backend.problems()) or "no rank serves") from None
    freeze_heap()
    return model, tokenizer, tracer, backend


async def build_row_app(
    config: TandemConfig,
    directory: Callable[[dict[str, str]], Awaitable[Directory]],
    telemetry: Telemetry | None = None,
) -> App:
    """Return an application for `RowClient`, connected to the available ranks.

    directory: replaces suspects and returns the addresses. Raises TandemError, NotReadyError if no
    rank serves in time. Rows have a day, because they wait for other requests.
    """

    async def find(suspects: dict[str, str]) -> dict[str, str]:
        found = await directory(suspects)
        return found.client_addresses | found.prefill_addresses

    model, tokenizer, tracer, backend = await _connect(config, await directory({}), find)
    http = msgspec.structs.replace(config.http, access_log=False, request_timeout_s=DAY_S)
    log = msgspec.structs.replace(config.log, prompts=False)
    app = build_app(
        backend,
        tokenizer,
        model,
        msgspec.structs.replace(config, http=http, log=log),
        telemetry=telemetry,
        tracer=tracer,
    )
    app.app_state.grammars.start()
    return app


async def build_ingress_app(
    config: TandemConfig,
    directory: Directory,
    launcher: LauncherApi,
    find: FindRanks,
    batches: BatchCall | None = None,
    telemetry: Telemetry | None = None,
) -> App:
    """Return the application, connected to the available ranks. It disconnects on shutdown."""
    model, tokenizer, tracer, backend = await _connect(config, directory, find)
    app = build_app(
        backend,
        tokenizer,
        model,
        config,
        telemetry=telemetry,
        launcher=launcher,
        batches=batches,
        tracer=tracer,
    )

    app.app_state.grammars.start()
    follow = await _follow_keys(app, config.http)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        follow.cancel()
        await backend.close()
        app.close()

    app.router.lifespan_context = lifespan
    return app


async def _follow_keys(app: App, http: HttpConfig) -> asyncio.Future[None]:
    """Apply http.keys_file now and after changes, until cancelled.

    Raises ConfigError if the current file is invalid.
    """
    if http.keys_file is None:
        return asyncio.get_running_loop().create_future()
    reloader = ApiKeyReloader(http, app.app_state.authenticator, app.app_state.telemetry)
    await reloader.load()
    return asyncio.create_task(reloader.run())
