"""The ASGI application. It does not use Ray: a Serve deployment and a test build the same one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
from cluster.http.batch_types import BatchCall
from cluster.http.batches import create_batch, file_content, on_owned, page_query, upload_file
from cluster.http.chat import chat_completions, detokenize, tokenize
from cluster.http.classification import classify, score
from cluster.http.completions import completions
from cluster.http.cost import Bounds, MemoryBudget
from cluster.http.errors import bug_response, error_response, install_handlers, outcome_of
from cluster.http.grammar_compiler import GrammarCompiler
from cluster.http.openapi import openapi_document
from cluster.http.request_context import (
    REQUEST_ID,
    REQUEST_ID_HEADER,
    AccessLog,
    AppState,
    LauncherApi,
    RequestContext,
    RequestLog,
    start_request_metrics,
)
from cluster.http.responses import EventStream, json_response
from cluster.http.schemas import ModelInfo
from cluster.http.spans import TRACE, RequestTracer
from cluster.http.text import TokenizerPool
from cluster.routing.pipeline_backend import Backend
from contracts.config import HttpConfig, TandemConfig
from contracts.errors import NotReadyError, TandemError, UnknownModelError
from contracts.import_path import version
from contracts.logs import event
from contracts.metrics import RequestOutcome
from models.text.tokenizer import Tokenizer

_SLASHES = re.compile("/{2,}")

log = logging.getLogger("tandem.ingress")

Endpoint = Callable[[AppState, RequestContext, Request], Awaitable[Response]]


def build_app(
    backend: Backend,
    tokenizer: Tokenizer,
    model: ModelInfo,
    config: TandemConfig,
    *,
    telemetry: Telemetry | None = None,
    launcher: LauncherApi | None = None,
    batches: BatchCall | None = None,
    tracer: RequestTracer | None = None,
) -> App:
    """Return the application in front of `backend`.

    launcher: None: endpoints that need it answer 503, or omit its part.
    batches: keeper of files and batches; None: 503.
    tracer: source of OpenTelemetry spans; the application closes it.

    With http.keys_file, all requests are rejected until the keys are loaded (`ApiKeyReloader`). The
    caller starts and closes the backend.
    """
    http, limits = config.http, config.limits
    app_state = AppState(
        backend=backend,
        tokenizer=tokenizer,
        tokenizer_pool=TokenizerPool(limits.tokenizing_threads),
        grammars=GrammarCompiler(tokenizer, model.eos_token_ids),
        bounds=Bounds(
            context_tokens=model.max_context_tokens,
            token_characters=tokenizer.longest_token_characters,
            limits=limits,
        ),
        memory_budget=MemoryBudget(limits),
        model=model,
        config=config,
        authenticator=Authenticator(http, share_between_keys=config.kv.share_between_keys),
        telemetry=telemetry or Telemetry(),
        launcher=launcher,
        tracer=tracer,
        batches=batches,
    )
    return App(app_state)


class App(Starlette):
    """Starlette application with the request log outside of its error handling.

    pipelines: endpoints that bypass Starlette's layers and routes, which take a tenth of the time
    of a small request.
    """

    def __init__(self, app_state: AppState) -> None:
        super().__init__()
        self.app_state = app_state
        start_request_metrics(app_state.telemetry)
        self.access_log = AccessLog() if app_state.http.access_log else None
        self.pipelines: dict[str, _MeteredEndpoint] = {}
        self.router.redirect_slashes = False
        install_handlers(self)
        self._add_routes()

    async def drain(self, limit_s: float) -> int:
        return await self.app_state.drainer.drain(self.app_state.active_requests, limit_s)

    def close(self) -> None:
        """Flush the access log and end the process that compiles grammars."""
        self.app_state.grammars.close()
        if self.app_state.tracer is not None:
            self.app_state.tracer.close()
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
            metered = _MeteredEndpoint(self.app_state, endpoint, path)
            self.pipelines[path] = metered
            self.router.routes.append(Route(path, metered, methods=["POST"]))  # other methods: 405
        for method, path, plain in (
            ("GET", "/health", _health),
            ("GET", "/load", load),
            ("GET", "/metrics", metrics_of(self.app_state)),
            ("GET", "/status", status_of(self.app_state)),
            ("GET", "/trace", trace),
            ("GET", "/scale", get_scale),
            ("POST", "/scale", start_scale),
            ("GET", "/openapi.json", _openapi),
            ("GET", "/version", _version),
            ("GET", "/v1/models", _models),
            ("GET", "/v1/models/{name:path}", _one_model),
            ("GET", "/v1/files", on_owned("list_files", page_query)),
            ("POST", "/v1/files", upload_file),
            ("GET", "/v1/files/{id}", on_owned("get_file")),
            ("DELETE", "/v1/files/{id}", on_owned("delete_file")),
            ("GET", "/v1/files/{id}/content", file_content),
            ("GET", "/v1/batches", on_owned("list_batches", page_query)),
            ("POST", "/v1/batches", create_batch),
            ("GET", "/v1/batches/{id}", on_owned("get_batch")),
            ("POST", "/v1/batches/{id}/cancel", on_owned("cancel_batch")),
        ):
            self.add_route(path, _simple(self.app_state, plain), methods=[method])

    def build_middleware_stack(self) -> ASGIApp:
        others = super().build_middleware_stack()
        http = self.app_state.http

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            if "/v1/" in path and ("//" in path or path.endswith("/")):
                scope = {**scope, "path": _SLASHES.sub("/", path).rstrip("/")}
            if scope["type"] == "http" and scope["method"] == "POST":
                path = scope["path"].removeprefix(scope.get("root_path", ""))
                await self.pipelines.get(path, others)(scope, receive, send)
            else:
                await others(scope, receive, send)

        shown = _for_browsers(app, http) if http.allowed_origins else app
        return RequestLog(shown, http, self.access_log)


def _for_browsers(app: ASGIApp, http: HttpConfig) -> ASGIApp:
    """Return the application with CORS for model requests; others are not for browsers."""
    shown = [REQUEST_ID_HEADER.decode(), "retry-after"]
    cors = CORSMiddleware(app, http.allowed_origins, ("*",), ("*",), expose_headers=shown)

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        is_model_request = path.startswith(("/v1/", "/tokenize", "/detokenize"))
        await (cors if is_model_request else app)(scope, receive, send)

    return call


class ResponseAbortedError(Exception):
    """A started answer cannot be completed. The log has the reason."""


class _MeteredEndpoint:
    """An endpoint with checked keys, mapped errors, counted outcomes and released memory.

    With a tracer, its requests are spans.
    """

    def __init__(self, app_state: AppState, endpoint: Endpoint, path: str) -> None:
        self._app_state = app_state
        self._endpoint, self._path = endpoint, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app_state.tracer is None:
            await self._answer(scope, receive, send)
            return
        with self._app_state.tracer.request(
            scope, self._path, scope["state"].get(REQUEST_ID, "")
        ) as trace:

            async def send_on(message: Message) -> None:
                if trace is not None and message["type"] == "http.response.start":
                    trace.status = message["status"]
                await send(message)

            scope["state"][TRACE] = trace
            await self._answer(scope, receive, send_on)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        ctx = RequestContext(self._app_state, receive, scope["state"])
        try:
            response = await self._respond(ctx, request)
            response.headers.update(ctx.rate_limit_headers())
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - logged, with its traceback
            self._log_error("answer_failed", ctx, error)
            raise ResponseAbortedError from None  # the server closes the connection
        finally:
            ctx.account.close()

    def _log_error(self, name: str, ctx: RequestContext, error: Exception) -> None:
        """Log an internal error. Its message is private: it may quote the request."""
        kind = type(error).__name__
        fields = {"request_id": ctx.request_id, "error": kind}
        event(log, name, logging.ERROR, error, is_private=True, **fields)

    async def _respond(self, ctx: RequestContext, request: Request) -> Response:
        app_state = self._app_state
        outcome = RequestOutcome.ERROR
        try:
            ctx.authorize(request)
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
        if not isinstance(response, EventStream):  # a stream is counted when it ends
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
    """Answer 200 once every rank serves. Needs no key: load balancers have none."""
    app_state.drainer.check()
    problems = app_state.backend.problems()
    if problems:
        raise NotReadyError("; ".join(problems))
    return json_response(response_types.Health(status="ok"))


async def _version(app_state: AppState, request: Request) -> Response:
    return json_response(response_types.Version(version=version()))


async def _openapi(app_state: AppState, request: Request) -> Response:
    """Answer with the document. Needs no key: clients are generated from it."""
    document = openapi_document(app_state.model, app_state.http, app_state.bounds)
    if prefix := request.scope.get("root_path"):  # http.root_path, or the route_prefix of Serve
        document["servers"] = [{"url": prefix}]
    return json_response(document)


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
        colocated=model.colocated,
        colocated_gain=model.colocated_gain,
    )
