"""The FastAPI application. No Ray in here: a Serve deployment and a test build the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from actors.telemetry import CONTENT_TYPE, Telemetry, merge_expositions
from cluster.api.answers import json_response
from cluster.api.callers import Callers, CallersBackend
from cluster.api.chat import chat_completions
from cluster.api.classification import classify
from cluster.api.completions import completions
from cluster.api.errors import error_response, install_handlers, outcome_of
from cluster.api.keys import check_key
from cluster.api.openapi import openapi_document
from cluster.api.schemas import ServedModel
from cluster.api.scoring import score
from cluster.api.session import Backend, EventStream, Services, Session
from contracts import metrics
from contracts.clock import Clock, monotonic_s
from contracts.config import HttpConfig
from contracts.errors import (
    NotReadyError,
    TandemError,
    UnknownModelError,
)
from contracts.metrics import Outcome
from models.tokenizer import Tokenizer

Endpoint = Callable[[Services, Session, Request], Awaitable[Response]]
ExtraMetrics = Callable[[], Awaitable[str]]


def build_app(
    backend: Backend,
    tokenizer: Tokenizer,
    model: ServedModel,
    http: HttpConfig,
    *,
    telemetry: Telemetry | None = None,
    extra: ExtraMetrics | None = None,
    share_between_keys: bool = False,
    clock: Clock = monotonic_s,
) -> FastAPI:
    """The application in front of `backend`. extra: the ranks' metrics in Prometheus text format.
    share_between_keys: as in `KvConfig`.

    Starting and closing the backend is the caller's business.
    """
    services = Services(
        backend=backend,
        tokenizer=tokenizer,
        model=model,
        http=http,
        telemetry=telemetry or Telemetry(),
        clock=clock,
        extra=extra,
    )
    callers = Callers(http.api_keys, share_between_keys=share_between_keys)
    app = FastAPI(title="Tandem", openapi_url=None, redirect_slashes=False)
    install_handlers(app)
    for path, endpoint in (
        ("/v1/completions", completions),
        ("/v1/chat/completions", chat_completions),
        ("/v1/classify", classify),
        ("/v1/score", score),
    ):
        app.add_route(path, _counted(services, callers, endpoint), methods=["POST"])
    for path, plain in (
        ("/health", _health),
        ("/metrics", _metrics),
        ("/openapi.json", _openapi),
        ("/v1/models", _models),
        ("/v1/models/{name:path}", _one_model),
    ):
        app.add_route(path, _simple(services, plain), methods=["GET"])
    return app


def _counted(
    services: Services, callers: Callers, endpoint: Endpoint
) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint with keys checked, errors mapped, and its outcome counted once."""

    async def call(request: Request) -> Response:
        session = Session(services, request.receive)
        own = msgspec.structs.replace(services, backend=CallersBackend(services.backend, session))
        outcome = Outcome.ERROR
        try:
            session.caller = callers.caller(check_key(services.http, request))
            response = await endpoint(own, session, request)
            outcome = Outcome.OK
        except TandemError as error:
            outcome = outcome_of(error)
            response = error_response(error)
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE
            raise
        finally:
            if outcome is not Outcome.OK:
                session.finish(outcome)
        if not isinstance(response, EventStream):  # a stream counts itself when it ends
            session.finish(outcome)
        return response

    return call


def _simple(
    services: Services, endpoint: Callable[[Services, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        try:
            return await endpoint(services, request)
        except TandemError as error:
            return error_response(error)

    return call


async def _health(services: Services, request: Request) -> Response:
    """200 once every rank serves. Open to all: load balancers ask without a key."""
    problems = services.backend.problems()
    if problems:
        raise NotReadyError("; ".join(problems))
    return json_response({"status": "ok"})


async def _metrics(services: Services, request: Request) -> Response:
    for (pipeline, label), waiting in services.backend.waiting().items():
        services.telemetry.set(metrics.QUEUE_DEPTH, pipeline, label, to=waiting)
    texts = [services.telemetry.exposition()]
    if services.extra is not None:
        texts.append(await services.extra())
    return Response(merge_expositions(texts), headers={"Content-Type": CONTENT_TYPE})


async def _openapi(services: Services, request: Request) -> Response:
    """Open to all, as clients are generated from it."""
    return json_response(openapi_document(services.model, services.http))


async def _models(services: Services, request: Request) -> Response:
    check_key(services.http, request)
    return json_response({"object": "list", "data": [_model_card(services.model)]})


async def _one_model(services: Services, request: Request) -> Response:
    check_key(services.http, request)
    name = request.path_params["name"]
    if name != services.model.name:
        raise UnknownModelError(f"model {name!r} is not served", "model")
    return json_response(_model_card(services.model))


def _model_card(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "max_model_len": model.max_context_tokens,
    }
