"""What the checks accept that depends on the model, the configuration or other fields, as JSON
Schema; what does not is said with the fields (`field_bounds.py`).

Of the rules across fields only those are expressed that every request meets; what breaks another
one (such as `stream_options` needs `stream`) is a documented 400.
"""

from __future__ import annotations

import copy

from cluster.http.cost import Bounds
from cluster.http.field_bounds import MAX_N, NULL, Schema
from cluster.http.schemas import ModelInfo
from cluster.http.scoring import MAX_LABEL_TOKENS
from contracts.config import HttpConfig
from contracts.sampling_limits import MAX_STOP_TOKENS


def request_bounds(model: ModelInfo, http: HttpConfig) -> dict[str, dict[str, Schema]]:
    """By struct and field: the schema to take instead of the one that the type gives."""
    context, limit = model.max_context_tokens, http.max_batch_items
    ids = _token_ids(model, context)
    several = {"type": "array", "minItems": 1, "maxItems": limit}
    text = {"type": "string", "minLength": 1}
    texts = [text, {**several, "items": text.copy()}]
    generation: dict[str, Schema] = {
        "model": {"const": model.name},
        "stop_token_ids": {"anyOf": [_token_ids(model, MAX_STOP_TOKENS, least=0), NULL]},
        "min_tokens": _integer(
            0, context - 1, "Nothing ends the answer before; at most max_tokens. Not with choices."
        ),
        "n": _integer(1, min(MAX_N, limit)),
    }
    maybe_model = {"enum": [None, model.name]}
    return {
        "CompletionBody": {
            **generation,
            "max_tokens": _integer(0, context - 1, "0 only with echo."),
            "prompt": {"anyOf": [*texts, ids, {**several, "items": ids}]},
        },
        "ChatBody": {
            **generation,
            "max_tokens": _integer(1, None, "Default: what fits behind the prompt."),
            "max_completion_tokens": _integer(1, context - 1, "Given: max_tokens does not count."),
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": {"$ref": "#/components/schemas/ChatMessage"},
            },
        },
        "ClassifyBody": {"model": {"const": model.name}, "input": {"anyOf": copy.deepcopy(texts)}},
        "ScoreBody": {
            "model": maybe_model,
            "query": {"type": ["string", "array"]},
            "items": {
                "type": ["string", "array"],
                "description": "Texts if query is a text, lists of token ids if it is one.",
            },
            "label_token_ids": _token_ids(model, MAX_LABEL_TOKENS),
        },
        "TokenizeBody": {"model": maybe_model},
        "DetokenizeBody": {"model": maybe_model, "tokens": _token_ids(model, context, least=0)},
    }


def _token_ids(model: ModelInfo, most: int, *, least: int = 1) -> Schema:
    token_id = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    return {"type": "array", "items": token_id, "minItems": least, "maxItems": most}


def _integer(low: int, high: int | None, description: str | None = None) -> Schema:
    extra = {} if description is None else {"description": description}
    within = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return {**extra, "anyOf": [{"type": "integer", **within}, NULL]}


def bound_together(components: dict[str, Schema], model: ModelInfo, http: HttpConfig) -> None:
    """The rules across fields that a client would stumble over, put into `components`."""
    part, message = components["ContentPart"], components["ChatMessage"]
    part["required"].append("text")
    for properties, name in (
        (part["properties"], "text"),
        (components["StructuredOutputs"]["properties"], "choice"),
    ):
        properties[name] = properties[name]["anyOf"][0]  # null is of no use there
    content = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
    calls = {
        "required": ["tool_calls"],
        "properties": {"tool_calls": {"type": "array", "minItems": 1}},
    }
    message["anyOf"] = [content, calls]
    ids = _token_ids(model, model.max_context_tokens, least=0)
    several = {"type": "array", "minItems": 1, "maxItems": http.max_batch_items}
    texts = {
        "query": {"type": "string"},
        "items": {"anyOf": [{"type": "string"}, {**several, "items": {"type": "string"}}]},
    }
    tokens = {"query": ids, "items": {**several, "items": ids}}
    components["TokenizeBody"]["anyOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array", "minItems": 1}}},
    ]
    components["ScoreBody"]["anyOf"] = [{"properties": texts}, {"properties": tokens}]


def bound_texts(components: dict[str, Schema], costs: Bounds) -> None:
    """A text that cannot fit the context is refused before it is tokenised."""
    most = costs.prompt_characters
    for struct, name in (("CompletionBody", "prompt"), ("ClassifyBody", "input")):
        alone, several = components[struct]["properties"][name]["anyOf"][:2]
        alone["maxLength"] = several["items"]["maxLength"] = most


def bounded(components: dict[str, Schema], bounds: dict[str, dict[str, Schema]]) -> None:
    """Puts `bounds` into msgspec's `components`, in place. Defaults stay."""
    for struct, fields in bounds.items():
        properties = components[struct]["properties"]
        for name, schema in fields.items():
            kept = {key: properties[name][key] for key in ("default",) if key in properties[name]}
            properties[name] = {**schema, **kept}
