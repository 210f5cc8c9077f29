"""Invalid requests get a 4xx with an OpenAI error body, never a 5xx."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.http.body import decode_body
from cluster.http.schemas import CompletionBody
from contracts.config import HttpConfig
from contracts.errors import RequestError
from tests.support.api_harness import CONTEXT_TOKENS, Api, refused, serve_api

USER = [{"role": "user", "content": "Hello"}]
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/classify", "/v1/score")
MAX_BODY_BYTES = 100_000


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    http = HttpConfig(max_body_bytes=MAX_BODY_BYTES, max_batch_items=64)
    with serve_api(folder, None, http) as api:
        yield api


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**64]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": CONTEXT_TOKENS}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 5.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1e300}, "max_tokens"),
    ({"prompt": "a", "n": 1.0, "top_k": 5.5}, "top_k"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "top_p": 1.01}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop[0]"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "priority": "urgent"}, "priority"),
    ({"prompt": "a", "priority": -1}, "priority"),
    ({"prompt": "a", "service_tier": "felx"}, "service_tier"),
    ({"prompt": "a", "suffix": "z"}, "suffix"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"prompt": "a", "guided_regex": "(a"}, "guided_regex"),
    ({"prompt": "a", "use_beam_search": 0.0}, "use_beam_search"),
    ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"٣": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "max_tokens": 12, "min_tokens": 13}, "min_tokens"),
]


NAME_OF_TOOL = "tools[0].function.name"
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens"),
    ({"messages": USER, "max_tokens": -1, "max_completion_tokens": 5}, "max_tokens"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": USER, "max_completion_tokens": 10**6}, "max_tokens"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "logprobs": 2}, "logprobs"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": USER, "tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": ""}}]}, NAME_OF_TOOL),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": USER, "echo": True}, "echo"),
    ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]
BAD_CLASSIFICATIONS: list[tuple[dict[str, Any], str]] = [
    ({"labels": ["a"]}, "input"),
    ({"input": "x"}, "labels"),
    ({"input": "x", "labels": []}, "labels"),
    ({"input": "x", "labels": "a"}, "labels"),
    ({"input": "x", "labels": ["a", "a"]}, "labels"),
    ({"input": "x", "labels": ["a", " "]}, "labels"),
    ({"input": "x", "labels": [str(i) for i in range(257)]}, "labels"),
    ({"input": [], "labels": ["a"]}, "input"),
    ({"input": ["x", ""], "labels": ["a"]}, "input"),
    ({"input": "   ", "labels": ["a"]}, "input"),
    ({"input": ["x"] * 65, "labels": ["a"]}, "input"),
    ({"input": "x", "labels": ["a"], "template": "no place"}, "template"),
    ({"input": "x", "labels": ["a"], "template": "{text}", "prefix": "p"}, "template"),
    ({"input": "x", "labels": ["a"], "multi_label": True}, "template"),
    ({"input": "x", "labels": ["a"], "multi_label": True, "template": "{text}"}, "template"),
    ({"input": "x", "labels": ["a"], "multi_label": True, "template": "{label}"}, "template"),
    (
        {
            "input": ["x"] * 33,
            "labels": ["a", "b"],
            "multi_label": True,
            "template": "{text} {label}",
        },
        "input",
    ),
]
BAD_SCORES: list[tuple[dict[str, Any], str]] = [
    ({"items": ["a"]}, "query"),
    ({"query": "a"}, "items"),
    ({"query": "a", "items": []}, "items"),
    ({"query": "a", "items": [[1]]}, "items"),
    ({"query": [70], "items": ["a"]}, "items"),
    ({"query": "", "items": [""]}, "items"),
    ({"query": [-1], "items": [[1]]}, "items"),
    ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
    ({"query": "a", "items": ["b"], "label_token_ids": [10**6]}, "label_token_ids"),
    ({"query": "a", "items": ["b"], "apply_softmax": "yes"}, "apply_softmax"),
]
OTHERS: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/score", {"query": "a", "items": ["b"], "model": "other"}, 404, "model"),
    ("/v1/score", {"query": [70] * CONTEXT_TOKENS, "items": [[70]]}, 413, "items"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "prompt"),
    ("/tokenize", {"prompt": 1}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "messages"),
    *(
        (path, {"messages": USER, "continue_final_message": True, **more}, 400, param)
        for path in ("/tokenize", "/v1/chat/completions")
        for more, param in (
            ({}, "continue_final_message"),
            ({"add_generation_prompt": True}, "continue_final_message"),
            ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        )
    ),
    ("/tokenize", {"prompt": "a " * 40_000}, 413, "prompt"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": USER * (CONTEXT_TOKENS + 1)}, 413, "messages"),
    ("/tokenize", {"prompt": "a", "promt": "b"}, 400, "promt"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/detokenize", {"tokens": [5] * (CONTEXT_TOKENS + 1)}, 413, "tokens"),
    ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
]
BAD = [
    *(("/v1/completions", body, 400, param) for body, param in BAD_COMPLETIONS),
    *(("/v1/chat/completions", body, 400, param) for body, param in BAD_CHATS),
    *(("/v1/classify", body, 400, param) for body, param in BAD_CLASSIFICATIONS),
    *(("/v1/score", body, 400, param) for body, param in BAD_SCORES),
    *OTHERS,
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_field_is_named_and_reaches_no_rank(
    api: Api, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    if path == "/v1/score":
        body = {"label_token_ids": [60], **body}
    refused(api.post(path, **body), status, param)
    assert api.rank.submits.empty()


BOUND_ERRORS: list[tuple[bytes, str]] = [
    (b'"n": 0', "n=0 must be at least 1"),
    (b'"n": 129', "n=129 must be at most 128"),
    (b'"top_p": 0', "top_p=0 must be above 0"),
    (b'"logit_bias": {"5": 1, "7": -101}', "logit_bias['7']=-101 must be at least -100"),
    (b'"logit_bias": {"x": 1}', "logit_bias: key 'x' does not match ^[0-9]{1,10}$"),
    (b'"stop": ["a", ""]', "stop[1] is empty"),
    (b'"stop": [%b"a"]' % (b'"a",' * 16), "stop has 17 entries, at most 16 are accepted"),
    (b'"stop": ["a", ""], "stop": 3', "stop[1]: Expected `str` of length >= 1"),
    (b'"n": 0, "user": ', "the body is not valid JSON: JSON is malformed"),
]


@pytest.mark.parametrize(("field", "message"), BOUND_ERRORS)
def test_bound_error_names_field_value_and_bound(field: bytes, message: str) -> None:
    body = b'{"model": "tiny", "prompt": "a", ' + field + b"}"
    with pytest.raises(RequestError) as caught:
        decode_body(body, CompletionBody)
    assert caught.value.message.startswith(message)


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"model": "tiny", "temperature": 1e999, "prompt": "a"}',
    b'{"model": "tiny", "max_tokens": ' + b"9" * 5000 + b"}",
    b"[" * 50_000,
    b'{"model": "tiny", "chat_template_kwargs": ' + b'{"a":' * 9000 + b"1" + b"}" * 9001,
    b'{"model": "tiny", "tools": ' + b"[" * 9000 + b"]" * 9000 + b"}",
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("data", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_unusable_json_gets_400(api: Api, route: str, data: bytes) -> None:
    response = api.http.post(route, content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_body_over_limit_gets_413_declared_or_chunked(api: Api) -> None:
    data = b'{"model": "tiny", "prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    declared = api.http.post("/v1/completions", content=data, headers=headers)
    chunked = api.http.post("/v1/completions", content=iter([data]), headers=headers)
    refused(declared, 413, None)
    refused(chunked, 413, None)


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        *((kind, 400) for kind in ("", "text/json", "application/vnd.api+json; a=b", "TEXT/JSON")),
        *((kind, 415) for kind in ("text/csv", "text/plain; +json", "text/plain, text/x+json")),
    ],
)
def test_only_json_content_types_are_read(api: Api, media_type: str, status: int) -> None:
    headers = {"Content-Type": media_type}
    assert api.http.post("/v1/score", content=b"{}", headers=headers).status_code == status
    response = api.http.post("/scale", content=b"{}", headers=headers)
    assert response.status_code == (415 if not media_type else status)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_wrong_routes_and_methods_get_common_error_body(
    api: Api, method: str, path: str, status: int
) -> None:
    refused(api.http.request(method, path), status, None)


def test_prompt_beyond_context_gets_413_with_both_numbers(api: Api) -> None:
    response = api.post("/v1/completions", prompt=[70] * (CONTEXT_TOKENS + 5))
    refused(response, 413, "prompt", str(CONTEXT_TOKENS + 5), str(CONTEXT_TOKENS))


def test_full_context_allows_scoring_but_no_generation(api: Api) -> None:
    full = [70] * CONTEXT_TOKENS
    scored = api.post("/v1/completions", prompt=full, max_tokens=0, echo=True, logprobs=0)
    assert scored.status_code == 200
    assert api.post("/v1/completions", prompt=full).status_code == 413


def test_default_max_tokens_is_reduced_to_remaining_context(api: Api) -> None:
    response = api.post("/v1/completions", prompt=[70] * (CONTEXT_TOKENS - 1))
    assert response.json()["usage"]["completion_tokens"] == 1
