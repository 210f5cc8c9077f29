"""The OpenAPI document at /openapi.json: what this server accepts and answers.

Built for one model and configuration, so that names, vocabulary and limits in it are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from cluster.http import response_types as answers
from cluster.http import schemas
from cluster.http.cost import Bounds
from cluster.http.errors import (
    ROUTING_CODES,
    BodyTimeoutError,
    BodyTooLargeError,
    HeadersTooLargeError,
    HeadersTooSlowError,
    MalformedHttpError,
    MediaTypeError,
    TargetTooLongError,
    TooManyConnectionsError,
    UnknownFieldError,
    UnsupportedFieldError,
)
from cluster.http.field_bounds import Schema
from cluster.http.openapi_bounds import (
    bound_texts,
    bound_together,
    bounded,
    request_bounds,
)
from cluster.http.quotas import RateLimitError
from cluster.http.schemas import ModelInfo
from contracts import errors
from contracts.config import HttpConfig
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import MAX_TRACE_S

VERSION = "3.1.0"
_JSON = "application/json"
_REF = "#/components/schemas/{name}"

# Not in here: ClientGoneError, which nobody is left to read.
ERRORS: tuple[type[errors.TandemError], ...] = (
    errors.RequestError,
    UnsupportedFieldError,
    UnknownFieldError,
    errors.UnauthorizedError,
    errors.ForbiddenError,
    errors.UnknownModelError,
    errors.TooLongError,
    errors.TooCostlyError,
    BodyTooLargeError,
    BodyTimeoutError,
    MediaTypeError,
    MalformedHttpError,
    HeadersTooSlowError,
    TargetTooLongError,
    HeadersTooLargeError,
    errors.OverloadError,
    RateLimitError,
    errors.TandemError,
    errors.NotReadyError,
    TooManyConnectionsError,
    errors.ChannelError,
    errors.PeerError,
    errors.PeerDeadError,
    errors.PeerHungError,
    errors.RequestTimeoutError,
)
_RANK_CODES = {500: ("bad_score", "no_answer")}  # of RankError, which has no code of its own
_FRONT_STATUSES = (400, 408, 414, 431, 503)  # before a request is one: of every route
_POST_STATUSES = (401, 403, 404, 413, 415, 429, 500, 504)


def openapi_document(model: ModelInfo, http: HttpConfig, costs: Bounds | None = None) -> Schema:
    """costs: what a request may cost, told as maxLength of texts and as `x-limits`."""
    shapes = [
        *(schemas.CompletionBody, schemas.ChatBody, schemas.ClassifyBody, schemas.ScoreBody),
        *(answers.Completion, answers.CompletionChunk),
        *(answers.ChatCompletion, answers.ChatCompletionChunk),
        *(answers.Classification, answers.Scoring),
        *(schemas.TokenizeBody, schemas.DetokenizeBody),
        *(answers.Tokenized, answers.Detokenized),
        *(ScaleTarget, ScaleState),
        *(answers.ModelList, answers.Health, answers.Version, answers.ServerLoad, answers.Status),
        answers.ErrorResponse,
    ]
    _, components = msgspec.json.schema_components(shapes, ref_template=_REF)
    bounded(components, request_bounds(model, http))
    if costs is not None:
        bound_texts(components, costs)
    bound_together(components, model, http)
    may_have_one = http.metrics_key is not None or http.keys_file is not None
    given = {
        "key": http.has_keys,
        "metrics_key": may_have_one,
        "operator_key": http.operator_key is not None,
    }
    document: Schema = {
        "openapi": VERSION,
        "info": {
            "title": "Tandem",
            "version": "1",
            "description": "Mixture-of-Experts serving: generation, classification, scoring.",
        },
        "paths": {
            **_paths(given["key"], metrics_key=given["metrics_key"]),
            "/scale": _scale_paths(http),
        },
        "components": {"schemas": components, "responses": _error_responses()},
    }
    if costs is not None:
        document["info"]["x-limits"] = {
            "description": "Beyond these a request is a 413, or a 429 where others hold too much.",
            **costs.as_dict(),
        }
    bearer = {"type": "http", "scheme": "bearer"}
    if any(given.values()):
        schemes = {name: bearer for name, is_given in given.items() if is_given}
        document["components"]["securitySchemes"] = schemes
    if http.root_path:
        document["servers"] = [{"url": http.root_path}]
    return document


def _paths(keys: bool, *, metrics_key: bool) -> Schema:
    posts = (
        ("/v1/completions", "Continue prompts", schemas.CompletionBody, answers.Completion),
        ("/v1/chat/completions", "Answer a conversation", schemas.ChatBody, answers.ChatCompletion),
        ("/v1/classify", "Which label fits", schemas.ClassifyBody, answers.Classification),
        ("/v1/score", "How likely tokens come next", schemas.ScoreBody, answers.Scoring),
        ("/tokenize", "Text to tokens", schemas.TokenizeBody, answers.Tokenized),
        ("/detokenize", "Tokens to text", schemas.DetokenizeBody, answers.Detokenized),
    )
    chunks: dict[type, type] = {
        answers.Completion: answers.CompletionChunk,
        answers.ChatCompletion: answers.ChatCompletionChunk,
    }
    paths: Schema = {}
    for path, summary, body, answer in posts:
        operation = _operation(summary, _answered(answer, chunks.get(answer)), _POST_STATUSES, keys)
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(body)}}}
        paths[path] = {"post": operation}
    return {**paths, **_plain_paths(keys), **_server_paths(metrics_key)}


def _plain_paths(keys: bool) -> Schema:
    listed, card = _answered(answers.ModelList, None), _answered(answers.ModelCard, None)
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "description": "May contain slashes.",
        "schema": {"type": "string", "minLength": 1},
    }
    one = {**_operation("One model", card, (401, 404, 500), keys), "parameters": [name]}
    document = {
        "description": "This document",
        "content": {_JSON: {"schema": {"type": "object"}}},
    }
    return {
        "/v1/models": {"get": _operation("Models", listed, (401, 500), keys)},
        "/v1/models/{name}": {"get": one},
        "/openapi.json": {"get": _operation("OpenAPI", document, (500,), False)},
    }


def _server_paths(metrics_key: bool) -> Schema:
    health, version = _answered(answers.Health, None), _answered(answers.Version, None)
    load, status = _answered(answers.ServerLoad, None), _answered(answers.Status, None)
    text = {
        "description": "Metrics in Prometheus text format",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    return {
        "/health": {"get": _operation("Does every rank serve?", health, (500, 503), False)},
        "/version": {"get": _operation("Version", version, (500,), False)},
        "/load": {"get": _monitored_operation("What runs and waits", load, metrics_key)},
        "/status": {
            "get": _monitored_operation("What each rank says of itself", status, metrics_key)
        },
        "/metrics": {"get": _monitored_operation("Metrics", text, metrics_key)},
        "/trace": {"get": _trace_path(metrics_key)},
    }


def _trace_path(metrics_key: bool) -> Schema:
    file = {
        "description": "Chrome trace events, for Perfetto",
        "content": {_JSON: {"schema": {"type": "object"}}},
    }
    seconds = {
        "name": "seconds",
        "in": "query",
        "required": False,
        "description": "0: how far clocks are apart, and nothing else.",
        "schema": {"type": "number", "minimum": 0, "maximum": MAX_TRACE_S, "default": 5},
    }
    summary = "What every process does in the next seconds"
    statuses = (400, 401, 429, 500, 503)
    operation = _operation(summary, file, statuses, metrics_key, "metrics_key")
    return {**operation, "parameters": [seconds]}


def _scale_paths(http: HttpConfig) -> Schema:
    """Without a key of its own it is open to some only, or to nobody."""
    answer, refuses = _answered(ScaleState, None), http.has_keys or not http.is_local
    is_keyed, scheme = http.operator_key is not None, "operator_key"
    shown = _operation(
        "The last change of the number of ranks", answer, (401, 500), is_keyed or refuses, scheme
    )
    statuses = (400, 401, 408, 413, 415, 429, 500)
    change = _operation("Change the number of ranks", answer, statuses, is_keyed or refuses, scheme)
    change["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(ScaleTarget)}}}
    if not is_keyed:
        for operation in (shown, change):
            operation.pop("security", None)
    return {"get": shown, "post": change}


def _monitored_operation(summary: str, answer: Schema, metrics_key: bool) -> Schema:
    return _operation(summary, answer, (401, 500), metrics_key, "metrics_key")


def _operation(
    summary: str, answer: Schema, statuses: Iterable[int], keys: bool, scheme: str = "key"
) -> Schema:
    """405 is not listed: it is never the answer to an operation that is."""
    responses = {"200": answer}
    for status in sorted({*_FRONT_STATUSES, *statuses}):
        if keys or status != 401:
            responses[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    security: Schema = {"security": [{scheme: []}]} if keys else {}
    return {"summary": summary, "responses": responses, **security}


def _answered(answer: type, chunk: type | None) -> Schema:
    description = (answer.__doc__ or "").strip()
    content: Schema = {_JSON: {"schema": _ref(answer)}}
    if chunk is not None:
        description += (
            f" With stream=true it is server-sent events: each `data:` holds a {chunk.__name__} as"
            " JSON, the last one is `data: [DONE]`. What fails once the stream began is one more"
            " event, with an ErrorResponse."
        )
        content["text/event-stream"] = {"x-event-data": _ref(chunk)}
    return {"description": description, "content": content}


def _error_responses() -> Schema:
    """Per status, the error body with the codes that it comes with."""
    responses: Schema = {}
    for status, codes in sorted(_codes().items()):
        known = {"properties": {"error": {"properties": {"code": {"enum": codes}}}}}
        schema = {"allOf": [_ref(answers.ErrorResponse), known]}
        responses[f"Error{status}"] = {
            "description": HTTPStatus(status).phrase,
            "headers": _headers(status),
            "content": {_JSON: {"schema": schema}},
        }
    return responses


def _codes() -> dict[int, list[str]]:
    codes: dict[int, list[str]] = {}
    for error in ERRORS:
        codes.setdefault(error.status, []).append(error.code)
    for status, code in ROUTING_CODES.items():
        codes.setdefault(status, []).append(code)
    for status, more in _RANK_CODES.items():
        codes.setdefault(status, []).extend(more)
    return codes


def _headers(status: int) -> dict[str, Any]:
    if status == errors.OverloadError.status:
        return {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "s"}}
    if status == errors.UnauthorizedError.status:
        return {"WWW-Authenticate": {"schema": {"const": "Bearer"}}}
    return {}


def _ref(shape: type) -> Schema:
    return {"$ref": _REF.format(name=shape.__name__)}
