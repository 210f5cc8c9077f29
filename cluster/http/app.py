"""The ASGI application. No Ray in here: a Serve deployment and a test build the same one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.telemetry.telemetry import Telemetry
from cluster.http import response_types
from cluster.http.admin import (
    PlainEndpoint,
    get_scale,
    load,
    metrics_of,
    start_scale,
    status_of,
    trace,
)
from cluster.http.authenticator import Authenticator
from cluster.http.chat import chat_completions
from cluster.http.classification import classify
from cluster.http.completions import completions
from cluster.http.cost import Bounds
from cluster.http.errors import bug_response, error_response, install_handlers, outcome_of
from cluster.http.memory_budget import MemoryBudget
from cluster.http.openapi import openapi_document
from cluster.http.request_context import (
    AppState,
    EventStream,
    FetchRankMetrics,
    FetchRankStatus,
    RequestContext,
    ScaleRanks,
    TraceSource,
)
from cluster.http.request_log import AccessLog, RequestLog
from cluster.http.responses import json_response
from cluster.http.schemas import ModelInfo
from cluster.http.scoring import score
from cluster.http.tokenization import detokenize, tokenize
from cluster.http.tokenizer_pool import TokenizerPool
from cluster.http.version import version
from cluster.routing.backend import Backend
from contracts.clock import Clock, monotonic_s
from contracts.config import HttpConfig, LimitsConfig
from contracts.errors import (
    NotReadyError,
    TandemError,
    UnknownModelError,
)
from contracts.logs import event
from contracts.metrics import RequestOutcome
from models.text.tokenizer import Tokenizer

log = logging.getLogger("tandem.ingress")

Endpoint = Callable[[AppState, RequestContext, Request], Awaitable[Response]]


def build_app(
    backend: Backend,
    tokenizer: Tokenizer,
    model: ModelInfo,
    http: HttpConfig,
    *,
    telemetry: Telemetry | None = None,
    rank_metrics: FetchRankMetrics | None = None,
    ranks: FetchRankStatus | None = None,
    tracing: TraceSource | None = None,
    scale: ScaleRanks | None = None,
    share_between_keys: bool = False,
    limits: LimitsConfig = LimitsConfig(),  # noqa: B008  (frozen)
    logs_prompts: bool = False,
    clock: Clock = monotonic_s,
) -> App:
    """The application in front of `backend`. extra: the ranks' metrics in Prometheus text format.
    ranks: what they say of themselves; tracing: what they have done; scale: how many there are to
    be. logs_prompts: as log.prompts.
    share_between_keys: as in `KvConfig`.

    Of http.keys_file nothing is read here: until its keys are taken nobody is let in
    (cluster/http/key_reloader.py). Starting and closing the backend is the caller's business.
    """
    app_state = AppState(
        backend=backend,
        tokenizer=tokenizer,
        tokenizer_pool=TokenizerPool(tokenizer, limits.tokenizing_threads),
        bounds=Bounds(
            context_tokens=model.max_context_tokens,
            token_characters=tokenizer.longest_token_characters,
            limits=limits,
        ),
        memory_budget=MemoryBudget(limits),
        model=model,
        http=http,
        authenticator=Authenticator(
            http.clients,
            http.metrics_key,
            needs_keys=http.has_keys,
            operator_key=http.operator_key,
            is_local=http.is_local,
            share_between_keys=share_between_keys,
            clock=clock,
        ),
        telemetry=telemetry or Telemetry(),
        clock=clock,
        rank_metrics=rank_metrics,
        ranks=ranks,
        trace=tracing,
        scale=scale,
        logs_prompts=logs_prompts,
    )
    return App(app_state)


class App(Starlette):
    """With the request log outside of what makes a 500 of our own bugs.

    pipelines: what has most of the requests, by path: they go there at once. Starlette's layers and
    its routes tried in turn take a tenth of a small request's time.
    """

    def __init__(self, app_state: AppState) -> None:
        super().__init__()
        self.app_state = app_state
        self.access_log = AccessLog() if app_state.http.access_log else None
        self.pipelines: dict[str, _MeteredEndpoint] = {}
        self.router.redirect_slashes = False
        self.state.memory_budget = app_state.memory_budget
        install_handlers(self)
        self._add_routes()

    async def drain(self, limit_s: float) -> int:
        """As `DrainController.drain`, of the requests under way."""
        return await self.app_state.drainer.drain(self.app_state.active_requests, limit_s)

    def close(self) -> None:
        """Writes what is not yet in the access log."""
        if self.access_log is not None:
            self.access_log.write()

    def _add_routes(self) -> None:
        for path, endpoint in (
            ("/v1/completions", completions),
            ("/v1/chat/completions", chat_completions),
            ("/v1/classify", classify),
            ("/v1/score", score),
            ("/tokenize", tokenize),
            ("/detokenize", detokenize),
        ):
            metered = self.pipelines[path] = _MeteredEndpoint(self.app_state, endpoint)
            self.router.routes.append(Route(path, metered, methods=["POST"]))  # else 405
        for path, plain in (
            ("/health", _health),
            ("/load", load),
            ("/metrics", metrics_of(self.app_state)),
            ("/status", status_of(self.app_state)),
            ("/trace", trace),
            ("/scale", get_scale),
            ("/openapi.json", _openapi),
            ("/version", _version),
            ("/v1/models", _models),
            ("/v1/models/{name:path}", _one_model),
        ):
            self.add_route(path, _simple(self.app_state, plain), methods=["GET"])
        self.add_route("/scale", _simple(self.app_state, start_scale), methods=["POST"])

    def build_middleware_stack(self) -> ASGIApp:
        others = super().build_middleware_stack()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST":
                path = scope["path"].removeprefix(scope.get("root_path", ""))
                await self.pipelines.get(path, others)(scope, receive, send)
            else:
                await others(scope, receive, send)

        return RequestLog(app, monotonic_s, self.access_log)


class ResponseAbortedError(Exception):
    """An answer that has begun cannot be ended. The log says why."""


class _MeteredEndpoint:
    """The endpoint with keys checked, errors mapped, and its outcome counted once. What its request
    holds is given back when the answer has gone out, or never will."""

    def __init__(self, app_state: AppState, endpoint: Endpoint) -> None:
        self._app_state = app_state
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        ctx = RequestContext(self._app_state, receive, scope["state"])
        try:
            response = await self._respond(ctx, request)
            response.headers.update(ctx.rate_limit_headers())
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - logged, with its traceback
            self._log_error("answer_failed", ctx, error)
            raise ResponseAbortedError from None  # the front logs that, and cuts the client off
        finally:
            ctx.account.close()

    def _log_error(self, name: str, ctx: RequestContext, error: Exception) -> None:
        """A bug of ours. Its message may quote the request."""
        kind = type(error).__name__
        fields = {"request_id": ctx.request_id, "error": kind}
        event(log, name, logging.ERROR, error, is_private=True, **fields)

    async def _respond(self, ctx: RequestContext, request: Request) -> Response:
        app_state, authenticator = self._app_state, self._app_state.authenticator
        outcome = RequestOutcome.ERROR
        try:
            key = authenticator.check(request)
            ctx.caller = authenticator.caller(key, ctx.request_id)
            app_state.drainer.check()
            ctx.admit(authenticator.quota(key))
            ctx.set_priority(authenticator.priority(key))
            ctx.is_priority_fixed = authenticator.has_fixed_priority(key)
            response = await self._endpoint(app_state, ctx, request)
            outcome = RequestOutcome.OK
        except TandemError as error:
            outcome = outcome_of(error)
            return error_response(error)
        except asyncio.CancelledError:
            outcome = RequestOutcome.CLIENT_GONE
            raise
        except Exception as error:  # noqa: BLE001 - logged, with its traceback
            self._log_error("request_failed", ctx, error)
            return await bug_response()
        finally:
            if outcome is not RequestOutcome.OK:
                ctx.finish(outcome)
                ctx.account.close()
        if not isinstance(response, EventStream):  # a stream counts itself when it ends
            ctx.finish(outcome)
        return response


def _simple(
    app_state: AppState, endpoint: PlainEndpoint
) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        try:
            return await endpoint(app_state, request)
        except TandemError as error:
            return error_response(error)

    return call


async def _health(app_state: AppState, request: Request) -> Response:
    """200 once every rank serves. Open to all: load balancers ask without a key."""
    app_state.drainer.check()
    problems = app_state.backend.problems()
    if problems:
        raise NotReadyError("; ".join(problems))
    return json_response(response_types.Health(status="ok"))


async def _version(app_state: AppState, request: Request) -> Response:
    return json_response(response_types.Version(version=version()))


async def _openapi(app_state: AppState, request: Request) -> Response:
    """Open to all, as clients are generated from it."""
    return json_response(openapi_document(app_state.model, app_state.http, app_state.bounds))


async def _models(app_state: AppState, request: Request) -> Response:
    app_state.authenticator.check(request)
    return json_response(
        response_types.ModelList(object="list", data=[_model_card(app_state.model)])
    )


async def _one_model(app_state: AppState, request: Request) -> Response:
    app_state.authenticator.check(request)
    name = request.path_params["name"]
    if name != app_state.model.name:
        raise UnknownModelError(f"model {name!r} is not served", "model")
    return json_response(_model_card(app_state.model))


def _model_card(model: ModelInfo) -> response_types.ModelCard:
    return response_types.ModelCard(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="tandem",
        max_model_len=model.max_context_tokens,
        expert_execution=model.expert_execution,
    )
