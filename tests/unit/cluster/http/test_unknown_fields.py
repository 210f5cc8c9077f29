"""Unknown fields are rejected by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_harness import MODEL, Api, serve_api
from tests.support.fake_rank import FakeRank

CHAT: Any = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/classify": {"input": "a", "labels": ["b", "c"]},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
}


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [60])]) as api:
        yield api


def refused(api: Api, path: str, **fields: Any) -> dict[str, Any]:
    response = api.post(path, **fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == "unknown_parameter"
    assert "\n" not in error["message"]
    return error


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
    error = refused(api, path, **GOOD[path], **{typo: 1})
    assert error["param"] == typo
    assert f"did you mean {meant}?" in error["message"]


@pytest.mark.parametrize("name", ["regex", "json_schema", "zzz", "a.b\n", "é" * 500])
@pytest.mark.parametrize("path", GOOD)
def test_unknown_field_gets_400_on_every_endpoint(api: Api, path: str, name: str) -> None:
    error = refused(api, path, **GOOD[path], **{name: {"type": "object"}})
    assert len(error["param"]) <= 80
    if name.isidentifier() and name.isascii():
        assert error["param"] == name


@pytest.mark.parametrize(
    ("fields", "param", "meant"),
    [
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options", "include"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0]", "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
            "messages[0].content[0]",
            "text",
        ),
    ],
)
def test_unknown_nested_field_is_named_with_path(
    api: Api, fields: dict[str, Any], param: str, meant: str
) -> None:
    error = refused(api, "/v1/chat/completions", **{"messages": CHAT, **fields})
    assert error["param"].startswith(f"{param}.")
    assert f"did you mean {meant}" in error["message"]


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


def test_dumped_answer_is_accepted_as_message(api: Api) -> None:
    answer = api.openai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4)
    message: Any = answer.choices[0].message.model_dump()
    assert message.keys() >= {"refusal", "annotations", "audio", "function_call", "tool_calls"}
    messages: list[Any] = [*CHAT, {**message, "content": "x"}, *CHAT]
    again = api.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert again.choices


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_message_with_unsupported_field_is_rejected(api: Api, name: str) -> None:
    messages = [{"role": "assistant", "content": "x", name: {"id": "y"}}, *CHAT]
    response = api.post("/v1/chat/completions", messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"messages[0].{name}"
