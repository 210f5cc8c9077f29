"""What the checks accept beyond the types of a request's fields, as JSON Schema.

Per field, from the constants that `checks.py` and the endpoints enforce. Of the rules
across fields only those are expressed that every request meets; what breaks another one (such as
`stream_options` needs `stream`) is a documented 400.
"""

from __future__ import annotations

from typing import Any

from cluster.api.callers import MAX_CACHE_SALT_CHARACTERS
from cluster.api.checks import MAX_N, MAX_STOP_CHARACTERS, MAX_STOPS
from cluster.api.cost import Bounds
from cluster.api.guided import MAX_CHOICE_CHARACTERS
from cluster.api.schemas import ServedModel
from cluster.api.scoring import MAX_LABEL_TOKENS
from cluster.classification.classify import MAX_LABELS
from contracts.config import HttpConfig
from contracts.requests import Priority
from contracts.sampling_limits import (
    INT64,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
    RANGES,
)

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}


def request_bounds(model: ServedModel, http: HttpConfig) -> dict[str, dict[str, Schema]]:
    """By struct and field: the schema to take instead of the one that the type gives."""
    generation = _generation(model, http)
    return {
        "CompletionBody": {**generation, **_completion(model, http)},
        "ContentPart": {"type": {"const": "text"}, "text": {"type": "string"}},
        "ChatBody": {**generation, **_chat(model)},
        "StructuredOutputs": _structured(),
        "ClassifyBody": _classify(model, http),
        "ScoreBody": _score(model),
        "TokenizeBody": {"model": {"enum": [None, model.name]}},
        "DetokenizeBody": {
            "model": {"enum": [None, model.name]},
            "tokens": _token_ids(model, model.max_context_tokens, least=0),
        },
    }


def _generation(model: ServedModel, http: HttpConfig) -> dict[str, Schema]:
    return {
        "model": {"const": model.name},
        "temperature": _number(
            "Below 1e-5: the likeliest token. Applied in this order, as in vLLM: choices,"
            " min_tokens, logit_bias, repetition_penalty, frequency_penalty, presence_penalty,"
            " temperature, min_p, top_k, top_p. logprobs are of the distribution before all that.",
            minimum=0,
            maximum=2,
        ),
        "top_p": _number(exclusiveMinimum=0, maximum=1),
        "top_k": _integer(-1, INT64 - 1, "-1 and 0: no limit."),
        **_shaping(model),
        "seed": _integer(-INT64, INT64 - 1, "Choice i of a prompt draws from seed + i."),
        "stop": {
            "anyOf": [_stop(), {"type": "array", "maxItems": MAX_STOPS, "items": _stop()}, NULL]
        },
        "n": _integer(1, min(MAX_N, http.max_batch_items)),
        "best_of": _integer(1, MAX_N, "Only as large as n."),
        "priority": _priority(),
        "cache_salt": _cache_salt(),
    }


def _structured() -> dict[str, Schema]:
    only = {"description": "Not supported.", "type": "null"}
    names = ("grammar", "json", "json_object", "regex", "structural_tag")
    return {"choice": _choice(), **dict.fromkeys(names, only)}


def _choice() -> Schema:
    texts = {"type": "string", "minLength": 1}
    return {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": texts}


def _shaping(model: ServedModel) -> dict[str, Schema]:
    """The fields that change logits, or say when a sequence ends."""
    low, high = RANGES["repetition_penalty"]
    bias = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    guided = f"The answer is one of these texts, of {MAX_CHOICE_CHARACTERS} characters together."
    return {
        "min_p": _number("Of the likeliest token's probability.", minimum=0, maximum=1),
        "presence_penalty": _number("Of generated tokens.", minimum=-2, maximum=2),
        "frequency_penalty": _number("Of generated tokens.", minimum=-2, maximum=2),
        "repetition_penalty": _number("Of all tokens.", minimum=low, maximum=high),
        "logit_bias": {
            "description": "By token id.",
            "type": ["object", "null"],
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": bias,
        },
        "stop_token_ids": {"anyOf": [_token_ids(model, MAX_STOP_TOKENS, least=0), NULL]},
        "min_tokens": _integer(
            0,
            model.max_context_tokens - 1,
            "Nothing ends the answer before; at most max_tokens. Not with choices.",
        ),
        "guided_choice": {"description": guided, "anyOf": [_choice(), NULL]},
    }


def _completion(model: ServedModel, http: HttpConfig) -> dict[str, Schema]:
    context, limit = model.max_context_tokens, http.max_batch_items
    ids = _token_ids(model, context)
    prompts = {"minItems": 1, "maxItems": limit}
    return {
        "max_tokens": _integer(0, context - 1, "0 only with echo."),
        "logprobs": _integer(0, MAX_LOGPROBS, "Alternatives per token."),
        "prompt": {
            "anyOf": [
                _text(),
                {"type": "array", "items": _text(), **prompts},
                ids,
                {"type": "array", "items": ids, **prompts},
            ]
        },
    }


def _chat(model: ServedModel) -> dict[str, Schema]:
    most = model.max_context_tokens - 1
    return {
        "max_tokens": _integer(1, None, "Default: what fits behind the prompt."),
        "max_completion_tokens": _integer(1, most, "Given: max_tokens does not count."),
        "top_logprobs": _integer(0, MAX_LOGPROBS, "Alternatives per token; needs logprobs."),
        "echo": {"enum": [None, False]},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/components/schemas/ChatMessage"},
        },
    }


def _classify(model: ServedModel, http: HttpConfig) -> dict[str, Schema]:
    return {
        "model": {"const": model.name},
        "input": {
            "anyOf": [
                _text(),
                {
                    "type": "array",
                    "items": _text(),
                    "minItems": 1,
                    "maxItems": http.max_batch_items,
                },
            ]
        },
        "labels": {
            "type": "array",
            "items": {"type": "string", "pattern": r"\S"},
            "minItems": 1,
            "maxItems": MAX_LABELS,
            "uniqueItems": True,
        },
        "multi_label": {
            "description": "Each label by itself: yes or no? Needs a template with {label}.",
            "type": ["boolean", "null"],
        },
        "template": {
            "description": "{text}, {prefix}, with multi_label {label}, are filled in. {options}"
            " lists the labels, a letter each: the letters are then scored. A label's score is the"
            " sum of its tokens' log-probabilities, not divided by its length.",
            "anyOf": [{"type": "string", "pattern": r"\{text\}"}, NULL],
        },
        "priority": _priority(),
        "cache_salt": _cache_salt(),
    }


def _score(model: ServedModel) -> dict[str, Schema]:
    return {
        "model": {"enum": [None, model.name]},
        "query": {"type": ["string", "array"]},
        "items": {
            "type": ["string", "array"],
            "description": "Texts if query is a text, lists of token ids if it is one.",
        },
        "label_token_ids": _token_ids(model, MAX_LABEL_TOKENS),
        "priority": _priority(),
        "cache_salt": _cache_salt(),
    }


def _text() -> Schema:
    return {"type": "string", "minLength": 1}


def _stop() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}


def _token_ids(model: ServedModel, most: int, *, least: int = 1) -> Schema:
    token_id = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    return {"type": "array", "items": token_id, "minItems": least, "maxItems": most}


def _cache_salt() -> Schema:
    return {
        "description": "Prefixes are found again only by requests with the same one.",
        "anyOf": [{"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_CHARACTERS}, NULL],
    }


def _priority() -> Schema:
    names = [priority.label for priority in Priority]
    return {
        "description": "Latency-sensitive (ls, 0) goes before best-effort (be, above 0).",
        "anyOf": [{"enum": names}, {"type": "integer", "minimum": 0}, NULL],
    }


def _integer(low: int, high: int | None, description: str | None = None) -> Schema:
    told = {} if description is None else {"description": description}
    within = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return {**told, "anyOf": [{"type": "integer", **within}, NULL]}


def _number(description: str | None = None, **bounds: float) -> Schema:
    told = {} if description is None else {"description": description}
    return {**told, "anyOf": [{"type": "number", **bounds}, NULL]}


def bound_together(components: dict[str, Schema], model: ServedModel, http: HttpConfig) -> None:
    """The rules across fields that a client would stumble over, put into `components`."""
    part, message = components["ContentPart"], components["ChatMessage"]
    del part["properties"]["text"]["default"]
    part["required"].append("text")
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
