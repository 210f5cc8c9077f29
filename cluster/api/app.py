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
from cluster.api import answer_types
from cluster.api.answers import json_response
from cluster.api.callers import Callers
from cluster.api.chat import chat_completions
from cluster.api.classification import classify
from cluster.api.completions import completions
from cluster.api.cost import Bounds
from cluster.api.errors import bug_response, error_response, install_handlers, outcome_of
from cluster.api.open_requests import OpenRequests
from cluster.api.openapi import openapi_document
from cluster.api.request_log import AccessLog, RequestLog
from cluster.api.scaled import begin_scale, scaled
from cluster.api.schemas import ServedModel
from cluster.api.scoring import score
from cluster.api.session import (
    AskRanks,
    AskTrace,
    EventStream,
    ExtraMetrics,
    Scale,
    Services,
    Session,
)
from cluster.api.tokenizing import Tokenizing
from cluster.api.tokens import detokenize, tokenize
from cluster.api.traced import trace
from cluster.api.watched import Plain, load, metrics_of, status_of
from cluster.files.version import version
from cluster.routing.backend import Backend
from contracts.clock import Clock, monotonic_s
from contracts.config import HttpConfig, LimitsConfig
from contracts.errors import (
    NotReadyError,
    TandemError,
    UnknownModelError,
)
from contracts.logs import event
from contracts.metrics import Outcome
from models.text.tokenizer import Tokenizer

log = logging.getLogger("tandem.ingress")

Endpoint = Callable[[Services, Session, Request], Awaitable[Response]]


def build_app(
    backend: Backend,
    tokenizer: Tokenizer,
    model: ServedModel,
    http: HttpConfig,
    *,
    telemetry: Telemetry | None = None,
    extra: ExtraMetrics | None = None,
    ranks: AskRanks | None = None,
    tracing: AskTrace | None = None,
    scale: Scale | None = None,
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
    (cluster/api/keys_follower.py). Starting and closing the backend is the caller's business.
    """
    services = Services(
        backend=backend,
        tokenizer=tokenizer,
        tokenizing=Tokenizing(tokenizer, limits.tokenizing_threads),
        bounds=Bounds(
            context_tokens=model.max_context_tokens,
            token_characters=tokenizer.longest_token_characters,
            limits=limits,
        ),
        open_requests=OpenRequests(limits),
        model=model,
        http=http,
        callers=Callers(
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
        extra=extra,
        ranks=ranks,
        trace=tracing,
        scale=scale,
        logs_prompts=logs_prompts,
    )
    return App(services)


class App(Starlette):
    """With the request log outside of what makes a 500 of our own bugs.

    pipelines: what has most of the requests, by path: they go there at once. Starlette's layers and
    its routes tried in turn take a tenth of a small request's time.
    """

    def __init__(self, services: Services) -> None:
        super().__init__()
        self.services = services
        self.access_log = AccessLog() if services.http.access_log else None
        self.pipelines: dict[str, _Counted] = {}
        self.router.redirect_slashes = False
        self.state.open_requests = services.open_requests
        install_handlers(self)
        self._add_routes()

    async def drain(self, limit_s: float) -> int:
        """As `Ending.drain`, of the requests under way."""
        return await self.services.ending.drain(self.services.sessions, limit_s)

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
            counted = self.pipelines[path] = _Counted(self.services, endpoint)
            self.router.routes.append(Route(path, counted, methods=["POST"]))  # else 405
        for path, plain in (
            ("/health", _health),
            ("/load", load),
            ("/metrics", metrics_of(self.services)),
            ("/status", status_of(self.services)),
            ("/trace", trace),
            ("/scale", scaled),
            ("/openapi.json", _openapi),
            ("/version", _version),
            ("/v1/models", _models),
            ("/v1/models/{name:path}", _one_model),
        ):
            self.add_route(path, _simple(self.services, plain), methods=["GET"])
        self.add_route("/scale", _simple(self.services, begin_scale), methods=["POST"])

    def build_middleware_stack(self) -> ASGIApp:
        others = super().build_middleware_stack()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST":
                path = scope["path"].removeprefix(scope.get("root_path", ""))
                await self.pipelines.get(path, others)(scope, receive, send)
            else:
                await others(scope, receive, send)

        return RequestLog(app, monotonic_s, self.access_log)


class AnswerBrokenError(Exception):
    """An answer that has begun cannot be ended. The log says why."""


class _Counted:
    """The endpoint with keys checked, errors mapped, and its outcome counted once. What its request
    holds is given back when the answer has gone out, or never will."""

    def __init__(self, services: Services, endpoint: Endpoint) -> None:
        self._services = services
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        session = Session(self._services, receive, scope["state"])
        try:
            response = await self._respond(session, request)
            response.headers.update(session.limits_left())
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - logged, with its traceback
            self._tell("answer_failed", session, error)
            raise AnswerBrokenError from None  # the front logs that, and cuts the client off
        finally:
            session.account.close()

    def _tell(self, name: str, session: Session, error: Exception) -> None:
        """A bug of ours. Its message may quote the request."""
        kind = type(error).__name__
        told = {"request_id": session.request_id, "error": kind}
        event(log, name, logging.ERROR, error, is_private=True, **told)

    async def _respond(self, session: Session, request: Request) -> Response:
        services, callers = self._services, self._services.callers
        outcome = Outcome.ERROR
        try:
            key = callers.check(request)
            session.caller = callers.caller(key, session.request_id)
            services.ending.check()
            session.begin(callers.allowance(key))
            session.set_priority(callers.priority(key))
            session.is_priority_fixed = callers.has_fixed_priority(key)
            response = await self._endpoint(services, session, request)
            outcome = Outcome.OK
        except TandemError as error:
            outcome = outcome_of(error)
            return error_response(error)
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE
            raise
        except Exception as error:  # noqa: BLE001 - logged, with its traceback
            self._tell("request_failed", session, error)
            return await bug_response()
        finally:
            if outcome is not Outcome.OK:
                session.finish(outcome)
                session.account.close()
        if not isinstance(response, EventStream):  # a stream counts itself when it ends
            session.finish(outcome)
        return response


def _simple(services: Services, endpoint: Plain) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        try:
            return await endpoint(services, request)
        except TandemError as error:
            return error_response(error)

    return call


async def _health(services: Services, request: Request) -> Response:
    """200 once every rank serves. Open to all: load balancers ask without a key."""
    services.ending.check()
    problems = services.backend.problems()
    if problems:
        raise NotReadyError("; ".join(problems))
    return json_response(answer_types.Health(status="ok"))


async def _version(services: Services, request: Request) -> Response:
    return json_response(answer_types.Version(version=version()))


async def _openapi(services: Services, request: Request) -> Response:
    """Open to all, as clients are generated from it."""
    return json_response(openapi_document(services.model, services.http, services.bounds))


async def _models(services: Services, request: Request) -> Response:
    services.callers.check(request)
    return json_response(answer_types.ModelList(object="list", data=[_model_card(services.model)]))


async def _one_model(services: Services, request: Request) -> Response:
    services.callers.check(request)
    name = request.path_params["name"]
    if name != services.model.name:
        raise UnknownModelError(f"model {name!r} is not served", "model")
    return json_response(_model_card(services.model))


def _model_card(model: ServedModel) -> answer_types.ModelCard:
    return answer_types.ModelCard(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="tandem",
        max_model_len=model.max_context_tokens,
        expert_execution=model.expert_execution,
    )
