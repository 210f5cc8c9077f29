"""The OpenAPI document at /openapi.json, for one model and configuration.

Types and bounds of fields come from the structs in `schemas.py` and `response_types.py`.
"""

from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from cluster.http import batch_types as batches
from cluster.http import response_types as answers
from cluster.http import schemas
from cluster.http.authenticator import RateLimitError
from cluster.http.cost import Bounds
from cluster.http.errors import (
    ROUTING_CODES,
    BodyTimeoutError,
    BodyTooLargeError,
    ConflictError,
    HeadersTooLargeError,
    HeadersTooSlowError,
    MalformedHttpError,
    MediaTypeError,
    StorageError,
    TargetTooLongError,
    TooManyConnectionsError,
    UnknownFieldError,
    UnknownObjectError,
    UnsupportedFieldError,
)
from cluster.http.schemas import MAX_N, ModelInfo, Schema
from contracts import errors
from contracts.config import HttpConfig
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import MAX_TRACE_S

VERSION = "3.1.0"
_JSON = "application/json"
_REF = "#/components/schemas/{name}"

# ClientGoneError is missing: no client receives it.
ERRORS: tuple[type[errors.TandemError], ...] = (
    *(errors.RequestError, UnsupportedFieldError, UnknownFieldError, errors.UnauthorizedError),
    *(errors.ForbiddenError, errors.UnknownModelError, errors.TooLongError, errors.TooCostlyError),
    *(BodyTooLargeError, BodyTimeoutError, MediaTypeError, MalformedHttpError),
    *(HeadersTooSlowError, TargetTooLongError, HeadersTooLargeError, errors.OverloadError),
    *(UnknownObjectError, ConflictError, StorageError),
    *(RateLimitError, errors.TandemError, errors.NotReadyError, TooManyConnectionsError),
    *(errors.ChannelError, errors.PeerError, errors.PeerDeadError, errors.PeerHungError),
    errors.RequestTimeoutError,
)
_RANK_CODES = {500: ("bad_score", "no_answer")}  # of RankError, which takes its code from the rank
_FRONT_STATUSES = (400, 408, 414, 431, 503)  # of every route, before a request is complete
_POST_STATUSES = (401, 403, 404, 413, 415, 429, 500, 504)
_OBJECT: Schema = {_JSON: {"schema": {"type": "object"}}}
_CHUNKS: dict[type, type] = {
    answers.Completion: answers.CompletionChunk,
    answers.ChatCompletion: answers.ChatCompletionChunk,
}


class _Operation(NamedTuple):
    """A method of a path. scheme: the key that it requires, if configured."""

    method: str
    path: str
    summary: str
    answer: type | Schema
    statuses: tuple[int, ...] = _POST_STATUSES
    scheme: str = "key"
    body: type | Schema | None = None
    parameters: tuple[Schema, ...] = ()


_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_MODEL_NAME = {**_ID, "name": "name", "description": "May contain slashes."}
_TRACE_SECONDS = {
    "name": "seconds",
    "in": "query",
    "required": False,
    "description": "0: only the offsets between clocks.",
    "schema": {"type": "number", "minimum": 0, "maximum": MAX_TRACE_S, "default": 5},
}
_TEXT = {
    "description": "Metrics in Prometheus text format",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
_CONTENT = {
    "description": "The content",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
_TRACE = {"description": "Chrome trace events, for Perfetto", "content": _OBJECT}
_DOCUMENT = {"description": "This document", "content": _OBJECT}
_UPLOAD: Schema = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"const": "batch"},
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": {"type": "integer", "minimum": 3600},
            },
            "required": ["file", "purpose"],
        }
    }
}
_PAGE = tuple(
    {"name": name, "in": "query", "required": False, "schema": schema}
    for name, schema in msgspec.json.schema_components([batches.PageQuery])[1]["PageQuery"][
        "properties"
    ].items()
)
_STORED = (400, 401, 404, 500, 503, 507)
_CREATED = (*_STORED, 408, 413, 415, 429)
_get, _post = partial(_Operation, "get"), partial(_Operation, "post")
_OPERATIONS: tuple[_Operation, ...] = (
    _post("/v1/completions", "Continue prompts", answers.Completion, body=schemas.CompletionBody),
    _post(
        *("/v1/chat/completions", "Answer a conversation", answers.ChatCompletion),
        body=schemas.ChatBody,
    ),
    _post("/v1/classify", "Classify texts", answers.Classification, body=schemas.ClassifyBody),
    _post("/v1/score", "Score tokens that may come next", answers.Scoring, body=schemas.ScoreBody),
    _post("/tokenize", "Text to tokens", answers.Tokenized, body=schemas.TokenizeBody),
    _post("/detokenize", "Tokens to text", answers.Detokenized, body=schemas.DetokenizeBody),
    _get("/v1/models", "Models", answers.ModelList, (401, 500)),
    _get(
        *("/v1/models/{name}", "One model", answers.ModelCard, (401, 404, 500)),
        parameters=(_MODEL_NAME,),
    ),
    _get("/openapi.json", "OpenAPI", _DOCUMENT, (500,), ""),
    _get("/health", "Readiness of every rank", answers.Health, (500, 503), ""),
    _get("/version", "Version", answers.Version, (500,), ""),
    _get("/load", "Running and waiting requests", answers.ServerLoad, (401, 500), "metrics_key"),
    _get("/status", "State of every rank", answers.Status, (401, 500), "metrics_key"),
    _get("/metrics", "Metrics", _TEXT, (401, 500), "metrics_key"),
    _get(
        *("/trace", "Trace of every process over the next seconds", _TRACE),
        *((400, 401, 429, 500, 503), "metrics_key"),
        parameters=(_TRACE_SECONDS,),
    ),
    _get(
        *("/scale", "The last change of the number of ranks", ScaleState),
        *((401, 500), "operator_key"),
    ),
    _post(
        *("/scale", "Change the number of ranks", ScaleState),
        *((400, 401, 408, 413, 415, 429, 500), "operator_key", ScaleTarget),
    ),
    _get("/v1/files", "Files", batches.FileList, _STORED, parameters=_PAGE),
    _post(
        *("/v1/files", "Upload a file of requests", batches.FileObject, (*_CREATED, 409)),
        body=_UPLOAD,
    ),
    _get("/v1/files/{id}", "One file", batches.FileObject, _STORED, parameters=(_ID,)),
    _Operation(
        *("delete", "/v1/files/{id}", "Delete a file", batches.DeletedFile, (*_STORED, 409)),
        parameters=(_ID,),
    ),
    _get("/v1/files/{id}/content", "The content of a file", _CONTENT, _STORED, parameters=(_ID,)),
    _get("/v1/batches", "Batches", batches.BatchList, _STORED, parameters=_PAGE),
    _post(
        *("/v1/batches", "Answer the requests of a file", batches.BatchObject, _CREATED),
        body=batches.BatchBody,
    ),
    _get("/v1/batches/{id}", "One batch", batches.BatchObject, _STORED, parameters=(_ID,)),
    _post(
        *("/v1/batches/{id}/cancel", "Cancel a batch", batches.BatchObject, (*_STORED, 409)),
        parameters=(_ID,),
    ),
)


def openapi_document(model: ModelInfo, http: HttpConfig, costs: Bounds | None = None) -> Schema:
    """Return the document. costs: cost limits, shown as maxLength of texts and as `x-limits`."""
    keys = {
        "key": http.has_keys,
        "metrics_key": http.metrics_key is not None or http.keys_file is not None,
        "operator_key": http.operator_key is not None,
    }
    schemes = {name: {"type": "http", "scheme": "bearer"} for name, used in keys.items() if used}
    refusing = {*schemes}
    if http.has_keys or not http.is_local:
        refusing.add("operator_key")  # without such a key /scale is closed
    paths: dict[str, Schema] = {}
    for operation in _OPERATIONS:
        rendered = _rendered(operation, schemes, refusing)
        paths.setdefault(operation.path, {})[operation.method] = rendered
    document: Schema = {
        "openapi": VERSION,
        "info": {
            "title": "Tandem",
            "version": "1",
            "description": "Mixture-of-Experts serving: generation, classification, scoring.",
        },
        "paths": paths,
        "components": {
            "schemas": _components(model, http, costs),
            "responses": _error_responses(),
        },
    }
    if costs is not None:
        document["info"]["x-limits"] = {
            "description": "413 beyond these; 429 if other requests hold the memory.",
            **costs.as_dict(),
        }
    if schemes:
        document["components"]["securitySchemes"] = schemes
    return document


def _components(model: ModelInfo, http: HttpConfig, costs: Bounds | None) -> dict[str, Schema]:
    shapes: list[Any] = [*_CHUNKS.values(), answers.ErrorResponse]
    for operation in _OPERATIONS:
        shapes += [x for x in (operation.body, operation.answer) if isinstance(x, type)]
    _, components = msgspec.json.schema_components(shapes, ref_template=_REF)
    _apply_deployment(components, model, http)
    _apply_combinations(components)
    if costs is not None:  # a text that cannot fit the context is rejected before it is tokenized
        for struct, name in (("CompletionBody", "prompt"), ("ClassifyBody", "input")):
            most = {"maxLength": costs.prompt_characters}
            _restrict(components[struct]["properties"][name], "string", most)
    return components


def _rendered(operation: _Operation, schemes: Schema, refusing: set[str]) -> Schema:
    """Return an operation object. 405 is missing: a documented operation never answers with it."""
    answer = operation.answer
    result: Schema = {
        "summary": operation.summary,
        "responses": {"200": _answered(answer) if isinstance(answer, type) else answer},
    }
    for status in sorted({*_FRONT_STATUSES, *operation.statuses}):
        if status != 401 or operation.scheme in refusing:
            result["responses"][str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    if operation.scheme in schemes:
        result["security"] = [{operation.scheme: []}]
    if operation.body is not None:
        body = operation.body
        content = {_JSON: {"schema": _ref(body)}} if isinstance(body, type) else body
        result["requestBody"] = {"required": True, "content": content}
    if operation.parameters:
        result["parameters"] = list(operation.parameters)
    return result


def _answered(answer: type) -> Schema:
    description = (answer.__doc__ or "").strip()
    content: Schema = {_JSON: {"schema": _ref(answer)}}
    if chunk := _CHUNKS.get(answer):
        description += (
            f" With stream=true the answer is server-sent events: each `data:` holds a"
            f" {chunk.__name__} as JSON, the last one is `data: [DONE]`. A failure after the first"
            " event is one more event with an ErrorResponse."
        )
        content["text/event-stream"] = {"x-event-data": _ref(chunk)}
    return {"description": description, "content": content}


def _error_responses() -> Schema:
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


def _apply_deployment(components: dict[str, Schema], model: ModelInfo, http: HttpConfig) -> None:
    """Add the bounds that depend on the model and the configuration, in place."""
    context, limit = model.max_context_tokens, min(MAX_N, http.max_batch_items)
    ids, least_one = _token_ids(model), {"minItems": 1}
    several = {"type": "array", **least_one, "maxItems": http.max_batch_items}
    for struct in ("CompletionBody", "ChatBody", "ClassifyBody"):
        components[struct]["properties"]["model"] = {"const": model.name}
    for struct in ("ScoreBody", "TokenizeBody", "DetokenizeBody"):
        components[struct]["properties"]["model"].update(enum=[None, model.name])
    last_id = {"maximum": model.vocab_size - 1}
    for struct, name, kind, keywords in (
        ("CompletionBody", "max_tokens", "integer", {"maximum": context - 1}),
        ("CompletionBody", "max_completion_tokens", "integer", {"maximum": context - 1}),
        ("CompletionBody", "min_tokens", "integer", {"maximum": context - 1}),
        ("CompletionBody", "n", "integer", {"maximum": limit}),
        ("CompletionBody", "stop_token_ids", "integer", last_id),
        ("ChatBody", "max_completion_tokens", "integer", {"maximum": context - 1}),
        ("ChatBody", "min_tokens", "integer", {"maximum": context - 1}),
        ("ChatBody", "n", "integer", {"maximum": limit}),
        ("ChatBody", "stop_token_ids", "integer", last_id),
        ("ClassifyBody", "input", "array", {"maxItems": http.max_batch_items}),
        ("ScoreBody", "label_token_ids", "integer", last_id),
        ("DetokenizeBody", "tokens", "integer", last_id),
        ("DetokenizeBody", "tokens", "array", {"maxItems": context}),
    ):
        _restrict(components[struct]["properties"][name], kind, keywords)
    text, prompt_ids = {"type": "string", "minLength": 1}, {**ids, **least_one}
    components["CompletionBody"]["properties"]["prompt"] = {
        "anyOf": [
            text,
            {**several, "items": text.copy()},
            prompt_ids,
            {**several, "items": prompt_ids},
        ]
    }
    score = components["ScoreBody"]
    score["properties"]["query"] = {"type": ["string", "array"]}
    score["properties"]["items"] = {
        "type": ["string", "array"],
        "description": "Texts if query is a text, lists of token ids if it is one.",
    }
    texts = {"anyOf": [{"type": "string"}, {**several, "items": {"type": "string"}}]}
    score["anyOf"] = [
        {"properties": {"query": {"type": "string"}, "items": texts}},
        {"properties": {"query": ids, "items": {**several, "items": ids}}},
    ]


def _token_ids(model: ModelInfo) -> Schema:
    token_id = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    return {"type": "array", "items": token_id, "maxItems": model.max_context_tokens}


def _restrict(schema: Schema, kind: str, keywords: Schema) -> None:
    """Add `keywords` to every subschema of type `kind`, in place."""
    if schema.get("type") == kind:
        schema.update(keywords)
    for inner in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
        _restrict(inner, kind, keywords)


def _apply_combinations(components: dict[str, Schema]) -> None:
    """Add the rules across fields that hold for every request, in place.

    Other rules (`stream_options` needs `stream`) are documented 400s.
    """
    part, message = components["ContentPart"], components["ChatMessage"]
    part["required"].append("text")
    for properties, name in (
        (part["properties"], "text"),
        (components["StructuredOutputs"]["properties"], "choice"),
    ):
        properties[name] = properties[name]["anyOf"][0]  # null is rejected there
    content = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
    calls = {
        "required": ["tool_calls"],
        "properties": {"tool_calls": {"type": "array", "minItems": 1}},
    }
    message["anyOf"] = [content, calls]
    components["TokenizeBody"]["anyOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
    ]
