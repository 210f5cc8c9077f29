"""Odd JSON, huge bodies, slow bodies and broken connections do not affect later requests."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.api_harness import MODEL, Api, refused

USER: Any = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/classify": {"input": "a", "labels": ["yes", "no"]},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [60]},
}
DEPTH = 100_000


@pytest.fixture(autouse=True)
def _the_next_good_request_is_served(api: Api) -> Iterator[None]:
    yield
    assert api.post("/v1/completions", prompt="a").status_code == 200


def post_raw(api: Api, route: str, data: Any, content_type: str = "application/json") -> Any:
    return api.http.post(route, content=data, headers={"Content-Type": content_type})


def with_field(route: str, name: str, value: str) -> bytes:
    """Return a valid body with one more field of raw JSON."""
    good = json.dumps({"model": MODEL, **GOOD[route]})
    return f'{good[:-1]}, "{name}": {value}}}'.encode("utf-8", "surrogatepass")


ANYWHERE = {
    "deep lists": "[" * DEPTH + "]" * DEPTH,
    "deep objects": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "a float beyond floats": "1e400",
    "a lone surrogate": '"\\ud83d"',
    "a lone surrogate as bytes": '"\ud800"',
    "half of a pair, reversed": '"\\udc00\\ud800"',
    "a raw NUL": '"\0"',
    "a cut escape": '"\\u12"',
    "a trailing comma": "[1,]",
    "a comment": "1 /* one */",
}


@pytest.mark.parametrize("name", ["user", "model", "priority"])
@pytest.mark.parametrize("kind", ANYWHERE)
@pytest.mark.parametrize("route", GOOD)
def test_invalid_json_in_ignored_field_is_400(api: Api, route: str, kind: str, name: str) -> None:
    response = post_raw(api, route, with_field(route, name, ANYWHERE[kind]))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("route", GOOD)
def test_last_of_repeated_keys_counts(api: Api, route: str) -> None:
    assert post_raw(api, route, with_field(route, "model", '"other"')).status_code == 404
    assert post_raw(api, route, with_field(route, "model", f'"{MODEL}"')).status_code == 200


def test_body_may_begin_with_byte_order_mark_but_not_be_compressed(api: Api) -> None:
    route, data = "/v1/completions", with_field("/v1/completions", "model", f'"{MODEL}"')
    assert post_raw(api, route, b"\xef\xbb\xbf" + data).status_code == 200
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = api.http.post(route, content=gzip.compress(data), headers=headers)
    assert refused(response, 415, None, "gzip")["code"] == "unsupported_media_type"


def test_nul_characters_are_plain_text(api: Api) -> None:
    assert api.post("/v1/completions", prompt="\0").status_code == 200
    assert api.post("/v1/classify", input="\0", labels=["\0", "\0\0"]).status_code == 200
    assert api.post("/v1/completions", prompt="a", stop="\0").status_code == 200
    response = api.http.post("/v1/completions", json={"model": "ti\0ny", "prompt": "a"})
    assert response.status_code == 404


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("stream_option", "stream_options"),
        ("topk", "top_k"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_misspelled_field_is_rejected_with_suggestion(
    api: Api, path: str, typo: str, meant: str
) -> None:
    response = api.post(path, **GOOD[path], **{typo: 1})
    error = refused(response, 400, typo, f"did you mean {meant}?")
    assert error["code"] == "unknown_parameter"


@pytest.mark.parametrize("name", ["guided_yaml", "zzz", "a.b\n", "é" * 500])
@pytest.mark.parametrize("path", GOOD)
def test_unknown_field_gets_400_on_every_endpoint(api: Api, path: str, name: str) -> None:
    response = api.post(path, **GOOD[path], **{name: {"type": "object"}})
    param = name if name.isidentifier() and name.isascii() else response.json()["error"]["param"]
    assert refused(response, 400, param)["code"] == "unknown_parameter"
    assert len(param) <= 80


@pytest.mark.parametrize(
    ("fields", "param", "meant"),
    [
        (
            {"stream": True, "stream_options": {"include_use": True}},
            "stream_options.include_use",
            "include",
        ),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents", "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
            "messages[0].content[0].txt",
            "text",
        ),
    ],
)
def test_unknown_nested_field_is_named_with_path(
    api: Api, fields: dict[str, Any], param: str, meant: str
) -> None:
    response = api.post("/v1/chat/completions", **{"messages": USER, **fields})
    error = refused(response, 400, param, f"did you mean {meant}")
    assert error["code"] == "unknown_parameter"


@pytest.mark.parametrize("path", GOOD)
def test_ignored_fields_are_accepted_on_every_endpoint(api: Api, path: str) -> None:
    harmless = {
        "user": "someone",
        "metadata": {"k": "v"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
    }
    assert api.post(path, **GOOD[path], **harmless).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_neutral_values_of_unsupported_fields_are_accepted(api: Api, path: str) -> None:
    neutral = {"length_penalty": 1, "return_hidden_states": False, "rid": None}
    neutral |= {"no_stop_trim": False, "min_new_tokens": 0, "moderation": None}
    assert api.post(path, **GOOD[path], **neutral, prompt_cache_options=None).status_code == 200
    for name, value in (("rid", "r"), ("no_stop_trim", True), ("min_new_tokens", 1)):
        refused(api.post(path, **GOOD[path], **{name: value}), 400, name)


def test_cache_control_of_part_is_ignored(api: Api) -> None:
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part]}]
    assert api.post("/v1/chat/completions", messages=messages).status_code == 200


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "fields", [{"tool_calls": [CALL]}, {"reasoning_content": "cut"}, {"refusal": "no"}]
)
def test_answer_without_content_is_accepted_as_message(api: Api, fields: dict[str, Any]) -> None:
    """The template of these tests, as Qwen3's, needs a text."""
    answer = {"role": "assistant", "content": None, **fields}
    response = api.post("/v1/chat/completions", messages=[*USER, answer, *USER], top_logprobs=0)
    assert response.status_code == 200, response.text


def test_dumped_answer_is_accepted_as_message(api: Api) -> None:
    answer = api.openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=4)
    message: Any = answer.choices[0].message.model_dump()
    assert message.keys() >= {"refusal", "annotations", "audio", "function_call", "tool_calls"}
    messages: list[Any] = [*USER, {**message, "content": "x"}, *USER]
    again = api.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert again.choices


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_message_with_unsupported_field_is_rejected(api: Api, name: str) -> None:
    messages = [{"role": "assistant", "content": "x", name: {"id": "y"}}, *USER]
    refused(api.post("/v1/chat/completions", messages=messages), 400, f"messages[0].{name}")
