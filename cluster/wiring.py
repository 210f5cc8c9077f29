"""The ingress's parts, joined: tokenizer, rank clients, dispatcher, HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from ray.exceptions import RayError
from starlette.applications import Starlette

from actors.channels.handshake import Identity
from actors.telemetry import merge_expositions
from cluster.api.app import build_app
from cluster.api.schemas import ServedModel
from cluster.codec import Directory
from cluster.dispatcher import Dispatcher, DispatcherConfig
from cluster.model_folder import resolve_model_folder
from cluster.rank_client import RankClient, RankClientConfig
from contracts.config import TandemConfig
from models.checkpoint import check_checkpoint
from models.tokenizer import Tokenizer

log = logging.getLogger("tandem.ingress")

CONNECT_DEADLINE_S = 30.0
SILENCE_S = 1.5  # a rank says something every 0.25 s; its loss must be told within 2 s


def served_model(config: TandemConfig) -> tuple[ServedModel, Tokenizer]:
    """What clients call the model and may ask of it. Raises CheckpointError."""
    folder = resolve_model_folder(config.model.path)
    spec = check_checkpoint(folder)
    limit = config.model.max_context_tokens or spec.max_context_tokens
    model = ServedModel(
        name=config.model.name or folder.name,
        max_context_tokens=min(limit, spec.max_context_tokens),
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(spec.eos_token_ids),
        created=int(time.time()),
    )
    return model, Tokenizer.load(folder)


def rank_clients(directory: Directory) -> list[RankClient]:
    """One client per attention rank, each proving the group's token."""
    me = Identity(name="ingress", token=directory.token, epoch=None)
    return [
        RankClient(name, address, me, RankClientConfig(silence_s=SILENCE_S))
        for name, address in directory.client_addresses.items()
    ]


async def build_ingress_app(
    config: TandemConfig, directory: Directory, rank_metrics: Callable[[], Awaitable[list[str]]]
) -> Starlette:
    """The application, connected to every rank. It closes its connections when it shuts down."""
    model, tokenizer = await asyncio.to_thread(served_model, config)
    settings = DispatcherConfig(
        block_tokens=config.kv.block_tokens, max_waiting=config.schedule.max_waiting
    )
    dispatcher = Dispatcher(rank_clients(directory), settings)
    dispatcher.start()
    async with asyncio.timeout(CONNECT_DEADLINE_S):
        await dispatcher.wait_ready()

    async def extra() -> str:
        try:
            return merge_expositions(await rank_metrics())
        except RayError as error:  # the ingress's own metrics are still worth a scrape
            log.warning("rank_metrics_failed error=%s", error)
            return ""

    app = build_app(dispatcher, tokenizer, model, config.http, extra=extra)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await dispatcher.close()

    app.router.lifespan_context = lifespan
    return app
